"""Makes a load ask for the optimizer state that the checkpoint has, where this process's optimizer has other state."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import STORAGE_TYPES, TensorStorageMetadata

from replicated_ckpt.dcp.runtime.torch_private import ShardedTensor
from replicated_ckpt.errors import ConfigInvalid
from replicated_ckpt.wording import plural

_STATE, _GROUPS, _PARAMETERS = "state", "param_groups", "params"
Path = tuple[str | int, ...]


class MatchedState(dict[Any, Any]):
    """A parameter's state as one checkpoint has it, in place of the state that was asked for.

    Empty if the checkpoint has none. torch's `set_optimizer_state_dict` and `Optimizer.load_state_dict` accept that: the
    optimizer then makes its state at the parameter's first gradient.
    """

    def __init__(self, asked: dict[Any, Any], values: dict[Any, Any]) -> None:
        super().__init__(values)
        self.asked = asked
        """The original state: another checkpoint may be loaded into the same state dict."""


class StateOf(dict[Any, Any]):
    """Asks for the saved state of a parameter that is frozen here, and so has none in this process's optimizer."""

    def __init__(self, parameter: torch.Tensor) -> None:
        super().__init__()
        self.parameter = parameter


class SavedNames:
    """The names in a checkpoint."""

    def __init__(self, saved: Mapping[str, object]) -> None:
        self._sorted = sorted(saved)

    def under(self, prefix: str) -> list[str]:
        """The rest of each name that begins with the prefix."""
        # Bisected in sorted names: a scan for each of thousands of parameters would be quadratic.
        at = end = bisect_left(self._sorted, prefix)
        while end < len(self._sorted) and self._sorted[end].startswith(prefix):
            end += 1
        return [name[len(prefix) :] for name in self._sorted[at:end]]


class OptimizerMatch:
    """Matches the optimizers of a state dict with the names in a checkpoint. Everything else stays as it is.

    An optimizer is a dictionary with `state` and a list `param_groups`, at any level, as from
    `get_optimizer_state_dict`. For a parameter without any state in the checkpoint, the load asks for nothing. For any
    other parameter, it asks for everything that the state dict or the checkpoint has, because some optimizers make a
    part of their state only after some steps.
    """

    def __init__(self, state_dict: dict[str, Any], saved: Mapping[str, STORAGE_TYPES]) -> None:
        self._saved = saved
        self.lacking: dict[Path, set[Any]] = {}
        """The parameters without state in the checkpoint, by the path of their group's list of parameters."""
        for path, optimizer in _find_optimizers(state_dict, ()):
            self._match_optimizer(path, optimizer)

    def _match_optimizer(self, path: Path, optimizer: dict[str, Any]) -> None:
        self._check_groups(path, len(optimizer[_GROUPS]))
        states = optimizer[_STATE]
        lacking = set()
        for name, state in states.items():
            if not isinstance(state, dict):
                continue
            asked = states[name] = state.asked if isinstance(state, MatchedState) else state
            prefix = "".join(f"{key}." for key in (*path, _STATE, name))
            names = self._names.under(prefix)
            if asked and not names:
                states[name] = MatchedState(asked, {})
                lacking.add(name)
            more = self._make_others(asked, prefix, names)
            if more:
                states[name] = MatchedState(asked, {**asked, **more})
        for index, group in enumerate(optimizer[_GROUPS] if lacking else ()):
            self.lacking[(*path, _GROUPS, index, _PARAMETERS)] = lacking.intersection(group[_PARAMETERS])

    def _check_groups(self, path: Path, now: int) -> None:
        """Raises ConfigInvalid if the checkpoint has more groups. DCP would ignore them; torch's optimizers need them."""
        prefix = "".join(f"{key}." for key in (*path, _GROUPS))
        saved = len({name.partition(".")[0] for name in self._names.under(prefix)})
        if saved > now:
            raise ConfigInvalid(
                f"An optimizer has {plural(now, 'parameter group')}, but the one in the checkpoint has {saved}.",
                "Add the groups before the load, in the same order, including those that training adds later.",
            )

    def _make_others(self, asked: dict[Any, Any], prefix: str, names: list[str]) -> dict[str, torch.Tensor | None]:
        """Targets for saved names that were not asked for; None for an object. Leaves out tensors that are too large."""
        known = set(map(str, asked))
        entries = {name: self._saved[prefix + name] for name in names if name not in known and "." not in name}
        if not entries:
            return {}
        values = [asked.parameter] if isinstance(asked, StateOf) else asked.values()
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        if any(isinstance(tensor, ShardedTensor) for tensor in tensors):  # of FSDP1, which has no `empty_like`
            return {}
        largest = max((tensor.numel() for tensor in tensors), default=0)
        made: dict[str, torch.Tensor | None] = {}
        for name, entry in entries.items():
            if not isinstance(entry, TensorStorageMetadata):
                made[name] = None
            # A hostile .metadata may claim any size, and the memory would be taken before the load finds out.
            elif entry.size.numel() <= largest:
                made[name] = _make_target(entry, tensors)
        return made

    @cached_property
    def _names(self) -> SavedNames:
        return SavedNames(self._saved)


def _make_target(entry: TensorStorageMetadata, tensors: list[torch.Tensor]) -> torch.Tensor:
    """A tensor to load into, divided among ranks like one of `tensors` of the same size."""
    for tensor in tensors:
        if tensor.size() == entry.size:
            return torch.empty_like(tensor, dtype=entry.properties.dtype)
    return torch.empty(entry.size, dtype=entry.properties.dtype)


def drop_unsaved_state(flat: dict[str, Any], prefix: str, saved: Mapping[str, object]) -> None:
    """Removes each parameter's state that is not in the checkpoint from a flat optimizer state.

    `flat` has the names `state.<parameter>.<name>` and `param_groups.<parameter>.<name>`. Its loader must accept missing
    names: torchtitan's container does, torch's `set_optimizer_state_dict` does not. The groups' names stay, so the saved
    optimizer must have had each parameter.
    """
    parameters = {name[len(_GROUPS) + 1 :].rpartition(".")[0] for name in flat if name.startswith(f"{_GROUPS}.")}
    asked: dict[str, list[str]] = defaultdict(list)
    for name in flat:
        parameter = name.removeprefix(f"{_STATE}.")
        while parameter and parameter not in parameters:
            parameter = parameter.rpartition(".")[0]
        if name.startswith(f"{_STATE}.{parameter}."):
            asked[parameter].append(name)
    names = SavedNames(saved)
    for parameter, of_it in asked.items():
        under = f"{_STATE}.{parameter}."
        if not names.under(f"{prefix}.{under}"):
            for name in of_it:
                del flat[name]


def _find_optimizers(tree: Any, path: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    if isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from _find_optimizers(value, (*path, index))
    if not isinstance(tree, dict):
        return
    if isinstance(tree.get(_STATE), dict) and _is_groups(tree.get(_GROUPS)):
        yield path, tree
        return
    for key, value in tree.items():
        yield from _find_optimizers(value, (*path, str(key)))


def _is_groups(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(group, dict) and _PARAMETERS in group for group in value)
