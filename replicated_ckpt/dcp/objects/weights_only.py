"""Objects as `torch.save` writes them, loaded without running their code. A save warns if a load would refuse one."""

import io
import itertools
import pickle
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.planner import SavePlan

from replicated_ckpt.core.integrity.archive import ArchiveDamaged, Fetch, Record, find_records, is_archive, within
from replicated_ckpt.core.pickles.follower import follow
from replicated_ckpt.core.pickles.tree import (
    DEPTH_MAX,
    Made,
    Named,
    PickleUnsafe,
    Stored,
    check_bounds,
    names_in,
    storage_of,
)
from replicated_ckpt.dcp.objects.storages import Storages, copy_records
from replicated_ckpt.dcp.objects.values import Key, UnknownName, Values, key_of
from replicated_ckpt.dcp.runtime.torch_private import weights_only_names
from replicated_ckpt.dcp.runtime.user_code import warn
from replicated_ckpt.errors import ConfigInvalid, ObjectUnsafe

_CALLED = frozenset(
    (
        *("collections.OrderedDict", "collections.Counter", "builtins.set", "builtins.complex", "torch.Size"),
        *("torch.device", "torch.serialization._get_layout", "torch.nn.parameter.Parameter"),
        "torch._tensor._rebuild_from_type_v2",
    )
)
"""Names of torch's list that may be called, besides functions that rebuild tensors. Others could take any memory."""

_REBUILDS = "torch._utils._rebuild_"
_BLOCKED = ("sys", "os", "posix", "nt")
"""Modules of which no name is allowed. torch refuses to add their names, too."""

_BYTES, _BYTEARRAY, _ENCODE = ("builtins", "bytes"), ("builtins", "bytearray"), ("_codecs", "encode")
_SPARSE, _OF_TYPE = ("torch._utils", "_rebuild_sparse_tensor"), ("torch._tensor", "_rebuild_from_type_v2")
_HAVE_STATE = (("collections", "OrderedDict"), ("collections", "Counter"))
_LATIN = ("latin1", "latin-1")


def load_object(raw: memoryview, fqn: str, where: str) -> Any:
    """The object that `torch.save` wrote.

    Raises:
        ObjectUnsafe: it names a class that nothing allows, or is not as `torch.save` writes it.
    """
    try:
        records = find_records(within(raw), len(raw))
        found = pickle_in(within(raw), records)
        return ObjectValues(Storages(records, copy_records(raw))).whole(follow(found), len(found))
    except UnknownName as exc:
        raise ObjectUnsafe(fqn, where, exc.keys) from exc
    except (PickleUnsafe, ArchiveDamaged) as exc:
        raise ObjectUnsafe(fqn, where, (), f"it {exc}") from exc


def save_again(raw: memoryview, fqn: str, where: str) -> io.BytesIO:
    """The object of an item as `torch.save` of this process writes it.

    Raises:
        ObjectUnsafe: the object is refused, or cannot be saved again.
    """
    value, buffer = load_object(raw, fqn, where), io.BytesIO()
    try:
        torch.save(value, buffer)
    # An allowed class may still be one that cannot be pickled here.
    except (pickle.PicklingError, TypeError, AttributeError, RuntimeError) as exc:
        raise ObjectUnsafe(fqn, where, (), f"it cannot be saved again: {type(exc).__name__}: {exc}"[:500]) from exc
    buffer.seek(0)
    return buffer


def pickle_in(fetch: Fetch, records: Mapping[str, Record]) -> bytes:
    """The pickle in a container.

    Raises:
        ArchiveDamaged: the container has no pickle, or its elements have another byte order.
    """
    record, order = records.get("data.pkl"), records.get("byteorder")
    if record is None:
        raise ArchiveDamaged("is a zip file without a pickle")
    # Elements of another byte order would come out as wrong numbers.
    if order is not None and bytes(fetch(order.start, order.size)) != b"little":
        raise ArchiveDamaged("was written by a machine with another byte order")
    return bytes(fetch(record.start, record.size))


def unknown_names(names: Sequence[Key]) -> tuple[Key, ...]:
    """The names among these that an object may not have."""
    allowed = {**_names_of_user(), **weights_only_names()}
    own = KEYS | {_BYTES}
    return tuple(key for key in names if key not in own and (".".join(key) not in allowed or key[0] in _BLOCKED))


def _names_of_user() -> Mapping[str, Any]:
    """The classes of `torch.serialization.add_safe_globals`, by the names under which they were added."""
    found: dict[str, Any] = {}
    for added in torch.serialization.get_safe_globals():
        if isinstance(added, tuple):
            found[added[1]] = added[0]
        elif hasattr(added, "__qualname__"):  # torch's own load fails on an object without one
            found[f"{added.__module__}.{added.__qualname__}"] = added
    return found


