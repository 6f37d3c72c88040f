"""A user's Fabric loop over epochs, saved by a CheckpointManager as on the documentation page."""

import argparse
import json
import os
import signal
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import DataLoader, TensorDataset

from replicated_ckpt import CheckpointManager, RankState, ReplayedLoader


class Training(Stateful):
    """The model and optimizer that Fabric has wrapped, under the model's own names."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        self.model, self.optimizer = model.module, optimizer.optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )


def main() -> None:
    """One rank, started by torchrun."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--hold-at", type=int, default=-1)
    arguments = parser.parse_args()
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    nodes = int(os.environ["WORLD_SIZE"]) // local
    fabric = lightning.Fabric(accelerator="cpu", strategy="ddp", devices=local, num_nodes=nodes)
    fabric.launch()
    fabric.seed_everything(7 + fabric.global_rank, verbose=False)
    inputs = torch.randn(48, 16, generator=torch.Generator().manual_seed(7))
    data = TensorDataset(inputs, inputs.square().sum(dim=1, keepdim=True))
    plain = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.3), nn.ReLU(), nn.Linear(64, 1))
    model, optimizer = fabric.setup(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer.optimizer, T_max=20)
    loader = ReplayedLoader(fabric.setup_dataloaders(DataLoader(data, batch_size=4, shuffle=True)))
    rank = RankState(data=loader)
    state: dict[str, Any] = {"training": Training(model, optimizer), "schedule": schedule, "epoch": 0, "rank": rank}
    with CheckpointManager(arguments.root, every=2) as manager:
        step = manager.restore(state) or 0
        for epoch in range(state["epoch"] + loader.is_epoch_over(), 3):
            state["epoch"] = epoch
            for batch, targets in loader:
                loss = nn.functional.mse_loss(model(batch), targets)
                fabric.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                step += 1
                line = {"step": step, "epoch": epoch, "batch": batch.sum().item(), "loss": loss.item()}
                line["weights"] = sum(each.detach().double().sum().item() for each in plain.parameters())
                with (arguments.out / f"rank-{fabric.global_rank}.jsonl").open("a") as out:
                    out.write(json.dumps({**line, "lr": schedule.get_last_lr()}) + "\n")
                if step == arguments.hold_at:
                    os.kill(os.getpid(), signal.SIGSTOP)  # until the test kills it
                if manager.should_save(step):
                    manager.save(step, state)


if __name__ == "__main__":
    main()
