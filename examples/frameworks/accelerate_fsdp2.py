"""Hugging Face Accelerate with FSDP2: checkpoints by replicated_ckpt, in place of `accelerator.save_state`."""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, set_seed
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from replicated_ckpt import CheckpointManager


class AppState(Stateful):
    """Model and optimizer as DCP saves them: sharded, under the model's own names."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state_dict):
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state_dict["model"], optim_state_dict=state_dict["optim"]
        )


def data(samples: int) -> TensorDataset:
    """Made-up regression data, the same on every rank."""
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(samples, 16, generator=generator)
    return TensorDataset(inputs, inputs.square().sum(dim=1, keepdim=True))


def train(accelerator: Accelerator, root: Path, steps: int, save_every: int) -> None:
    """From wherever we are to `steps`."""
    set_seed(1)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    loader = DataLoader(data(512), batch_size=8, shuffle=True)
    if accelerator.distributed_type == DistributedType.FSDP:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    else:  # accelerate shards on accelerators only; on CPUs it would take DDP, without a word
        model = accelerator.prepare_model(fully_shard(model), evaluation_mode=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        optimizer, loader = accelerator.prepare(optimizer, loader)
    state = {"app": AppState(model, optimizer.optimizer)}
    with CheckpointManager(root, every=save_every) as manager:
        step = manager.restore_latest(state) or 0
        accelerator.print(f"starting at step {step} on {accelerator.num_processes} ranks")
        while step < steps:
            loader.set_epoch(step // len(loader))
            for inputs, targets in accelerator.skip_first_batches(loader, step % len(loader)):
                loss = nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                if manager.should_save(step):
                    manager.save(step, state)
                    accelerator.print(f"step {step}: loss {loss.item():.4f}, saved")
                if step == steps:
                    break


def main() -> None:
    """One rank, started by `accelerate launch` or torchrun."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="this node's store: a directory on a node-local disk")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=5)
    arguments = parser.parse_args()

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=1, reshard_after_forward=True
    )
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), fsdp_plugin=plugin)
    train(accelerator, arguments.root, arguments.steps, arguments.save_every)
    accelerator.end_training()


if __name__ == "__main__":
    main()
