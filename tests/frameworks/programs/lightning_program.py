"""A user's Lightning program: schedule, accumulation, dropout, shuffling, validation, callbacks. Only the strategy is
ours.
"""

import argparse
import json
import os
import signal
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from replicated_ckpt.integrations.lightning import ReplicatedDDPStrategy, ReplicatedModelParallelStrategy


class Regression(lightning.LightningModule):
    """A small network with dropout, under either strategy."""

    def __init__(self, sharded: bool) -> None:
        super().__init__()
        self.sharded = sharded
        self.save_hyperparameters()
        self.layers: Any = None

    def configure_model(self) -> None:
        if self.layers is not None:
            return
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.3), nn.ReLU(), nn.Linear(64, 1))
        if self.sharded:
            for layer in self.layers:
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.layers(inputs), targets)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        inputs, targets = batch
        self.log("val_loss", nn.functional.mse_loss(self.layers(inputs), targets), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Recorder(lightning.Callback):
    """Writes a line for each step of this rank. Stops the process or raises at the requested step."""

    def __init__(self, out: Path, hold_at: int, raise_at: int) -> None:
        self.out, self.hold_at, self.raise_at = out, hold_at, raise_at

    def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
        if trainer.global_step == self.raise_at and trainer.global_rank == trainer.world_size - 1:
            raise RuntimeError("raised on purpose")

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        line = {"step": trainer.global_step, "batch": batch[0].sum().item(), "loss": outputs["loss"].item()}
        line |= {"lr": trainer.optimizers[0].param_groups[0]["lr"], "index": batch_idx}
        if trainer.scaler is not None:
            line["scale"] = trainer.scaler.get_scale()
        with self.out.open("a") as out:
            out.write(json.dumps(line) + "\n")
        if trainer.global_step == self.hold_at:
            os.kill(os.getpid(), signal.SIGSTOP)  # until the test kills it

    def on_train_end(self, trainer: Any, module: Any) -> None:
        weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in module.parameters()]
        line: dict[str, Any] = {"metrics": {k: v.item() for k, v in trainer.callback_metrics.items()}}
        line["weights"] = [w.double().sum().item() for w in weights]
        line["best"] = Path(trainer.checkpoint_callback.best_model_path).name
        with self.out.open("a") as out:
            out.write(json.dumps(line) + "\n")


def main() -> None:
    """One rank, started by torchrun."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--hold-at", type=int, default=-1)
    parser.add_argument("--raise-at", type=int, default=-1)
    parser.add_argument("--save-on-exception", action="store_true")
    parser.add_argument("--strategy", default="fsdp2")
    parser.add_argument("--resume", default="latest")
    arguments = parser.parse_args()
    out = Path(arguments.out) / f"rank-{os.environ['RANK']}.jsonl"
    lightning.seed_everything(7 + int(os.environ["RANK"]))
    inputs = torch.randn(96, 16, generator=torch.Generator().manual_seed(7))
    data = TensorDataset(inputs, inputs.square().sum(dim=1, keepdim=True))
    if arguments.strategy == "ddp":
        strategy: Any = ReplicatedDDPStrategy(root=arguments.root, find_unused_parameters=True)  # docs/frameworks.md
    else:
        strategy = ReplicatedModelParallelStrategy(
            root=arguments.root, data_parallel_size=int(os.environ["WORLD_SIZE"]), tensor_parallel_size=1
        )
    recorder, plugins = Recorder(out, arguments.hold_at, arguments.raise_at), []
    if arguments.strategy == "ddp":
        plugins = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3))]
    checkpoints = ModelCheckpoint(
        dirpath=Path(arguments.out) / "checkpoints",
        every_n_train_steps=2,
        save_top_k=2,
        monitor="loss",
        save_last=True,
        save_on_exception=arguments.save_on_exception,
    )
    trainer = lightning.Trainer(
        max_epochs=3,
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=strategy,
        plugins=plugins,
        accumulate_grad_batches=2,
        callbacks=[checkpoints, EarlyStopping("val_loss", patience=5), recorder],
        logger=False,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=None,
    )
    loader = DataLoader(data, batch_size=4, shuffle=True)
    validation = DataLoader(data, batch_size=16)
    trainer.fit(Regression(arguments.strategy == "fsdp2"), loader, validation, ckpt_path=arguments.resume)


if __name__ == "__main__":
    main()