class ObjectValues(Values):
    """Makes the object in one container."""

    def __init__(self, storages: Storages) -> None:
        super().__init__()
        self._storages = storages
        self._names = weights_only_names()
        self._names_of_user = _names_of_user()

    def whole(self, tree: Any, size_bytes: int) -> Any:
        """The value of the tree of a pickle of this size.

        Raises:
            UnknownName: with all names that nothing allows. PickleUnsafe
        """
        # Before anything is made: a small pickle can describe an object of any depth and size.
        check_bounds(tree, size_bytes)
        try:
            return self.of(tree)
        except UnknownName as exc:
            # All unknown names go into one error: otherwise the user would add one class per try.
            unknown = unknown_names(sorted({key_of(named) for named in names_in(tree)}))
            raise UnknownName(*(unknown or exc.keys)) from exc

    def find(self, key: Key) -> Any:
        path = ".".join(key)
        found = self._names.get(path, self._names_of_user.get(path))
        if found is None or key[0] in _BLOCKED:
            raise UnknownName(key)
        return found

    def load_stored(self, node: Stored) -> Any:
        return self._storages.make_typed(storage_of(node))

    def make(self, node: Made) -> Any:
        key = key_of(node.called)
        if key in KEYS:
            return numpy_value(node, key, self.of)
        if key in (_BYTES, _BYTEARRAY, _ENCODE):
            return self._bytes(node, key)
        self.find(key)
        # Only torch's names are limited: the user has allowed any call of an added class.
        if ".".join(key) in self._names:
            _check_call(node, key)
        if key == _SPARSE:
            return self._sparse(node)
        return super().make(node)

    def _bytes(self, node: Made, key: Key) -> bytes | bytearray:
        """Bytes as protocol 2 writes them: a text and its encoding. Other codecs may take long, and bytes(n) any memory."""
        arguments = self.of(node.arguments)
        if len(arguments) == 2 and type(arguments[0]) is str and arguments[1] in _LATIN and key != _BYTES:
            data = arguments[0].encode("latin-1", "replace")
        elif not arguments or (len(arguments) == 1 and type(arguments[0]) is bytes):
            data = b"".join(arguments)
        else:
            raise PickleUnsafe("holds bytes in an invalid form")
        return bytearray(data) if key == _BYTEARRAY else data

    def _sparse(self, node: Made) -> torch.Tensor:
        """A sparse tensor, made with a check of its indices, which torch's own function for pickles omits."""
        layout, data = self.of(node.arguments)
        try:
            if layout is torch.sparse_coo:
                indices, values, size, *more = data
                return torch.sparse_coo_tensor(
                    indices, values, size, check_invariants=True, is_coalesced=more[0], device="cpu"
                )
            return torch.sparse_compressed_tensor(*data, layout=layout, check_invariants=True, device="cpu")
        except (RuntimeError, TypeError, ValueError, IndexError) as exc:
            raise PickleUnsafe(f"holds an invalid sparse tensor: {exc}") from exc


def _check_call(node: Made, key: Key) -> None:
    """Raises PickleUnsafe unless this call of a name of torch's list is one that `torch.save` writes."""
    path = ".".join(key)
    if path not in _CALLED and not path.startswith(_REBUILDS):
        raise PickleUnsafe(f"calls {path}, which no object needs")
    if node.state is not None and key not in _HAVE_STATE:
        raise PickleUnsafe(f"sets the state of a {path}, which no object needs")
    if key == _OF_TYPE:
        rebuild = node.arguments[0] if node.arguments else None
        if type(rebuild) is not Named or not rebuild.path.startswith(_REBUILDS):
            raise PickleUnsafe(f"lets {path} call a function that rebuilds no tensor")


_MODULES = ("numpy._core.multiarray", "numpy.core.multiarray")
_ARRAYS: frozenset[Key] = frozenset(itertools.product(_MODULES, ("_reconstruct",)))
_SCALARS: frozenset[Key] = frozenset(itertools.product(_MODULES, ("scalar",)))
_DTYPE, _NDARRAY = ("numpy", "dtype"), ("numpy", "ndarray")
KEYS = _ARRAYS | _SCALARS | {_DTYPE, _NDARRAY}
"""The names in a pickle of numpy's values."""

