"""numpy's scalars and arrays from the tree of a pickle: from their bytes and a type of plain numbers, dates or texts.

numpy's own functions for pickles trust the type in the pickle, so that a pickle can have them read bytes as
addresses of Python objects. They are not called. Source: numpy 1.26 to 2.4, `ndarray.__reduce__`, `dtype.__reduce__`.
"""

import itertools
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from replicated_ckpt.core.pickles.tree import Made, Named, PickleUnsafe
from replicated_ckpt.dcp.objects.values import Key

_MODULES = ("numpy._core.multiarray", "numpy.core.multiarray")
_ARRAYS: frozenset[Key] = frozenset(itertools.product(_MODULES, ("_reconstruct",)))
_SCALARS: frozenset[Key] = frozenset(itertools.product(_MODULES, ("scalar",)))
_DTYPE, _NDARRAY = ("numpy", "dtype"), ("numpy", "ndarray")
KEYS = _ARRAYS | _SCALARS | {_DTYPE, _NDARRAY}
"""The names in a pickle of such values."""

# Without V (records) and O (objects): their bytes would be read as addresses.
_PLAIN = re.compile(r"[biufcSU][0-9]{1,9}")
_DATE = re.compile(r"[Mm]8")
_UNITS = frozenset(("Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "ps", "fs", "as"))
Of = Callable[[Any], Any]


def numpy_value(node: Made, key: Key, of: Of) -> Any:
    """The value of a call of one of KEYS; `of` makes those of its parts.

    Raises:
        PickleUnsafe: it is an array of objects or records, or none at all.
    """
    try:
        if key in _ARRAYS:
            return _array(node, of)
        return _scalar(node, of) if key in _SCALARS else _dtype(node, of)
    except PickleUnsafe:
        raise
    # A forged type or shape fails in numpy, in any of these ways.
    except (ValueError, TypeError, OverflowError, LookupError, AttributeError) as exc:
        raise PickleUnsafe(f"holds a value of numpy that is none: {exc}") from exc


def _array(node: Made, of: Of) -> Any:
    kind = node.arguments[0] if node.arguments else None
    # A subclass could run code of its own.
    if type(kind) is not Named or (kind.module, kind.name) != _NDARRAY or type(node.state) is not tuple:
        raise PickleUnsafe("holds an array of a class of its own")
    _, shape, described, is_fortran, data = node.state
    dtype, raw = _dtype(described, of), of(data)
    if type(raw) is not bytes:
        raise PickleUnsafe("holds an array of Python objects")
    # An empty array is made by its shape: there are no bytes to see it in.
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
        raise PickleUnsafe(f"holds a value of numpy's type {str(text)[:80]!r}, which is no plain one")
    if _PLAIN.fullmatch(text):
        return np.dtype(text).newbyteorder(order)
    if _DATE.fullmatch(text):
        unit, step, *_ = of(parts[-1])[1]
        if unit.decode() in _UNITS and type(step) is int:
            return np.dtype(f"{text}[{step}{unit.decode()}]").newbyteorder(order)
    raise PickleUnsafe(f"holds a value of numpy's type {text[:80]!r}, which is no plain one")
