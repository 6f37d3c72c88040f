"""Hugging Face Trainer: a callback saves to replicated_ckpt and restores from it, in place of Trainer's own checkpoints."""

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.utils.data import IterableDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

from replicated_ckpt import CheckpointManager

BATCH = 4
LENGTH = 16


class Tokens(IterableDataset):
    """Made-up text that counts. It knows how far it has been read, and begins there: this is what resumes the data."""

    def __init__(self) -> None:
        self.step = 0

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        world = dist.get_world_size()
        index = self.step * BATCH * world
        while True:
            tokens = (torch.arange(LENGTH) + index) % 100
            yield {"input_ids": tokens, "labels": tokens}
            index += 1


class AppState(Stateful):
    """Model, optimizer, schedule and Trainer's own counters, as DCP saves them."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def state_dict(self):
        model, optimizer = get_state_dict(self.trainer.model_wrapped, self.trainer.optimizer.optimizer)
        return {"model": model, "optim": optimizer, "schedule": self.trainer.lr_scheduler.state_dict()}

    def load_state_dict(self, state_dict):
        set_state_dict(
            self.trainer.model_wrapped,
            self.trainer.optimizer.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optim"],
        )
        self.trainer.lr_scheduler.load_state_dict(state_dict["schedule"])


class Checkpoints(TrainerCallback):
    """Restores when training begins, and saves when a step ends."""

    def __init__(self, root: Path, every: int, tokens: Tokens) -> None:
        self.root, self.every, self.tokens = root, every, tokens
        self.trainer: Trainer

    def on_train_begin(self, args, state, control, **kwargs):
        self.manager = CheckpointManager(self.root, every=self.every)
        self.app = {"app": AppState(self.trainer)}
        step = self.manager.restore_latest(self.app) or 0
        state.global_step = self.tokens.step = step
        if state.is_world_process_zero:
            print(f"starting at step {step} on {dist.get_world_size()} ranks", flush=True)

    def on_step_end(self, args, state, control, **kwargs):
        self.tokens.step = state.global_step
        if self.manager.should_save(state.global_step):
            self.manager.save(state.global_step, self.app)
            weights = total(self.trainer.model.parameters())
            if state.is_world_process_zero:
                print(f"step {state.global_step}: sum of weights {weights:.6f}, saved", flush=True)
        control.should_training_stop = control.should_training_stop or self.manager.preempted

    def on_train_end(self, args, state, control, **kwargs):
        self.manager.close()


def total(weights: Iterable[torch.Tensor]) -> float:
    """The sum of what they are without signs; all ranks take part, as the weights may be sharded."""
    sums = [weight.detach().double().abs().sum() for weight in weights]
    return sum(float(each.full_tensor() if isinstance(each, DTensor) else each) for each in sums)


def main() -> None:
    """One rank, started by torchrun."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="this node's store: a directory on a node-local disk")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=5)
    arguments = parser.parse_args()
    tokens = Tokens()
    checkpoints = Checkpoints(arguments.root, arguments.save_every, tokens)
    size = {"vocab_size": 100, "n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 2}
    drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # else the random state must be in the checkpoint
    set_seed(1)
    model = GPT2LMHeadModel(GPT2Config(**size, **drop, bos_token_id=0, eos_token_id=0))
    settings = TrainingArguments(
        output_dir=str(arguments.root / "trainer"),
        max_steps=arguments.steps,
        per_device_train_batch_size=BATCH,
        save_strategy="no",  # the callback saves
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        lr_scheduler_type="constant",
        disable_tqdm=True,
        seed=1,
    )
    trainer = Trainer(model=model, args=settings, train_dataset=tokens, callbacks=[checkpoints])
    checkpoints.trainer = trainer
    trainer.train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