# Without V (records) and O (objects): their bytes would be read as addresses.
_PLAIN = re.compile(r"[biufcSU][0-9]{1,9}")
_DATE = re.compile(r"[Mm]8")
_UNITS = frozenset(("Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "ps", "fs", "as"))
Of = Callable[[Any], Any]


def numpy_value(node: Made, key: Key, of: Of) -> Any:
    """The value of a call of one of KEYS; `of` makes the values of its arguments."""
    try:
        if key in _ARRAYS:
            return _array(node, of)
        return _scalar(node, of) if key in _SCALARS else _dtype(node, of)
    except PickleUnsafe:
        raise
    # A forged type or shape fails in numpy, in any of these ways.
    except (ValueError, TypeError, OverflowError, LookupError, AttributeError) as exc:
        raise PickleUnsafe(f"holds an invalid numpy value: {exc}") from exc


def _array(node: Made, of: Of) -> Any:
    kind = node.arguments[0] if node.arguments else None
    # A subclass could run code of its own.
    if type(kind) is not Named or (kind.module, kind.name) != _NDARRAY or type(node.state) is not tuple:
        raise PickleUnsafe("holds an array of a subclass of numpy.ndarray")
    _, shape, described, is_fortran, data = node.state
    dtype, raw = _dtype(described, of), of(data)
    if type(raw) is not bytes:
        raise PickleUnsafe("holds an array of Python objects")
    # An empty array has only a shape, and no bytes for frombuffer.
    if not raw:
        return np.empty(of(shape), dtype) if 0 in shape else np.frombuffer(raw, dtype)
    # copy: frombuffer is read-only, and would keep the container's bytes.
    return np.frombuffer(raw, dtype).reshape(of(shape), order="F" if is_fortran else "C").copy("K")


def _scalar(node: Made, of: Of) -> Any:
    described, data = node.arguments
    dtype, raw = _dtype(described, of), of(data)
    if type(raw) is not bytes or len(raw) != dtype.itemsize:
        raise PickleUnsafe("holds a number of another size than its type")
    return np.frombuffer(raw, dtype)[0]


def _dtype(node: Any, of: Of) -> Any:
    """A type of plain numbers, dates or texts, without parts or flags."""
    if type(node) is not Made or (node.called.module, node.called.name) != _DTYPE or type(node.state) is not tuple:
        raise PickleUnsafe("holds a value of numpy without a type")
    text, (_, order, *parts) = node.arguments[0], node.state
    # Subarrays, names and fields would make it a record.
    if type(text) is not str or order not in ("<", ">", "|", "=") or any(part is not None for part in parts[:3]):
        raise PickleUnsafe(f"holds a value of numpy's type {str(text)[:80]!r}, which is not a plain one")
    if _PLAIN.fullmatch(text):
        return np.dtype(text).newbyteorder(order)
    if _DATE.fullmatch(text):
        unit, step, *_ = of(parts[-1])[1]
        if unit.decode() in _UNITS and type(step) is int:
            return np.dtype(f"{text}[{step}{unit.decode()}]").newbyteorder(order)
    raise PickleUnsafe(f"holds a value of numpy's type {text[:80]!r}, which is not a plain one")


_NAME_LINES = re.compile(rb"c([\w.]+)\n([\w.]+)\n")
_TYPES = re.compile(rb"X.\0\0\0([OV][0-9]{1,9})", re.DOTALL)
"""numpy's types of Python objects and of records. Only their type marks arrays that cannot be loaded."""
_CONTAINERS = b"]})t\x85\x86\x87"
"""Opcodes that begin a list or a dict, or end a tuple: an object that is nested too deep has many of them."""
_SEARCHED_BYTES_MAX = 1 << 20  # the search must not cost more than writing the object
_WHERE = "this checkpoint"

_lock = threading.Lock()
_seen: set[tuple[Any, ...]] = set()
_warned: set[object] = set()


def warn_if_unloadable(raw: memoryview, fqn: str) -> None:
    """Warns, once in this process for each class, if a load would refuse an object as `torch.save` wrote it.

    A name in its bytes is checked when it first occurs in this process, so an object without new names costs only a
    search. An object with many containers is checked once for its entry. An object larger than 1 MiB is not made: only
    its names are checked.
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
    """As `warn_if_unloadable`, for a tensor of another class than torch's, which its pickle names."""
    key = (kind.__module__, kind.__qualname__)
    with _lock:
        if key in _seen:
            return
        _seen.add(key)
    if unknown := unknown_names([key]):
        _warn(ObjectUnsafe(fqn, _WHERE, unknown))


def refuse_unloadable_paths(plan: SavePlan) -> None:
    """Raises ConfigInvalid if an entry of the nested state lies deeper than a load accepts in a `.metadata`."""
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
