"""Warns at a save about objects that a load would refuse: at the load it would be too late."""

import re
import threading
from typing import Any

from torch.distributed.checkpoint.planner import SavePlan

from replicated_ckpt.core.integrity.archive import ArchiveDamaged, find_records, is_archive, within
from replicated_ckpt.core.pickles.follower import follow
from replicated_ckpt.core.pickles.tree import DEPTH_MAX, PickleUnsafe, names_in
from replicated_ckpt.dcp.objects.values import key_of
from replicated_ckpt.dcp.objects.weights_only import load_object, pickle_in, unknown_names
from replicated_ckpt.dcp.runtime.caller import warn
from replicated_ckpt.errors import ConfigInvalid, ObjectUnsafe

_NAME_LINES = re.compile(rb"c([\w.]+)\n([\w.]+)\n")
_TYPES = re.compile(rb"X.\0\0\0([OV][0-9]{1,9})", re.DOTALL)
"""numpy's types of Python objects and of records: their arrays name the same classes as those that can be loaded."""
_CONTAINERS = b"]})t\x85\x86\x87"
"""Opcodes that begin a list or a dict, or end a tuple: an object that is nested too deep has many of them."""
_SEARCHED_BYTES_MAX = 1 << 20  # the search must not cost more than writing the object
_WHERE = "this checkpoint"

_lock = threading.Lock()
_seen: set[tuple[Any, ...]] = set()
_warned: set[object] = set()


def warn_if_unloadable(raw: memoryview, fqn: str) -> None:
    """Warns, once in this process for each class, if a load would refuse an object as `torch.save` wrote it.

    A possible name in its bytes is checked when it occurs for the first time. An object without new names costs a
    search; an object with many containers is followed once for its entry.
    Of an object larger than 1 MiB only the names are checked: it is not made.
    """
    searched = bytes(raw[:_SEARCHED_BYTES_MAX])
    found: set[tuple[Any, ...]] = {
        match.groups() for kind in (_NAME_LINES, _TYPES) for match in kind.finditer(searched)
    }
    is_deep = len(searched) - len(searched.translate(None, _CONTAINERS)) > DEPTH_MAX
    if len(raw) > _SEARCHED_BYTES_MAX or is_deep or not is_archive(within(raw), len(raw)):
        found.add((fqn,))
    # Under the lock only memory changes: the check below may take long.
    with _lock:
        if found <= _seen:
            return
        _seen.update(found)
    problem = _problem(raw, fqn)
    if problem is not None:
        _warn(problem)


def warn_if_class_is_unknown(kind: type, fqn: str) -> None:
    """As `warn_if_unloadable`, for a tensor of a class of its own, which its pickle names."""
    key = (kind.__module__, kind.__qualname__)
    with _lock:
        if key in _seen:
            return
        _seen.add(key)
    if unknown := unknown_names([key]):
        _warn(ObjectUnsafe(fqn, _WHERE, unknown))


def refuse_unloadable_paths(plan: SavePlan) -> None:
    """Raises ConfigInvalid: an entry of a nested state lies deeper than a load accepts in any `.metadata`."""
    paths = plan.planner_data if isinstance(plan.planner_data, dict) else {}  # other planners keep other data there
    for fqn, path in paths.items():
        if isinstance(path, tuple) and len(path) > DEPTH_MAX:
            raise ConfigInvalid(
                f"The entry {fqn[-200:]!r} is nested {len(path)} deep in the state dict, more than {DEPTH_MAX} levels.",
                "Save it under a shorter path: each dict, list or tuple around it is one level.",
            )


def _warn(problem: ObjectUnsafe) -> None:
    with _lock:
        news = set(problem.names or [problem.why]) - _warned
        _warned.update(news)
    if news:
        said = f"{problem.message.replace(' is not loaded: ', ' will not be loaded by default: ')} {problem.hint}"
        warn(said)


def _problem(raw: memoryview, fqn: str) -> ObjectUnsafe | None:
    try:
        tree = follow(pickle_in(within(raw), find_records(within(raw), len(raw))))
    except (PickleUnsafe, ArchiveDamaged) as exc:
        return ObjectUnsafe(fqn, _WHERE, (), f"it {exc}")
    if unknown := unknown_names(sorted({key_of(named) for named in names_in(tree)})):
        return ObjectUnsafe(fqn, _WHERE, unknown)
    if len(raw) <= _SEARCHED_BYTES_MAX:
        try:
            load_object(raw, fqn, _WHERE)
        except ObjectUnsafe as exc:
            return exc
    return None
