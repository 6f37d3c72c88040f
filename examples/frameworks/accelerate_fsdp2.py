"""Hugging Face Accelerate with FSDP2: one line names the class. `save_state` and `load_state` keep their meaning.

Restored: model, optimizer, schedule, registered objects, the position in the data, and each rank's random generators.
Random numbers that a data set draws in the main process are not restored, because Accelerate reads a batch ahead.
"""

import argparse
from pathlib import Path

import torch
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, set_seed
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from replicated_ckpt.integrations.accelerate import ReplicatedAccelerator


class Progress:
    """Position of the loop."""

    def __init__(self) -> None:
        self.step = self.batch = self.epoch = 0

    def state_dict(self):
        return dict(vars(self))

    def load_state_dict(self, state_dict):
        vars(self).update(state_dict)


def train(accelerator: ReplicatedAccelerator, steps: int, save_every: int) -> None:
    """Trains from the newest checkpoint to `steps`."""
    set_seed(1)
    model = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.1), nn.ReLU(), nn.Linear(64, 1))
    inputs = torch.randn(96, 16, generator=torch.Generator().manual_seed(7))
    loader = DataLoader(TensorDataset(inputs, inputs.square().sum(dim=1, keepdim=True)), batch_size=8, shuffle=True)
    if accelerator.distributed_type == DistributedType.FSDP:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    else:  # on CPUs, Accelerate uses DDP instead of FSDP, without a warning
        model = accelerator.prepare_model(fully_shard(model), evaluation_mode=True)
        optimizer, loader = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2), loader)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    accelerator.load_state()
    accelerator.print(f"starting at step {progress.step} on {accelerator.num_processes} ranks")
    while progress.step < steps:
        loader.set_epoch(progress.epoch)
        for inputs, targets in accelerator.skip_first_batches(loader, progress.batch):
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            progress.step, progress.batch = progress.step + 1, progress.batch + 1
            if progress.step % save_every == 0:
                accelerator.save_state(f"checkpoint-{progress.step}")
                accelerator.print(f"step {progress.step}: loss {loss.item():.6f}, saved")
            if progress.step == steps:
                return
        progress.epoch, progress.batch = progress.epoch + 1, 0


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
    accelerator = ReplicatedAccelerator(
        cpu=not torch.cuda.is_available(), fsdp_plugin=plugin, replicated_root=arguments.root
    )
    train(accelerator, arguments.steps, arguments.save_every)
    accelerator.end_training()


if __name__ == "__main__":
    main()
