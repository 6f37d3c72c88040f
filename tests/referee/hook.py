"""Patches modules of torch when they are imported: the storage classes, and code that needs GPUs. Does not import
torch.
"""

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MODE_ENV = "REFEREE_MODE"
STOCK = "stock"

Action = Callable[[ModuleType], None]


class _Patched(Loader):
    """Executes a module with its own loader, then calls an action with it."""

    def __init__(self, loader: Loader, action: Action) -> None:
        self._loader = loader
        self._action = action

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._action(module)

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)


class _Finder(MetaPathFinder):
    def __init__(self, actions: dict[str, Action]) -> None:
        self._actions = actions

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        action = self._actions.pop(fullname, None)  # popped, so that the look below finds the module itself
        spec = importlib.util.find_spec(fullname) if action is not None else None
        if action is None or spec is None or spec.loader is None:
            return None
        spec.loader = _Patched(spec.loader, action)
        return spec


def _swap_storage(module: ModuleType) -> None:
    del module
    from tests.referee import swap

    swap.install()


def _without_gpus(module: ModuleType) -> None:
    from tests.referee import no_gpus

    no_gpus.install(module)


def _dtensors_on_cpu(module: ModuleType) -> None:
    from tests.referee import no_gpus

    no_gpus.run_on_cpu(module)


def _fsdp_on_cpu(module: ModuleType) -> None:
    from tests.referee import no_gpus

    no_gpus.wrap_on_cpu(module)


def _sharded_tensors_on_gloo(module: ModuleType) -> None:
    from tests.referee import no_gpus

    no_gpus.use_gloo(module)


def install() -> None:
    """Does nothing in a process that is not part of a run of the referee."""
    mode = os.environ.get(MODE_ENV)
    if mode is None:
        return
    actions: dict[str, Action] = {
        "torch.testing._internal.common_distributed": _without_gpus,
        "torch.testing._internal.distributed._tensor.common_dtensor": _dtensors_on_cpu,
        "torch.distributed.fsdp": _fsdp_on_cpu,
        "torch.testing._internal.distributed._shard.sharded_tensor": _sharded_tensors_on_gloo,
    }
    if mode != STOCK:
        actions["torch.distributed.checkpoint"] = _swap_storage
    sys.meta_path.insert(0, _Finder(actions))
