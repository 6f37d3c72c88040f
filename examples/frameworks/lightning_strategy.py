"""PyTorch Lightning with FSDP2: one line names the strategy. ModelCheckpoint and `ckpt_path` keep their meaning.

Restored: model, optimizer, schedule, loops, callbacks, the position in the data, and each rank's random generators.
Gradients are not restored: ModelCheckpoint saves between optimizer steps.
"""

import argparse
import os
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from replicated_ckpt.integrations.lightning import ReplicatedModelParallelStrategy


class Regression(lightning.LightningModule):
    """A small network, sharded by FSDP2."""

    def configure_model(self) -> None:
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.1), nn.ReLU(), nn.Linear(64, 1))
        for layer in self.layers:
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        return nn.functional.mse_loss(self.layers(inputs), targets)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class PrintProgress(lightning.Callback):
    """Prints the first step, and each save."""

    def __init__(self, every: int) -> None:
        self.every = every

    def on_train_start(self, trainer, module):
        if trainer.is_global_zero:
            print(f"starting at step {trainer.global_step} on {trainer.world_size} ranks", flush=True)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.is_global_zero and trainer.global_step % self.every == 0:
            print(f"step {trainer.global_step}: loss {outputs['loss'].item():.6f}, saved", flush=True)


def main() -> None:
    """One rank, started by torchrun."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="this node's store: a directory on a node-local disk")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=5)
    arguments = parser.parse_args()
    world, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    lightning.seed_everything(1 + int(os.environ["RANK"]))
    inputs = torch.randn(96, 16, generator=torch.Generator().manual_seed(7))
    data = DataLoader(TensorDataset(inputs, inputs.square().sum(dim=1, keepdim=True)), batch_size=8, shuffle=True)
    trainer = lightning.Trainer(
        strategy=ReplicatedModelParallelStrategy(root=arguments.root, data_parallel_size=world, tensor_parallel_size=1),
        callbacks=[
            ModelCheckpoint(dirpath=arguments.root, every_n_train_steps=arguments.save_every, save_top_k=-1),
            PrintProgress(arguments.save_every),
        ],
        max_steps=arguments.steps,
        accelerator="gpu" if torch.cuda.device_count() >= local else "cpu",
        devices=local,
        num_nodes=world // local,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Regression(), data, ckpt_path="latest")


if __name__ == "__main__":
    main()
