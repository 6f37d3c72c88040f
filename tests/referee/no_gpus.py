"""Runs tests that torch marks as needing GPUs on the CPU. Those that pass there with stock storage count.

GPU devices become the CPU, and nccl becomes gloo. Ranks are forked instead of spawned, so that none imports torch
again.
"""

import multiprocessing
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

Test = Callable[..., Any]
SKIPPING = ("skip_if_lt_x_gpu", "requires_nccl", "requires_accelerator_dist_backend", "require_n_gpus_for_nccl_backend")
CPU = torch.device("cpu")
RANKS = 4
"""For tests that start a rank for each GPU, four at most as a rule: without one they would start none, and pass."""


class CpuMode(TorchFunctionMode):
    """Replaces GPU devices in the arguments of torch's functions by the CPU."""

    def __torch_function__(
        self, func: Test, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        named = {name: on_cpu(value) for name, value in (kwargs or {}).items()}
        if type(named.get("device")) is int:  # the number of a GPU
            named["device"] = CPU
        return func(*map(on_cpu, args), **named)


def on_cpu(value: Any) -> Any:
    is_gpu = (isinstance(value, torch.device) and value.type == "cuda") or (
        isinstance(value, str) and value.partition(":")[0] == "cuda"
    )
    return CPU if is_gpu else value


def _unconditional(*_: object, **__: object) -> Callable[[Test], Test]:
    """Replaces a function that makes a skipping decorator."""
    return lambda test: test


def install(module: ModuleType) -> None:
    """`module` has torch's multi-process test cases."""
    for name in SKIPPING:
        if hasattr(module, name):
            setattr(module, name, _unconditional)
    case: Any = getattr(module, "MultiProcessTestCase")  # noqa: B009 - a module's attributes are unknown to mypy
    case._spawn_processes = _fork_processes
    stand_in: dict[Any, dict[str, Any]] = {
        torch.nn.Module: {"cuda": _itself},
        torch.Tensor: {"cuda": _itself},
        torch.cuda: {"set_device": lambda *_: None, "synchronize": lambda *_: None, "current_device": lambda: "cpu"}
        | {"device_count": lambda: RANKS},
        torch.accelerator: {"set_device_index": lambda *_: None},
    }
    for owner, names in stand_in.items():
        for name, value in names.items():
            setattr(owner, name, value)


def _itself(value: Any, *_: object, **__: object) -> Any:
    return value


def _fork_processes(case: Any) -> None:
    case._start_processes(multiprocessing.get_context("fork").Process)


def run_on_cpu(module: ModuleType) -> None:
    """`module` has DTensor's test cases. They use the CPU and gloo in every test."""
    case: Any = getattr(module, "DTensorTestBase")  # noqa: B009
    init_pg = case.init_pg

    @wraps(init_pg)
    def init_gloo(self: Any, *_: object, **__: object) -> None:
        CpuMode().__enter__()  # type: ignore[no-untyped-call] # for the rest of this rank
        type(self).backend = property(lambda _: "gloo")
        init_pg(self, *((False, "gloo") if init_pg.__code__.co_argcount > 2 else (False,)))

    case.init_pg = init_gloo


def use_gloo(module: ModuleType) -> None:
    """`module` has ShardedTensor's test cases, which use nccl by default."""
    with_comms: Any = getattr(module, "with_comms")  # noqa: B009

    @wraps(with_comms)
    def on_gloo(func: Test | None = None, **options: Any) -> Any:
        return with_comms(func, **{**options, "backend": "gloo"})

    setattr(module, "with_comms", on_gloo)  # noqa: B010


def wrap_on_cpu(module: ModuleType) -> None:
    """`module` is that of FSDP1, which looks for a GPU unless it gets a device."""
    fsdp: Any = getattr(module, "FullyShardedDataParallel")  # noqa: B009
    init = fsdp.__init__

    @wraps(init)
    def init_on_cpu(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **{**options, "device_id": CPU})

    fsdp.__init__ = init_on_cpu
