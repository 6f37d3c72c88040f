"""A Trainer-like loop: each rank draws a timestamp for its output directory, and rank 0 alone writes safetensors.

`<-` marks the lines that differ from the program for stock DCP in examples/stock.
"""

import argparse
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.fsdp import fully_shard

from replicated_ckpt import ReplicatedReader, ReplicatedWriter  # <-

VOCABULARY = 101


class Trainer:
    """Saves checkpoints in an output directory and resumes from the newest one, as Hugging Face's Trainer does."""

    def __init__(self, arguments: argparse.Namespace, device: torch.device) -> None:
        torch.manual_seed(7)
        layers = [nn.Embedding(VOCABULARY, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, VOCABULARY)]
        self.model = fully_shard(nn.Sequential(*layers).to(device))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.device = device
        self.arguments = arguments
        self.output_dir = f"{datetime.now(UTC):out-%Y%m%d-%H%M%S.%f}"  # differs by rank
        self.writer = ReplicatedWriter(arguments.root, checkpoint_id_from=arguments.checkpoint_id_from)  # <-
        self.reader = ReplicatedReader(arguments.root)  # <-

    def state(self, step: int) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": step}

    def resumed(self) -> int:
        """The step of the newest checkpoint, wherever it lies; 0 without one."""
        newest = self.reader.latest()  # <- was: the newest folder under output_dir, which differs by rank
        if newest is None:
            return 0
        state = self.state(0)
        dcp.load(state, checkpoint_id=newest, storage_reader=self.reader)  # <-
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        step: int = state["step"]
        return step

    def train_step(self, step: int) -> float:
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        tokens = torch.randint(VOCABULARY, (4, 16), generator=generator).to(self.device)
        loss = nn.functional.cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return float(mean) / dist.get_world_size()

    def train(self) -> None:
        step = self.resumed()
        say(f"starting at step {step}")
        while step < self.arguments.steps:
            loss = self.train_step(step)
            step += 1
            say(f"step {step}: loss {loss:.9g}")
            if step % self.arguments.save_steps == 0:
                checkpoint_id = f"{self.output_dir}-checkpoint-{step}"  # <- "latest" searches one directory
                dcp.save(self.state(step), checkpoint_id=checkpoint_id, storage_writer=self.writer)  # <-
                whole = get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True))
                if dist.get_rank() == 0:
                    self.consolidate(whole)

    def consolidate(self, trained: dict[str, Any]) -> None:
        """Rank 0 reads the checkpoint back into host memory, and writes one file. The other ranks train on meanwhile."""
        self.reader.reset(self.writer.last_save.checkpoint_id if self.writer.last_save else None)  # <-
        found: dict[str, Any] = {}
        _load_state_dict(found, storage_reader=self.reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
        weights = {name.removeprefix("model."): value for name, value in flat(found) if name.startswith("model.")}
        same = weights.keys() == trained.keys() and all(torch.equal(weights[n], trained[n].cpu()) for n in trained)
        path = Path(f"{self.arguments.root}-model")
        try:
            from safetensors.torch import save_file
        except ImportError:
            torch.save(weights, path.with_suffix(".pt"))
            say("safetensors is not installed: wrote model.pt instead")
        else:
            save_file(weights, path.with_suffix(".safetensors"))
        say(f"consolidated {len(weights)} tensors, {'as trained' if same else 'NOT AS TRAINED'}")


def flat(state: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Names and values of a nested state."""
    pairs: list[tuple[str, Any]] = []
    for key, value in state.items():
        pairs += flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]
    return pairs


def say(line: str) -> None:
    """Prints on rank 0 alone."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def main() -> None:
    """One rank, started by torchrun."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="this node's store: a directory on a node-local disk")
    parser.add_argument("--checkpoint-id-from", choices=["all", "coordinator"], default="coordinator")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-steps", type=int, default=10)
    arguments = parser.parse_args()
    use_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if use_gpu else "cpu")
    if use_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if use_gpu else "gloo")
    try:
        Trainer(arguments, device).train()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
