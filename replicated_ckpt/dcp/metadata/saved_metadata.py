"""What `dcp.save` returns: metadata that lies on every node already, and does not travel to each rank."""

from collections.abc import Callable
from copy import copy
from dataclasses import fields
from typing import Any, SupportsIndex

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from replicated_ckpt.core.layout import METADATA_NAME
from replicated_ckpt.dcp.metadata.metadata_file import decode_metadata_file
from replicated_ckpt.dcp.planning.kept_layouts import holds_paths_only
from replicated_ckpt.errors import CheckpointNotFound, ObjectMissing
from replicated_ckpt.stores.local.directories.committed import open_committed_save
from replicated_ckpt.stores.local.store import LocalStore

_FIELDS = frozenset(field.name for field in fields(Metadata))


class SavedMetadata(Metadata):
    """The metadata of a save that is committed on this node. It is read from there when it is first looked at."""

    @classmethod
    def of(cls, checkpoint_id: str, save_id: str, store: LocalStore | None = None) -> "SavedMetadata":
        """Without a store it can only travel."""
        found = cls.__new__(cls)
        vars(found).update(_save=(checkpoint_id, save_id), _store=store)
        return found

    def __getattribute__(self, name: str) -> Any:
        if name in _FIELDS and "_save" in vars(self):
            self._read()
        return super().__getattribute__(name)

    def _read(self) -> None:
        """Two threads may do so at once: both read, and neither misses what the other has taken away."""
        save, store = vars(self).get("_save"), vars(self)["_store"]
        if save is not None:
            assert store is not None, "it has come to a rank"
            vars(self).update(vars(_read_metadata(store, *save)))
            vars(self).pop("_save", None)

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        kept = vars(self)
        if "_save" in kept and kept["_store"] is None:
            return SavedMetadata.of, kept["_save"]
        return Metadata, tuple(getattr(self, field.name) for field in fields(Metadata))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Metadata):
            return NotImplemented
        return all(getattr(self, field.name) == getattr(other, field.name) for field in fields(Metadata))

    __hash__ = None  # type: ignore[assignment]


def tell_metadata(
    broadcast: Callable[[Any], Any], own: object, store: LocalStore, reference: SavedMetadata | None
) -> object:
    """Tells all ranks how a save ended, by DCP's broadcast; returns what DCP takes for the outcome on this rank.

    `reference`, at the coordinator: goes in place of the metadata where every node has it, and any rank can read it there,
    as it names no class of a foreign planner. What is returned shares no place of an item with what the coordinator keeps
    for its next save: a caller may change it.
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
            f"What dcp.save returned for {checkpoint_id} cannot be read any more: this node has retired or replaced it.",
            "Look at it before a later save retires the checkpoint.",
        ) from exc
    metadata = decode_metadata_file(manifest.local_metadata(raw), f"{checkpoint_id}/{METADATA_NAME} in {store.root}")
    metadata.storage_meta = StorageMeta(checkpoint_id=checkpoint_id, save_id=save_id)
    return metadata
