"""A torchtitan-style loop: FSDP2 and tensor parallelism, meta initialization, Stateful objects, asynchronous saves.

Restored: model, optimizer and the position in the data. Random generators are not restored, because nothing draws from them
after the start. If your program does, add `"rank": RankState()` to the state.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from replicated_ckpt import CheckpointManager

WIDTH = 64
BATCH = 4


class Block(nn.Module):
    """A residual feed-forward block."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(nn.functional.gelu(self.up(hidden)))


class ModelState(Stateful):
    """The model's parameters and buffers."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return get_model_state_dict(self.model)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_model_state_dict(self.model, state_dict)


class OptimizerState(Stateful):
    """The optimizer's state under the names of the parameters, so that it can be resharded."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self.model, self.optimizer)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.model, self.optimizer, state_dict)


class Data(Stateful):
    """Random batches that depend only on the step. The position is its whole state, on any number of ranks."""

    def __init__(self, mesh: DeviceMesh, device: torch.device) -> None:
        self.rank, self.world, self.device, self.step = mesh.get_local_rank(), mesh.size(), device, 0

    def batch(self) -> torch.Tensor:
        """The next batch of this data-parallel rank."""
        generator = torch.Generator().manual_seed(self.step)
        self.step += 1
        return torch.randn(BATCH * self.world, WIDTH, generator=generator).chunk(self.world)[self.rank].to(self.device)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict["step"]


def built(mesh: DeviceMesh, device: torch.device) -> nn.Module:
    """Makes the model on the meta device and shards it before it gets memory, so no rank ever has the whole model."""
    with torch.device("meta"):
        model = nn.Sequential(*(Block() for _ in range(4)))
    for block in model:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    model.to_empty(device=device)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    return model


def train(arguments: argparse.Namespace, device: torch.device) -> None:
    """Trains from the newest checkpoint to `--steps`."""
    shape = (dist.get_world_size() // arguments.tensor_parallel, arguments.tensor_parallel)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("dp", "tp"))
    torch.manual_seed(1)
    model = built(mesh, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = Data(mesh["dp"], device)
    state = {"model": ModelState(model), "optim": OptimizerState(model, optimizer), "data": data}
    with CheckpointManager(arguments.root, every=arguments.save_every) as manager:
        step = manager.restore(state) or 0
        say(f"starting at step {step} on {dist.get_world_size()} ranks")
        while step < arguments.steps and not manager.preempted:
            batch = data.batch()
            loss = (model(batch) - batch.flip(-1)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if manager.should_save(step):
                manager.async_save(step, state)
                say(f"step {step}: loss {full(loss):.6f}, being saved")


def full(loss: torch.Tensor) -> float:
    """The loss as a number on this rank."""
    return float(loss.full_tensor() if isinstance(loss, DTensor) else loss)


def say(line: str) -> None:
    """Prints on rank 0 alone."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def main() -> None:
    """One rank, started by torchrun."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="this node's store: a directory on a node-local disk")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--tensor-parallel", type=int, default=1, help="ranks that share each layer")
    arguments = parser.parse_args()
    use_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if use_gpu else "cpu")
    dist.init_process_group("cpu:gloo,cuda:nccl" if use_gpu else "gloo")
    try:
        train(arguments, device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
