"""Steps: save and restore a model whose optimizer has no state for some parameters."""

from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from replicated_ckpt import CheckpointManager
from replicated_ckpt.dcp.named_checkpoints import NamedCheckpoints
from replicated_ckpt.integrations.model_state import get_saved_state, get_wanted_state, set_loaded_state
from tests.harness.cluster import Digests
from tests.steps.context import Context
from tests.steps.states import digests

PARTS = ("used", "unused", "frozen")


class Heads(nn.Module):
    """Three heads. A training step uses those that it names."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({name: nn.Linear(6, 3) for name in PARTS})

    def forward(self, inputs: torch.Tensor, names: tuple[str, ...]) -> torch.Tensor:
        return sum((self.heads[name](inputs) for name in names), torch.zeros(()))


def wrapped(kind: str, model: nn.Module) -> nn.Module:
    if kind == "ddp":
        return DistributedDataParallel(model, find_unused_parameters=True)
    if kind == "fsdp1":
        policy = ModuleWrapPolicy(
            [nn.Linear]
        )  # a parameter that shares a flat one with others gets a gradient, of zeros
        device = torch.device("cpu")
        return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=device, use_orig_params=True)
    if kind == "fsdp2":
        for head in model.heads.children():  # type: ignore[union-attr]  # a ModuleDict
            fully_shard(head)
        fully_shard(model)
    return model


class Trained:
    """A model of a kind and its AdamW with two groups. Neither `frozen` nor `unused` ever had a gradient."""

    def __init__(self, kind: str, seed: int) -> None:
        torch.manual_seed(seed)
        model = Heads()
        model.heads["frozen"].requires_grad_(False)
        self.model = wrapped(kind, model)
        named = dict(self.model.named_parameters())
        groups = [
            [value for name, value in named.items() if ("unused" in name) == is_second] for is_second in (False, True)
        ]
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            [{"params": groups[0], "lr": 0.1}, {"params": groups[1], "lr": 0.01 + seed}]
        )

    def train(self, *names: str) -> None:
        inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
        self.model(inputs, names).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

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

    def digests(self) -> Digests:
        """Digests of the existing state. An empty state has none."""
        model, optimizer = get_state_dict(self.model, self.optimizer, options=StateDictOptions(full_state_dict=True))
        return digests({"model": model, "optimizer": optimizer})


def save_unused(context: Context, kind: str) -> Digests:
    """Trains one head, and saves. Returns the digests of everything that exists then."""
    trained = Trained(kind, seed=1)
    for _ in range(3):
        trained.train("used")
    with CheckpointManager(context.root, copies=1) as manager:
        manager.save(1, {"app": trained})
    return trained.digests()


def restore_unused(context: Context, kind: str) -> dict[str, Digests]:
    """Restores twice, with a save in between. Returns the digests after both."""
    first, second = Trained(kind, seed=2), Trained(kind, seed=3)
    with CheckpointManager(context.root, copies=1) as manager:
        manager.restore({"app": first}, 1)
        manager.save(2, {"app": first})
        manager.restore({"app": second}, 2)
    return {"first": first.digests(), "second": second.digests()}


def save_as_a_framework(context: Context, kind: str) -> Digests:
    """Saves as an integration does. The unused head has been used, too."""
    trained = Trained(kind, seed=1)
    trained.train("used", "unused")
    checkpoints = NamedCheckpoints(context.root, {"copies": 1})
    checkpoints.save("step-1", {"optimizer": get_saved_state(trained.model, trained.optimizer)})
    checkpoints.close()
    return _of_optimizer(trained)


def restore_as_a_framework(context: Context, kind: str) -> Digests:
    """Restores with that head frozen."""
    trained = Trained(kind, seed=2)
    frozen = [value for name, value in trained.model.named_parameters() if "heads.used" not in name]
    for parameter in frozen:
        parameter.requires_grad_(False)
    checkpoints = NamedCheckpoints(context.root)
    state = {"optimizer": get_wanted_state(trained.model, trained.optimizer)}
    checkpoints.load("step-1", state)
    set_loaded_state(trained.model, trained.optimizer, state["optimizer"])
    checkpoints.close()
    assert not any(parameter.requires_grad for parameter in frozen)
    assert all(trained.optimizer.state.values())
    return _of_optimizer(trained)


def _of_optimizer(trained: Trained) -> Digests:
    return {name: value for name, value in trained.digests().items() if name.startswith("optimizer.")}
