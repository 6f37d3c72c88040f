"""The calls that torchtitan's Trainer makes on its checkpoint manager, on CPUs, where the Trainer does not run."""

import argparse
import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

from replicated_ckpt.integrations.torchtitan import ReplicatedCheckpointManager


class Optimizers:
    """Like torchtitan's container: the state is under the parameters' names."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def state_dict(self) -> dict[str, Any]:
        return dict(get_optimizer_state_dict(self.model, self.optimizer))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.model, self.optimizer, state_dict)


class Data:
    """Numbered batches of a data-parallel rank. Its state is under the rank's key, as in torchtitan."""

    def __init__(self) -> None:
        self.key, self.at = f"dp_rank_{dist.get_rank()}", 0

    def next(self) -> torch.Tensor:
        self.at += 1
        generator = torch.Generator().manual_seed(1000 * self.at + dist.get_rank())
        return torch.randn(4, 16, generator=generator)

    def state_dict(self) -> dict[str, Any]:
        return {self.key: self.at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.at = state_dict[self.key]


class Trained:
    """Like torchtitan's Trainer: its own state is the step."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = int(state_dict["step"])


def train(arguments: argparse.Namespace, out: Path) -> None:
    """Trains to step 12 and saves every second step."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.3), nn.ReLU(), nn.Linear(64, 1))
    fully_shard(model)
    optimizers, data, trained = Optimizers(model), Data(), Trained()
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizers.optimizer, T_max=20)
    config = ReplicatedCheckpointManager.Config(
        enable=True, root=str(arguments.root), interval=2, keep_latest_k=2, async_mode=arguments.async_mode
    )
    manager = config.build(
        dataloader=data,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedule,
        states={"train_state": trained},
        sd_adapter=None,
        base_folder=str(arguments.out / "dump"),
    )
    torch.manual_seed(1 + dist.get_rank())
    was_loaded = manager.load(step=-1)
    assert was_loaded == (trained.step > 0)
    while trained.step < 12:
        inputs = data.next()
        loss = nn.functional.mse_loss(model(inputs), inputs.square().sum(dim=1, keepdim=True))
        loss.backward()  # type: ignore[no-untyped-call]
        manager.maybe_wait_for_staging()
        optimizers.optimizer.step()
        schedule.step()
        optimizers.optimizer.zero_grad()
        trained.step += 1
        line = {"step": trained.step, "loss": loss.item(), "lr": optimizers.optimizer.param_groups[0]["lr"]}
        with out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        manager.save(trained.step, last_step=trained.step == 12)
        if trained.step == arguments.hold_at:
            manager.maybe_wait_for_saving()
            os.kill(os.getpid(), signal.SIGSTOP)  # until the test kills it
    weights = [p.full_tensor().double().sum().item() for p in model.parameters()]  # type: ignore[attr-defined]
    with out.open("a") as file:
        file.write(json.dumps({"weights": weights}) + "\n")
    manager.close()


def main() -> None:
    """One rank, started by torchrun."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--hold-at", type=int, default=-1)
    parser.add_argument("--async-mode", default="disabled")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    train(arguments, arguments.out / f"rank-{os.environ['RANK']}.jsonl")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
