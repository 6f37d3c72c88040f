"""DCP's getting-started tutorial on node-local disks: save on n ranks, load on any number, load without a process group.

`<-` marks the lines that differ from the program for stock DCP in examples/stock.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard

CHECKPOINT_ID = "getting-started"


class AppState(Stateful):
    """Model and optimizer; DCP calls `state_dict` and `load_state_dict` itself."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state_dict["model"], optim_state_dict=state_dict["optim"]
        )


class ToyModel(nn.Module):
    """Two linear layers. Few numbers of ranks divide their sizes evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.net1 = nn.Linear(17, 33)
        self.net2 = nn.Linear(33, 7)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.net2(torch.relu(self.net1(inputs)))
        return outputs


def sharded(device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model, sharded over all ranks, and Adam."""
    model = fully_shard(ToyModel().to(device))
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def save(root: Path, device: torch.device) -> None:
    """Trains one step, then saves a checkpoint."""
    torch.manual_seed(7)
    model, optimizer = sharded(device)
    model(torch.rand(8, 17, device=device)).square().sum().backward()
    optimizer.step()
    app = {"app": AppState(model, optimizer)}
    dcp.save(app, checkpoint_id=root / CHECKPOINT_ID)
    say("saved", whole(model))


def load(root: Path, device: torch.device) -> None:
    """Loads the checkpoint on any number of ranks."""
    model, optimizer = sharded(device)
    app = {"app": AppState(model, optimizer)}
    dcp.load(app, checkpoint_id=root / CHECKPOINT_ID)
    say("loaded", whole(model))


def load_without_a_process_group(root: Path) -> None:
    """Loads a plain model in one process, from the nodes that answer."""
    model = ToyModel()
    state = {"app": {"model": model.state_dict()}}
    dcp.load(state, checkpoint_id=root / CHECKPOINT_ID)
    model.load_state_dict(state["app"]["model"])
    say("loaded", model.state_dict())


def convert(root: Path) -> None:
    """Converts to one torch.save file and back. torch reads the checkpoint itself, because it is plain DCP."""
    file, folder = Path(f"{root}-converted.pt"), Path(f"{root}-converted")
    dcp_to_torch_save(root / CHECKPOINT_ID, file)
    say("converted", torch.load(file, weights_only=False)["app"]["model"])
    torch_save_to_dcp(file, folder)
    state = {"app": {"model": ToyModel().state_dict()}}
    dcp.load(state, checkpoint_id=folder)
    say("converted back", state["app"]["model"])


def whole(model: nn.Module) -> dict[str, Any]:
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def say(what: str, model_state: dict[str, Any]) -> None:
    """Prints the sum of all weights, on rank 0 alone."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"{what}: {sum(float(value.double().sum()) for value in model_state.values()):.17g}", flush=True)


def main() -> None:
    """One rank of `save` or `load`, started by torchrun; or one process alone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=["save", "load", "load-plain", "convert"])
    parser.add_argument("--root", type=Path, required=True, help="this node's store: a directory on a node-local disk")
    arguments = parser.parse_args()
    if arguments.action == "load-plain":
        return load_without_a_process_group(arguments.root)
    if arguments.action == "convert":
        return convert(arguments.root)
    use_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if use_gpu else "cpu")
    if use_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if use_gpu else "gloo")
    try:
        {"save": save, "load": load}[arguments.action](arguments.root, device)
    finally:
        dist.destroy_process_group()
    return None


if __name__ == "__main__":
    main()
