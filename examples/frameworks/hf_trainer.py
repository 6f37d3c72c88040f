"""Hugging Face Trainer: one line names the class. `save_steps` and `resume_from_checkpoint` keep their meaning.

Restored: model, optimizer, schedule, TrainerState, callbacks, the position in the data, and each rank's random generators.
Random numbers that a data set or collator draws in the main process are not restored, because Trainer reads a batch ahead.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments, set_seed

from replicated_ckpt.integrations.transformers import ReplicatedTrainer

LENGTH = 16


class Tokens(Dataset):
    """Sequences of numbers that count upwards."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(LENGTH) + index) % 100
        return {"input_ids": tokens, "labels": tokens}


class PrintProgress(TrainerCallback):
    """Prints the first step, and each save."""

    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            print(f"starting at step {state.global_step} on {dist.get_world_size()} ranks", flush=True)

    def on_save(self, args, state, control, model=None, **kwargs):
        whole = (w.full_tensor() if isinstance(w, DTensor) else w for w in model.parameters())
        total = sum(float(weight.detach().double().abs().sum()) for weight in whole)
        if state.is_world_process_zero:
            print(f"step {state.global_step}: sum of weights {total:.6f}, saved", flush=True)


def main() -> None:
    """One rank, started by torchrun."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="this node's store: a directory on a node-local disk")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=5)
    arguments = parser.parse_args()
    set_seed(1)
    size = {"vocab_size": 100, "n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 2}
    settings = TrainingArguments(
        output_dir=str(arguments.root / "trainer"),
        max_steps=arguments.steps,
        per_device_train_batch_size=4,
        save_steps=arguments.save_every,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        lr_scheduler_type="constant",  # the same for runs of any length
        disable_tqdm=True,
        seed=1,
    )
    trainer = ReplicatedTrainer(
        model=GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0)),
        args=settings,
        train_dataset=Tokens(),
        callbacks=[PrintProgress()],
        replicated_root=arguments.root,
    )
    trainer.train(resume_from_checkpoint=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
