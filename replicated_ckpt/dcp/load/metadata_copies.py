"""Reads a checkpoint's `.metadata` from an intact copy. If the optimizer was dropped, look-ups of its entries raise."""

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed.checkpoint.metadata import STORAGE_TYPES, Metadata

from replicated_ckpt.core.integrity.checksum import crc32c
from replicated_ckpt.core.inventory import SaveFound
from replicated_ckpt.core.layout import METADATA_NAME, OBJECT_NODE
from replicated_ckpt.core.manifest import Manifest
from replicated_ckpt.core.parts import is_dropped
from replicated_ckpt.core.reading.windows import ByteRange
from replicated_ckpt.dcp.find.absence import describe_answer, describe_move
from replicated_ckpt.dcp.find.bucket_look import InBucket
from replicated_ckpt.dcp.find.survey import Survey
from replicated_ckpt.dcp.metadata.saved_metadata import decode_metadata_file
from replicated_ckpt.errors import (
    ManifestInvalid,
    ObjectCorrupt,
    ObjectMissing,
    OptimizerDropped,
    ReplicatedCkptError,
    ShardLost,
    StoreError,
)
from replicated_ckpt.stores.bucket.bucket import Bucket
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.peer.answer import file_path, unmanaged_path
from replicated_ckpt.stores.peer.client import AgentAddress, AgentClient
from replicated_ckpt.stores.peer.copy import report_suspect
from replicated_ckpt.stores.peer.reach import is_time_out

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Copy:
    """One copy as it was read. `expected_crc` None: stock torch wrote it, without a checksum."""

    source: str
    raw: bytes
    expected_crc: int | None
    address: AgentAddress | None = None
    is_bucket: bool = False


class UnreadMetadata(Metadata):
    """Stands for metadata that could not be read: any access raises the error."""

    def __init__(self, error: Exception) -> None:
        object.__setattr__(self, "_error", error)

    def __getattribute__(self, name: str) -> Any:
        raise object.__getattribute__(self, "_error")


def read_verified_metadata(
    store: LocalStore, survey: Survey, bucket: Bucket | None, reader_key: str, silent: set[str]
) -> Metadata:
    """The checkpoint's metadata from the first intact copy, read without an unpickler.

    `silent`: nodes whose requests timed out in this load. Nodes that time out now are added.

    Raises:
        ShardLost: no copy is intact. MetadataUnsafe: an intact copy is not DCP metadata.
    """
    problems: list[str] = []
    for copy in _read_copies(store, survey, bucket, reader_key, problems, silent):
        if copy.expected_crc in (None, crc32c(copy.raw)):
            # A node's file also contains the bucket's version, because shards may lie elsewhere in the bucket.
            manifest = survey.manifest
            raw = (manifest.read_bucket_metadata if copy.is_bucket else manifest.local_metadata)(copy.raw)
            return decode_metadata_file(raw, copy.source)
        found = f"{len(copy.raw)} bytes of CRC32C {crc32c(copy.raw):08x}, expected {copy.expected_crc:08x}"
        problems.append(f"{copy.source}: its {METADATA_NAME} is damaged: {found}")
        log.warning("%s", problems[-1])
        if copy.is_bucket and bucket is not None:
            problems += describe_move(bucket, survey.found.checkpoint_id, survey.found.save_id)
        # Stock torch's file has no checksum by which an agent could check and repair it.
        if copy.address is not None and not survey.unmanaged_warning:
            report_suspect(copy.address, survey.found.checkpoint_id, survey.found.save_id, METADATA_NAME, problems[-1])
    lost = {METADATA_NAME: "every node of the save"}
    raise ShardLost(survey.found.checkpoint_id, lost, [*survey.searched, *problems])


def _read_copies(
    store: LocalStore, survey: Survey, bucket: Bucket | None, reader_key: str, problems: list[str], silent: set[str]
) -> Iterator[_Copy]:
    """Each copy that can be read: first this node's, then those that peers and the bucket listed, then other peers'.

    Peers that listed no copy, or are `silent`, are asked last, because each may cost a time-out. The error of each
    place is added to `problems`.
    """
    save, own_node = survey.found, store.read_node_id()
    # If only some nodes have dropped the optimizer, the `.metadata` of the others has other bytes.
    is_slim = survey.manifest.is_slim
    if any(holding.node_id == own_node and holding.is_slim is is_slim for holding in save.holdings):
        yield from _read_own(store, survey, own_node, problems)
    # A hash spreads the ranks: a thousand of them must not all ask the first node.
    peers = sorted(survey.addresses, key=lambda peer: crc32c(f"{reader_key}/{peer.node_id}".encode()))
    having = {holding.node_id for holding in save.holdings if holding.has_metadata} - silent
    yield from _read_peers((peer for peer in peers if peer.node_id in having), survey, problems, silent)
    if bucket is not None and survey.in_bucket is not None and survey.in_bucket.is_slim is is_slim:
        yield from _read_bucket(bucket, survey.in_bucket, save, problems)
    yield from _read_peers((peer for peer in peers if peer.node_id not in having), survey, problems, silent)


