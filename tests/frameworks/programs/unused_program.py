"""One rank trains six steps with a framework, once without and once with a restart after three.

One head is not used before step 4. Another is used in steps 0 and 1, then frozen, and used again from step 4 on.
"""

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.steps.states import digests

STEPS, SAVED = 6, 3


class Heads(nn.Module):
    """Three heads, two of which are unused or frozen in some steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.used, self.paused, self.unused = nn.Linear(4, 1), nn.Linear(4, 1), nn.Linear(4, 1)

    def freeze(self, step: int) -> None:
        self.paused.requires_grad_(not 2 <= step < 4)

    def loss(self, step: int) -> torch.Tensor:
        heads = [self.used, *([self.paused] if not 2 <= step < 4 else []), *([self.unused] if step >= 4 else [])]
        return sum((head(torch.ones(2, 4)).square().mean() for head in heads), torch.zeros(()))

    def groups(self) -> list[dict[str, Any]]:
        return [
            {"params": self.used.parameters(), "lr": 0.1},
            {"params": [*self.paused.parameters(), *self.unused.parameters()]},
        ]


def names_with_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    return sorted({name.split(".")[-2] for name, value in model.named_parameters() if value in optimizer.state})


def accelerate(root: Path, begin: int, end: int) -> tuple[nn.Module, list[str]]:
    from accelerate import Accelerator

    from replicated_ckpt.integrations.accelerate import ReplicatedAccelerator

    accelerator: Accelerator = ReplicatedAccelerator(cpu=True, replicated_root=root, writer_options={"copies": 1})
    heads = Heads()
    heads.freeze(begin)
    _, optimizer = accelerator.prepare(heads, torch.optim.AdamW(heads.groups()))
    accelerator.save_state("checkpoint-0")  # before the optimizer's first step, which a save must not cause
    if begin:
        accelerator.load_state("checkpoint-3")
    found = names_with_state(heads, optimizer.optimizer)
    for step in range(begin, end):
        heads.freeze(step)
        accelerator.backward(heads.loss(step))
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 == SAVED:
            accelerator.save_state("checkpoint-3")
    accelerator.end_training()
    return heads, found


def transformers(root: Path, begin: int, end: int) -> tuple[nn.Module, list[str]]:
    from transformers import TrainingArguments

    from replicated_ckpt.integrations.transformers import ReplicatedTrainer

    found: list[str] = []

    class Job(ReplicatedTrainer):
        def compute_loss(self, model: Any, *_: Any, **__: Any) -> torch.Tensor:
            if not found:
                found.extend(names_with_state(heads, self.optimizer.optimizer) or ["none"])
            heads.freeze(self.state.global_step)
            return heads.loss(self.state.global_step)

    heads = Heads()
    options: dict[str, Any] = {"max_steps": end, "save_steps": SAVED, "report_to": [], "remove_unused_columns": False}
    options["lr_scheduler_type"] = "constant"  # other schedules depend on max_steps
    arguments = TrainingArguments(str(root.parent / "out"), use_cpu=True, disable_tqdm=True, **options)
    data = [{"x": torch.zeros(1)} for _ in range(64)]
    job = Job(heads, arguments, train_dataset=data, replicated_root=root, writer_options={"copies": 1})
    job.train(resume_from_checkpoint=begin > 0)
    return heads, found


def lightning(root: Path, begin: int, end: int) -> tuple[nn.Module, list[str]]:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.plugins.environments import LightningEnvironment

    from replicated_ckpt.integrations.lightning import ReplicatedDDPStrategy

    found: list[str] = []

    class Job(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.heads = Heads()
            self.heads.freeze(begin)

        def on_train_start(self) -> None:
            found.extend(names_with_state(self, self.trainer.optimizers[0]))

        def training_step(self, *_: Any) -> torch.Tensor:
            self.heads.freeze(self.global_step)
            return self.heads.loss(self.global_step)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.heads.groups())

    job = Job()
    strategy: Any = ReplicatedDDPStrategy(
        root=root,
        writer_options={"copies": 1},
        cluster_environment=LightningEnvironment(),
        find_unused_parameters=True,
    )
    options: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False}
    saving = ModelCheckpoint(root.parent / "marks", every_n_train_steps=SAVED)
    trainer = Trainer(max_steps=end, strategy=strategy, callbacks=[saving], **options)
    trainer.fit(
        job,
        torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(64, 1))),
        ckpt_path="latest" if begin else None,
    )
    return job.heads, found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("framework", choices=["accelerate", "transformers", "lightning"])
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    run: Callable[[Path, int, int], tuple[nn.Module, list[str]]] = globals()[arguments.framework]
    whole, _ = run(arguments.directory / "whole", 0, STEPS)
    run(arguments.directory / "restarted", 0, SAVED)
    restarted, found = run(arguments.directory / "restarted", SAVED, STEPS)
    same = digests(whole.state_dict()) == digests(restarted.state_dict())
    (arguments.directory / "result.json").write_text(json.dumps({"found": found, "same": same}))
    os._exit(0)


if __name__ == "__main__":
    main()
