"""Optimizer state that no save has written: a parameter without a gradient so far has none, and a load asks for none."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping
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


class UnsavedState:
    """Matches the optimizers of a state dict with the names that a checkpoint has. Names of anything else stay asked for.

    An optimizer is a dictionary with `state` and a list `param_groups`, at any level, as of `get_optimizer_state_dict`.
    """

    def __init__(self, state_dict: dict[str, Any], saved: Mapping[str, object]) -> None:
        self._saved = saved
        self.lacking: dict[Path, set[Any]] = {}
        """Of a group of parameters, by the path of its list, those that have no state in the checkpoint."""
        for path, optimizer in _find_optimizers(state_dict, ()):
            self._empty_unsaved(path, optimizer)

    def _empty_unsaved(self, path: Path, optimizer: dict[str, Any]) -> None:
        """Whole states only: of a parameter that has some state in the checkpoint, each name must be there."""
        states = optimizer[_STATE]
        for name, state in states.items():
            asked = state.asked if isinstance(state, NeverSaved) else state
            is_asked = isinstance(asked, dict) and bool(asked)
            states[name] = NeverSaved(asked) if is_asked and not self._has_any((*path, _STATE, name), asked) else asked
        empty = {name for name, state in states.items() if isinstance(state, NeverSaved)}
        for index, group in enumerate(optimizer[_GROUPS] if empty else ()):
            self.lacking[(*path, _GROUPS, index, _PARAMETERS)] = empty.intersection(group[_PARAMETERS])

    def _has_any(self, path: Path, asked: dict[Any, Any]) -> bool:
        prefix = ".".join(map(str, path)) + "."
        if any(f"{prefix}{name}" in self._saved for name in asked):
            return True
        at = bisect_left(self._sorted, prefix)
        return at < len(self._sorted) and self._sorted[at].startswith(prefix)

    @cached_property
    def _sorted(self) -> list[str]:
        return sorted(self._saved)


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
