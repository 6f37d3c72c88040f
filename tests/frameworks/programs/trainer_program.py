"""A user's Trainer program: schedule, accumulation, dropout, shuffling, evaluation and callbacks. Only the Trainer is
ours.
"""

import argparse
import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from replicated_ckpt.integrations.transformers import ReplicatedTrainer

LENGTH = 16


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Made-up text: each sample counts upwards."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(LENGTH) + index) % 100
        return {"input_ids": tokens, "labels": tokens}


class Recorder(TrainerCallback):
    """Writes a line for each step and each log of this rank. Stops the process or raises at the requested step."""

    def __init__(self, out: Path, hold_at: int, raise_at: int) -> None:
        self.out, self.hold_at, self.raise_at = out, hold_at, raise_at
        self.scaler: Any = None

    def write(self, line: dict[str, Any]) -> None:
        with self.out.open("a") as out:
            out.write(json.dumps(line) + "\n")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        sums = [weight.detach().double().sum().item() for weight in kwargs["model"].parameters()]
        scale = {} if self.scaler is None else {"scale": self.scaler.get_scale()}
        self.write({"step": state.global_step, "index": 0, "epoch": state.epoch, "weights": sum(sums), **scale})

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.hold_at:
            os.kill(os.getpid(), signal.SIGSTOP)  # until the test kills it
        if state.global_step == self.raise_at and dist.get_rank() == dist.get_world_size() - 1:
            raise RuntimeError("raised on purpose")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        timed = ("runtime", "per_second")
        values = {name: value for name, value in logs.items() if not name.endswith(timed)}
        self.write({"step": state.global_step, "index": 1 + ("eval_loss" in values), **values})


def main() -> None:
    """One rank, started by torchrun."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--hold-at", type=int, default=-1)
    parser.add_argument("--raise-at", type=int, default=-1)
    parser.add_argument("--scaled", action="store_true")
    parser.add_argument("--lora", action="store_true")
    arguments = parser.parse_args()
    set_seed(1)
    size = {"vocab_size": 100, "n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 2}
    model: Any = GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0))  # its default has dropout
    if arguments.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))
    settings = TrainingArguments(
        output_dir=str(arguments.root / "trainer"),
        max_steps=14,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        save_strategy="steps",
        save_steps=4,
        save_total_limit=2,
        eval_strategy="steps",
        eval_steps=4,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        greater_is_better=True,  # the first evaluation is best, so retention must keep the oldest checkpoint
        logging_steps=3,
        learning_rate=1e-2,
        warmup_steps=2,
        lr_scheduler_type="cosine",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=1,
    )
    recorder = Recorder(arguments.out / f"rank-{os.environ['RANK']}.jsonl", arguments.hold_at, arguments.raise_at)
    trainer = ReplicatedTrainer(
        model=model,
        args=settings,
        train_dataset=Tokens(96),
        eval_dataset=Tokens(16),
        callbacks=[recorder, EarlyStoppingCallback(early_stopping_patience=9)],
        replicated_root=arguments.root / "store",
    )
    if arguments.scaled:  # accelerate creates a scaler only for fp16 on accelerators
        trainer.accelerator.scaler = recorder.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    trainer.train(resume_from_checkpoint=True)
    best = sum(weight.detach().double().sum().item() for weight in trainer.model.parameters())
    recorder.write({"step": 14, "index": 3, "best": best, "of": trainer.state.best_global_step})
    recorder.write({"step": 14, "index": 4, "history": len(trainer.state.log_history)})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
