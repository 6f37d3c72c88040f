"""Storages in a container of `torch.save`: records of its zip archive, of the size that their tensors assume."""

from collections.abc import Callable, Mapping
from warnings import catch_warnings, simplefilter

import torch

from replicated_ckpt.core.integrity.archive import Record
from replicated_ckpt.core.pickles.tree import PickleUnsafe, StorageOutline, TensorOutline
from replicated_ckpt.dcp.runtime.torch_private import make_typed_storage


def _kinds() -> dict[str, tuple[type, torch.dtype]]:
    """The classes of typed storages by name. Reading their types warns that they are deprecated."""
    found: dict[str, tuple[type, torch.dtype]] = {}
    with catch_warnings():
        simplefilter("ignore", UserWarning)
        for name, kind in vars(torch).items():
            if name.endswith("Storage") and isinstance(kind, type) and name not in ("TypedStorage", "UntypedStorage"):
                found[name] = (kind, kind.dtype)  # type: ignore[attr-defined]
    return found


_KINDS = _kinds()
_DTYPE_BY_KIND: Mapping[str, torch.dtype] = {name: dtype for name, (_, dtype) in _KINDS.items()} | {
    "UntypedStorage": torch.uint8
}
STORAGE_BY_DTYPE: Mapping[torch.dtype, type] = {dtype: kind for kind, dtype in _KINDS.values()}
"""The class that a pickle of a tensor of this type names for its storage."""


def dtype_of(outline: TensorOutline) -> torch.dtype:
    """The type of a tensor's elements.

    Raises:
        PickleUnsafe: this torch does not have it.
    """
    if outline.dtype is None:
        return _dtype_of_kind(outline.storage.kind)
    found = vars(torch).get(outline.dtype)
    if not isinstance(found, torch.dtype):
        raise PickleUnsafe(f"has elements of the type {outline.dtype[:80]!r}, which this torch does not have")
    return found


def _dtype_of_kind(kind: str) -> torch.dtype:
    found = _DTYPE_BY_KIND.get(kind)
    if found is None:
        raise PickleUnsafe(f"has a storage of the kind {kind[:80]!r}, which this torch does not have")
    return found


def record_of(storage: StorageOutline, records: Mapping[str, Record]) -> Record:
    """The record with a storage's bytes.

    Raises:
        PickleUnsafe: it is not there, or of another size.
    """
    record = records.get(f"data/{storage.key}")
    size_bytes = storage.elements * _dtype_of_kind(storage.kind).itemsize
    # A tensor over a record that is too short would read beyond its memory.
    if record is None or record.size != size_bytes:
        found = "no record" if record is None else f"a record of {record.size} bytes"
        raise PickleUnsafe(f"has {found} for a storage of {size_bytes} bytes")
    return record


class Storages:
    """The storages of one container, each made once, so that its tensors share it. `memory_of` makes one from a record."""

    def __init__(self, records: Mapping[str, Record], memory_of: Callable[[Record], torch.UntypedStorage]) -> None:
        self._records = records
        self._memory_of = memory_of
        self._known: dict[str, tuple[StorageOutline, torch.TypedStorage]] = {}

    def make_typed(self, outline: StorageOutline) -> torch.TypedStorage:
        """The storage that a pickle names.

        Raises:
            PickleUnsafe: its record is missing, has another size, or was used as another kind.
        """
        known = self._known.get(outline.key)
        if known is None:
            memory = self._memory_of(record_of(outline, self._records))
            known = self._known[outline.key] = (outline, make_typed_storage(memory, _dtype_of_kind(outline.kind)))
        # torch.save never writes one record as two kinds, and torch refuses it.
        if known[0] != outline:
            raise PickleUnsafe("has a storage of two kinds")
        return known[1]


def copy_records(raw: memoryview) -> Callable[[Record], torch.UntypedStorage]:
    """A function that copies a record of `raw` into a storage of its own."""

    def memory_of(record: Record) -> torch.UntypedStorage:
        if not record.size:
            empty: torch.UntypedStorage = torch.frombuffer(bytearray(1), dtype=torch.uint8).untyped_storage()[:0]
            return empty  # not resizable: a forged shape could otherwise make it any size
        data = bytearray(raw[record.start : record.start + record.size])
        return torch.frombuffer(data, dtype=torch.uint8).untyped_storage()

    return memory_of
