"""A user's Accelerate program: schedule, accumulation, dropout, shuffled data, a registered object. Only the
Accelerator is ours.
"""

import argparse
import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedDataParallelKwargs, ProjectConfiguration, set_seed
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from replicated_ckpt.integrations.accelerate import ReplicatedAccelerator


class Progress:
    """The position of the training loop."""

    def __init__(self) -> None:
        self.epoch = self.batch = self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        vars(self).update(state_dict)


def train(arguments: argparse.Namespace, accelerator: ReplicatedAccelerator, out: Path) -> None:
    """Trains from the loaded position to the end of the third epoch."""
    set_seed(1)
    model: Any = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.3), nn.ReLU(), nn.Linear(64, 1))
    if arguments.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(target_modules=["0", "3"]))
    inputs = torch.randn(96, 16, generator=torch.Generator().manual_seed(7))
    data = TensorDataset(inputs, inputs.square().sum(dim=1, keepdim=True))
    loader: Any = DataLoader(data, batch_size=4, shuffle=True)
    if arguments.sharded:  # accelerate shards only on accelerators; on CPUs it silently uses DDP
        model = accelerator.prepare_model(fully_shard(model), evaluation_mode=True)
    else:
        model = accelerator.prepare(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
    optimizer, schedule, loader = accelerator.prepare(optimizer, schedule, loader)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    set_seed(1 + accelerator.process_index)
    accelerator.load_state()
    while progress.epoch < 3:
        loader.set_epoch(progress.epoch)
        for inputs, targets in accelerator.skip_first_batches(loader, progress.batch):
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if progress.step + 1 == arguments.raise_at and accelerator.process_index == accelerator.num_processes - 1:
                raise RuntimeError("raised on purpose")
            progress.batch += 1
            progress.step += 1
            line = {"step": progress.step, "batch": inputs.sum().item(), "loss": loss.item()}
            if accelerator.scaler is not None:
                line["scale"] = accelerator.scaler.get_scale()
            with out.open("a") as file:
                file.write(json.dumps({**line, "lr": optimizer.param_groups[0]["lr"]}) + "\n")
            if progress.step % 4 == 0:
                accelerator.save_state(f"checkpoint-{progress.step}")
            if progress.step == arguments.hold_at:
                os.kill(os.getpid(), signal.SIGSTOP)  # until the test kills it
        progress.epoch, progress.batch = progress.epoch + 1, 0
    weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    with out.open("a") as file:
        file.write(json.dumps({"weights": [weight.double().sum().item() for weight in weights]}) + "\n")


def main() -> None:
    """One rank, started by torchrun."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--hold-at", type=int, default=-1)
    parser.add_argument("--raise-at", type=int, default=-1)
    parser.add_argument("--scaled", action="store_true")
    parser.add_argument("--sharded", action="store_true")
    parser.add_argument("--lora", action="store_true")
    arguments = parser.parse_args()
    one_order = DistributedDataParallelKwargs(
        find_unused_parameters=True
    )  # else DDP rebuilds its buckets and sums in another order
    accelerator = ReplicatedAccelerator(
        cpu=True,
        kwargs_handlers=[one_order],
        gradient_accumulation_steps=2,
        project_config=ProjectConfiguration(total_limit=2),
        replicated_root=arguments.root,
    )
    if arguments.scaled:  # accelerate creates a scaler only for fp16 on accelerators
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    train(arguments, accelerator, arguments.out / f"rank-{os.environ['RANK']}.jsonl")
    accelerator.end_training()


if __name__ == "__main__":
    main()
