"""PyTorch Lightning: a callback saves to replicated_ckpt and restores from it, in place of ModelCheckpoint."""

import argparse
import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, IterableDataset

from replicated_ckpt import CheckpointManager

BATCH = 8


class Samples(IterableDataset):
    """Made-up regression data. It knows how far it has been read, and begins there: this is what resumes the data."""

    def __init__(self) -> None:
        self.step = 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        rank, world = dist.get_rank(), dist.get_world_size()
        for step in count(self.step):
            for index in range(BATCH):
                generator = torch.Generator().manual_seed((step * world + rank) * BATCH + index)
                inputs = torch.randn(16, generator=generator)
                yield inputs, inputs.square().sum(dim=0, keepdim=True)


class Regression(lightning.LightningModule):
    """A small network, sharded by FSDP2."""

    def configure_model(self) -> None:
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
        for layer in self.layers:
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        return nn.functional.mse_loss(self.layers(inputs), targets)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class AppState(Stateful):
    """Model, optimizer and Lightning's place in the loops, as DCP saves them."""

    def __init__(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        self.trainer, self.module = trainer, module

    def state_dict(self):
        model, optimizer = get_state_dict(self.module, self.trainer.optimizers)
        return {"model": model, "optim": optimizer, "fit_loop": self.trainer.fit_loop.state_dict()}

    def load_state_dict(self, state_dict):
        set_state_dict(
            self.module,
            self.trainer.optimizers,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optim"],
        )
        self.trainer.fit_loop.load_state_dict(state_dict["fit_loop"])


class Checkpoints(lightning.Callback):
    """Restores once model and optimizer are there and before data is read, and saves when a batch ends."""

    def __init__(self, root: Path, every: int, samples: Samples) -> None:
        self.root, self.every, self.samples = root, every, samples

    def on_fit_start(self, trainer, pl_module):
        self.manager = CheckpointManager(self.root, every=self.every)
        self.state = {"app": AppState(trainer, pl_module)}
        step = self.manager.restore_latest(self.state) or 0
        self.samples.step = step
        if trainer.is_global_zero:
            print(f"starting at step {step} on {trainer.world_size} ranks", flush=True)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if self.manager.should_save(trainer.global_step):
            self.manager.save(trainer.global_step, self.state)
            if trainer.is_global_zero:
                print(f"step {trainer.global_step}: loss {outputs['loss'].item():.4f}, saved", flush=True)
        trainer.should_stop = trainer.should_stop or self.manager.preempted

    def on_train_end(self, trainer, pl_module):
        self.manager.close()


def main() -> None:
    """One rank, started by torchrun."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="this node's store: a directory on a node-local disk")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=5)
    arguments = parser.parse_args()
    samples = Samples()
    trainer = lightning.Trainer(
        accelerator="auto",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        strategy=ModelParallelStrategy(data_parallel_size=int(os.environ["WORLD_SIZE"]), tensor_parallel_size=1),
        max_steps=arguments.steps,
        callbacks=[Checkpoints(arguments.root, arguments.save_every, samples)],
        enable_checkpointing=False,  # the callback saves
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Regression(), DataLoader(samples, batch_size=BATCH))


if __name__ == "__main__":
    main()
