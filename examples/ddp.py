"""DDP: every rank has the whole state. The ranks together save one copy of it, and all ranks load it.

`<-` marks the lines that differ from the program for stock DCP in examples/stock. DCP needs no
`if rank == 0: torch.save(...)`, no barrier after it, and no `torch.load(..., map_location=...)`.
"""

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

from replicated_ckpt import ReplicatedReader, ReplicatedWriter  # <-


class Training:
    """Model, optimizer and step, as DCP's `Stateful`."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(7)
        layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
        self.model = DistributedDataParallel(layers.to(device), device_ids=None if device.type == "cpu" else [device])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.device = device
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)  # names without DDP's "module."
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.step = state["step"]

    def train_step(self) -> float:
        generator = torch.Generator().manual_seed(1000 * self.step + dist.get_rank())
        inputs = torch.randn(16, 64, generator=generator).to(self.device)
        loss = self.model(inputs).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.step += 1
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return float(mean) / dist.get_world_size()

    def weights(self) -> float:
        return sum(float(parameter.detach().double().sum()) for parameter in self.model.parameters())


def train(arguments: argparse.Namespace, device: torch.device) -> None:
    """Trains from the newest checkpoint to `--steps`."""
    rank = dist.get_rank()
    training = Training(device)
    writer, reader = ReplicatedWriter(arguments.root), ReplicatedReader(arguments.root)  # <-
    newest = reader.latest()  # <- all ranks resume, or none does
    if newest is not None:
        be_late(arguments)
        dcp.load({"training": training}, checkpoint_id=newest, storage_reader=reader)  # <- onto the model's own device
        print(f"rank {rank} loaded {newest} onto {device.type}: {training.weights():.17g}", flush=True)
    while training.step < arguments.steps:
        loss = training.train_step()
        if rank == 0:
            print(f"step {training.step}: loss {loss:.9g}", flush=True)
        if training.step % arguments.save_every == 0:
            be_late(arguments)
            dcp.save({"training": training}, checkpoint_id=f"step-{training.step}", storage_writer=writer)  # <-
            written = writer.last_save.bytes_written if writer.last_save else 0  # <-
            print(f"rank {rank} saved {written} bytes: {training.weights():.17g}", flush=True)


def be_late(arguments: argparse.Namespace) -> None:
    """Delays one rank. The others wait for it."""
    if dist.get_rank() == arguments.late_rank:
        time.sleep(arguments.late_s)


def main() -> None:
    """One rank, started by torchrun."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="this node's store: a directory on a node-local disk")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--late-rank", type=int, help="this rank comes late to each save and load")
    parser.add_argument("--late-s", type=float, default=5.0)
    arguments = parser.parse_args()
    use_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if use_gpu else "cpu")
    if use_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if use_gpu else "gloo")
    try:
        train(arguments, device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
