"""Makes Megatron-Bridge importable without a GPU, although its models and data loaders need packages that need CUDA.

Only modules that checkpoints do not use are stubs: Transformer Engine, Energon and CUDA's random generator.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
import typing
from collections.abc import Sequence
from typing import Any

import torch
import typing_extensions
from packaging.version import Version

EMPTY = ("transformer_engine", "megatron.energon")


class _AnyName(type):
    """A class whose attributes are stub classes."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnyName(name, (torch.nn.Module,), {})


class _EmptyModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnyName(name, (torch.nn.Module,), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        del path, target
        if any(name == empty or name.startswith(f"{empty}.") for empty in EMPTY):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _EmptyModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        del module


def prepare() -> None:
    """Call before the first import of `megatron.bridge`.

    megatron-core is imported before the stubs are installed, because it works without those packages.
    """
    if not hasattr(typing, "override"):
        typing.override = typing_extensions.override  # type: ignore[attr-defined]  # Python 3.11; Bridge wants 3.12
    core: Sequence[str] = ("utils", "parallel_state", "transformer", "models.gpt", "optimizer")
    for name in (*core, "distributed.fsdp.mcore_fsdp_adapter"):
        importlib.import_module(f"megatron.core.{name}")
    sys.modules["megatron.core.utils"]._te_version = Version("0")  # type: ignore[attr-defined]
    sys.meta_path.append(_Finder())
    torch.cuda.get_rng_state = lambda *_: torch.zeros(16, dtype=torch.uint8)
    torch.cuda.set_rng_state = lambda *_: None