def _read_own(store: LocalStore, survey: Survey, own_node: str, problems: list[str]) -> Iterator[_Copy]:
    save, manifest = survey.found, survey.manifest
    try:
        with os.fdopen(store.open_file(save.checkpoint_id, save.save_id, METADATA_NAME), "rb") as file:
            raw = file.read(manifest.metadata_bytes + 1)  # one byte more: a file that is too long fails the check
    # One bad copy, whatever its fault, must not end the load while others are left.
    except (OSError, StoreError, ManifestInvalid) as exc:
        problems.append(f"node {own_node}: its {METADATA_NAME} cannot be read: {exc}")
        return
    address = next((peer for peer in survey.addresses if peer.node_id == own_node), None)
    yield _Copy(f"node {own_node}", raw, manifest.metadata_crc32c, address)


def _read_peers(
    peers: Iterable[AgentAddress], survey: Survey, problems: list[str], silent: set[str]
) -> Iterator[_Copy]:
    size, crc = survey.manifest.metadata_bytes, survey.manifest.metadata_crc32c
    for address in peers:
        try:
            with AgentClient(address) as client:
                raw = client.fetch_file(_path(survey, METADATA_NAME, size), size)
            yield _Copy(address.label, raw, crc, address)
        except ObjectMissing as exc:
            problems.append(f"{address.label}: it has no {METADATA_NAME} of this save: {exc.detail}")
        except ReplicatedCkptError as exc:
            problems.append(describe_answer(address.label, exc))
            # The rest of the load must not wait for this node's time-out again.
            if is_time_out(exc):
                silent.add(address.node_id)


def _read_bucket(bucket: Bucket, there: InBucket, save: SaveFound, problems: list[str]) -> Iterator[_Copy]:
    try:
        key = f"{save.checkpoint_id}/{METADATA_NAME}"
        raw = bucket.small(key, there.metadata_bytes, there.metadata_crc32c)
        yield _Copy(bucket.client.target.url, raw, there.metadata_crc32c, is_bucket=True)
    except ReplicatedCkptError as exc:
        problems.append(describe_answer(OBJECT_NODE, exc))
        # A newer save may have replaced this one in the bucket since the search: the error then names the newer save.
        if isinstance(exc, ObjectMissing | ObjectCorrupt):
            problems += describe_move(bucket, save.checkpoint_id, save.save_id)


def _path(survey: Survey, name: str, size_bytes: int) -> str:
    if survey.unmanaged_warning:
        return unmanaged_path(survey.found.checkpoint_id, name, size_bytes)
    return file_path(survey.found.checkpoint_id, survey.found.save_id, name)


def places_of(metadata: Metadata) -> Mapping[str, Sequence[ByteRange]]:
    """The places of a checkpoint's items, by shard."""
    places: dict[str, list[ByteRange]] = {}
    for info in metadata.storage_data.values():
        places.setdefault(str(info.relative_path), []).append(ByteRange(info.offset, info.length))
    return places


class EntriesLeft(dict[str, STORAGE_TYPES]):
    """The entries that are left, by name. Looking up an entry of the dropped optimizer raises OptimizerDropped."""

    def __init__(self, left: Mapping[str, STORAGE_TYPES], dropped: tuple[str, ...], error: OptimizerDropped) -> None:
        super().__init__(left)
        self._dropped, self._error = frozenset(dropped), error

    def __contains__(self, name: object) -> bool:
        """Raises OptimizerDropped: the entry is missing, and its name belongs to the dropped optimizer."""
        if super().__contains__(name):
            return True
        if isinstance(name, str) and is_dropped(name, self._dropped):
            raise self._error
        return False

    def __missing__(self, name: str) -> STORAGE_TYPES:
        raise self._error if is_dropped(name, self._dropped) else KeyError(name)


def refuse_dropped(metadata: Metadata, manifest: Manifest, newest_full: str) -> Metadata:
    """The metadata; if the checkpoint's optimizer was dropped, a copy in which a look-up of its entries raises."""
    if not manifest.is_slim:
        return metadata
    error = OptimizerDropped(manifest.checkpoint_id, manifest.dropped, newest_full)
    return replace(metadata, state_dict_metadata=EntriesLeft(metadata.state_dict_metadata, manifest.dropped, error))
