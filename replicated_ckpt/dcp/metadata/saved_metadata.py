"""The result of `dcp.save`: metadata that every node already has, so it is not sent to each rank."""

import logging
import struct
from collections.abc import Callable
from copy import copy
from dataclasses import fields
from typing import Any, SupportsIndex

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from replicated_ckpt.core.integrity.checksum import crc32c
from replicated_ckpt.core.layout import METADATA_NAME
from replicated_ckpt.dcp.metadata.columns import ColumnsInvalid, decode_columns, encode_columns
from replicated_ckpt.dcp.metadata.metadata import decode_metadata, encode_metadata
from replicated_ckpt.dcp.planning.cached_layouts import holds_paths_only
from replicated_ckpt.errors import CheckpointNotFound, ObjectMissing
from replicated_ckpt.stores.local.directories.committed import open_committed_save
from replicated_ckpt.stores.local.store import LocalStore

log = logging.getLogger(__name__)

COLUMNS_FROM_BYTES = 64 << 10
"""A pickle of at least this size (some 400 chunks) gets columns. A smaller one is read in 25 ms."""
_END = struct.Struct("<QQ8s")
"""Bytes of the pickle, bytes of the columns, magic."""
_MAGIC = b"RCKCOLS\n"
_WORD = 8


def encode_metadata_file(metadata: Metadata) -> bytes:
    """As `encode_metadata`, followed by columns if the metadata is large and regular enough."""
    pickled = encode_metadata(metadata)
    planner_data = metadata.planner_data
    # Columns hold no foreign classes: other planner data can be read only from the pickle.
    if len(pickled) < COLUMNS_FROM_BYTES or not (planner_data is None or holds_paths_only(planner_data)):
        return pickled
    try:
        columns = encode_columns(metadata, len(pickled), crc32c(pickled))
    except (TypeError, ValueError, AttributeError) as exc:  # a planner may describe a state in any way that pickles
        log.warning("this .metadata has no columns, and takes longer to read: %s: %s", type(exc).__name__, exc)
        columns = None
    if columns is None:
        return pickled
    # Padded to words: numpy maps the columns in place. Stock torch stops at the end of the pickle.
    end = _END.pack(len(pickled), len(columns), _MAGIC)
    return b"".join((pickled, bytes(-len(pickled) % _WORD), columns, end))


def decode_metadata_file(raw: bytes, source: str) -> Metadata:
    """The metadata in `raw`: from its columns, if these belong to its pickle, else from the pickle.

    It accepts nothing that `decode_metadata` would refuse.

    Raises:
        MetadataUnsafe: as `decode_metadata`.
    """
    parts = _split(raw)
    if parts is not None:
        pickled, columns = parts
        try:
            return decode_columns(columns, len(pickled), crc32c(pickled), source)
        except ColumnsInvalid as exc:
            log.warning("the columns of the .metadata from %s are not used, and its pickle is read: %s", source, exc)
    return decode_metadata(raw, source)


def _split(raw: bytes) -> tuple[memoryview, memoryview] | None:
    """Pickle and columns of a `.metadata`. None: the file has no columns."""
    # Stock torch's, or cut off in the middle: the pickle is read, and its own checks decide.
    if not raw.endswith(_MAGIC) or len(raw) < _END.size:
        return None
    view = memoryview(raw)
    pickle_bytes, column_bytes, _ = _END.unpack(view[-_END.size :])
    begin = pickle_bytes + -pickle_bytes % _WORD
    if begin + column_bytes + _END.size != len(raw):
        return None
    return view[:pickle_bytes], view[begin : -_END.size]


_FIELDS = frozenset(field.name for field in fields(Metadata))


class SavedMetadata(Metadata):
    """The metadata of a save that is committed on this node. It is read from there at the first access."""

    @classmethod
    def of(cls, checkpoint_id: str, save_id: str, store: LocalStore | None = None) -> "SavedMetadata":
        """A reference to the metadata of a save. Without a store it can only be sent to another rank."""
        found = cls.__new__(cls)
        vars(found).update(_save=(checkpoint_id, save_id), _store=store)
        return found

    def __getattribute__(self, name: str) -> Any:
        if name in _FIELDS and "_save" in vars(self):
            self._read()
        return super().__getattribute__(name)

    def _read(self) -> None:
        """Reads the metadata. If two threads call this at once, both read, and neither depends on the other."""
        save, store = vars(self).get("_save"), vars(self)["_store"]
        if save is not None:
            assert store is not None, "it has come to a rank"
            vars(self).update(vars(_read_metadata(store, *save)))
            vars(self).pop("_save", None)

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        # At the coordinator: the reference is sent, not the metadata.
        kept = vars(self)
        if "_save" in kept and kept["_store"] is None:
            return SavedMetadata.of, kept["_save"]
        return Metadata, tuple(getattr(self, field.name) for field in fields(Metadata))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Metadata):
            return NotImplemented
        return all(getattr(self, field.name) == getattr(other, field.name) for field in fields(Metadata))

    __hash__ = None  # type: ignore[assignment]


def broadcast_outcome(
    broadcast: Callable[[Any], Any], own: object, store: LocalStore, reference: SavedMetadata | None
) -> object:
    """Sends all ranks the save's outcome, by DCP's broadcast. Returns the outcome on this rank, as DCP expects it.

    The coordinator passes a `reference` if every node has the metadata. The reference is then sent in place of the
    metadata, unless the metadata has a class of a foreign planner, which other ranks may be unable to read. A caller
    may change the result: the coordinator's cache for the next save has places of its own.
    """
    is_readable = type(own) is Metadata and (own.planner_data is None or holds_paths_only(own.planner_data))
    told = broadcast(reference if reference is not None and is_readable else own)
    if isinstance(told, SavedMetadata):
        checkpoint_id, save_id = vars(told)["_save"]
        return SavedMetadata.of(checkpoint_id, save_id, store)
    if type(own) is Metadata:
        own.storage_data = {index: copy(info) for index, info in own.storage_data.items()}
    return told


def _read_metadata(store: LocalStore, checkpoint_id: str, save_id: str) -> Metadata:
    try:
        with open_committed_save(store.root, checkpoint_id, save_id) as (directory, manifest):
            raw = directory.raw_metadata(manifest)
    except ObjectMissing as exc:
        raise CheckpointNotFound(
            f"The metadata that dcp.save returned for {checkpoint_id} can no longer be read: this node has removed or "
            "replaced the checkpoint.",
            "Read it before a later save removes the checkpoint.",
        ) from exc
    metadata = decode_metadata_file(manifest.local_metadata(raw), f"{checkpoint_id}/{METADATA_NAME} in {store.root}")
    metadata.storage_meta = StorageMeta(checkpoint_id=checkpoint_id, save_id=save_id)
    return metadata
