"""Optimizer state that no save has written: a parameter without a gradient so far has none, and a load asks for none."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

_STATE, _GROUPS, _PARAMETERS = "state", "param_groups", "params"
Path = tuple[str | int, ...]


class NeverSaved(dict[Any, Any]):
    """In the place of a parameter's state that the checkpoint does not have: empty, as in the optimizer that was saved.

    torch's `set_optimizer_state_dict` and `Optimizer.load_state_dict` take an empty state: the optimizer then makes it
    with the parameter's first gradient.
    """

    def __init__(self, asked: dict[Any, Any]) -> None:
        super().__init__()
        self.asked = asked
        """What stood here. Another checkpoint, loaded into the same state dict, may have it."""


class SavedNames:
    """The names that a checkpoint has."""

    def __init__(self, saved: Mapping[str, object]) -> None:
        self._saved = saved

    def has_any(self, prefix: str, names: Iterable[object]) -> bool:
        """Whether one of the names, or any other one, lies under the prefix, which ends with a dot."""
        if any(f"{prefix}{name}" in self._saved for name in names):
            return True
        at = bisect_left(self._sorted, prefix)
        return at < len(self._sorted) and self._sorted[at].startswith(prefix)

    @cached_property
    def _sorted(self) -> list[str]:
        return sorted(self._saved)


class UnsavedState:
    """Matches the optimizers of a state dict with the names that a checkpoint has. Names of anything else stay asked for.

    An optimizer is a dictionary with `state` and a list `param_groups`, at any level, as of `get_optimizer_state_dict`.
    """

    def __init__(self, state_dict: dict[str, Any], saved: Mapping[str, object]) -> None:
        self._names = SavedNames(saved)
        self.lacking: dict[Path, set[Any]] = {}
        """Of a group of parameters, by the path of its list, those that have no state in the checkpoint."""
        for path, optimizer in _find_optimizers(state_dict, ()):
            self._empty_unsaved(path, optimizer)

    def _empty_unsaved(self, path: Path, optimizer: dict[str, Any]) -> None:
        """Whole states only: of a parameter that has some state in the checkpoint, each name must be there."""
        states = optimizer[_STATE]
        for name, state in states.items():
            asked = state.asked if isinstance(state, NeverSaved) else state
            prefix = "".join(f"{key}." for key in (*path, _STATE, name))
            is_asked = isinstance(asked, dict) and bool(asked)
            states[name] = NeverSaved(asked) if is_asked and not self._names.has_any(prefix, asked) else asked
        empty = {name for name, state in states.items() if isinstance(state, NeverSaved)}
        for index, group in enumerate(optimizer[_GROUPS] if empty else ()):
            self.lacking[(*path, _GROUPS, index, _PARAMETERS)] = empty.intersection(group[_PARAMETERS])


def drop_unsaved_state(flat: dict[str, Any], prefix: str, saved: Mapping[str, object]) -> None:
    """The same of an optimizer with one level, `state.<parameter>.<name>` and `param_groups.<parameter>.<name>`.

    What loads it must take absent names: torchtitan's container does, torch's `set_optimizer_state_dict` does not. The
    groups' names stay asked for, so each parameter must be one that the saved optimizer had.
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
        if not names.has_any(f"{prefix}.{under}", (name.removeprefix(under) for name in of_it)):
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
