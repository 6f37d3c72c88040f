"""One rank's part of one load: where the items of its plan lie, whether they can be had, and their reading."""

import logging
import os
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import cached_property

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

from replicated_ckpt.core.bucket.commit_mark import own_prefix
from replicated_ckpt.core.reading.source_order import ByteRange
from replicated_ckpt.core.reading.windows import CELL_BYTES, Window
from replicated_ckpt.dcp.c10d.world import World
from replicated_ckpt.dcp.find.rendezvous import tell_load
from replicated_ckpt.dcp.find.survey import Survey
from replicated_ckpt.dcp.load.item_reader import ItemReader
from replicated_ckpt.dcp.load.loading import Loading, ShardItems, Wanted, windows_for
from replicated_ckpt.dcp.load.shard_reader import ShardReader, Traffic
from replicated_ckpt.dcp.load.sharing import NodeSharing, RemoteNeeds, join_exchange
from replicated_ckpt.dcp.runtime.torch_private import StorageInfo
from replicated_ckpt.dcp.tensors.stored_tensor import StoredTensors, plan_ranges
from replicated_ckpt.errors import ManifestInvalid, ShardLost
from replicated_ckpt.stores.bucket.bucket import Bucket
from replicated_ckpt.stores.local.replaced import lock_version
from replicated_ckpt.stores.local.store import LocalStore, is_nowhere
from replicated_ckpt.stores.node_cache.cache import Spool
from replicated_ckpt.stores.node_cache.exchange import Exchange

log = logging.getLogger(__name__)

REMIND_S = 100.0
"""How often a rank that reads tells the nodes that it reads from: they keep its checkpoint for minutes after a word."""


_BAD_METADATA = "Load another checkpoint, and report this one: an intact save has no such metadata."
_TRANSFORMED = "Load it with the reader that knows the transforms, and save it with ReplicatedWriter, without them."


def places_of(metadata: Metadata) -> Mapping[str, Sequence[ByteRange]]:
    """Where the items of a checkpoint lie, by shard."""
    places: dict[str, list[ByteRange]] = {}
    for info in metadata.storage_data.values():
        places.setdefault(str(info.relative_path), []).append(ByteRange(info.offset, info.length))
    return places


class RankLoad:
    """What one rank reads of the checkpoint that a survey found. One thread."""

    def __init__(
        self,
        store: LocalStore,
        world: World,
        survey: Survey,
        info_by_index: Mapping[MetadataIndex, StorageInfo],
        stored: StoredTensors,
        items: ItemReader,
        places: Mapping[str, Sequence[ByteRange]] | None = None,
        silent: Collection[str] = (),
    ) -> None:
        """`places`: as for ShardReader; the plan may ask for parts of these items.

        `silent`: the nodes that let a time-out pass in this load already.
        """
        self._silent = silent
        self._remind_at = time.monotonic() + REMIND_S
        self._store = store
        self._world = world
        self._survey = survey
        self._info_by_index = info_by_index
        self._stored = stored
        self._items = items
        self._places = places
        self._prefix = own_prefix(survey.found.save_id)
        self._spool: Spool | None = None

    def check(self, plan: LoadPlan) -> None:
        """Every item of the plan lies in a shard of the save that has a copy somewhere.

        Raises:
            ShardLost: naming the shards that have none. ManifestInvalid: metadata and manifest contradict each other.
        """
        manifest, found = self._survey.manifest, self._survey.found
        asked = {self._shard(item) for item in plan.items}
        unknown = asked - set(manifest.shards)
        if unknown:
            raise ManifestInvalid(
                f"The .metadata names {sorted(unknown)}, which the manifest does not know.", _BAD_METADATA
            )
        for item in plan.items:
            info = self._info(item)
            if info.offset + info.length > manifest.shards[self._shard(item)].size_bytes:
                raise ManifestInvalid(
                    f"The .metadata has {item.storage_index.fqn!r} beyond {self._shard(item)}'s end.", _BAD_METADATA
                )
        lost = found.lacking({shard: manifest.shards[shard].size_bytes for shard in asked})
        if lost:
            owners = {shard: manifest.owner_of(shard) for shard in lost}
            raise ShardLost(found.checkpoint_id, owners, self._survey.searched)

    def remote_needs(self, plan: LoadPlan) -> RemoteNeeds | None:
        """What this rank would fetch from elsewhere, if other ranks of its node may need the same.

        Its spool is there when this returns: the others learn of the name with the plan, and need not wait for the file.
        """
        if self._world.blackboard is None or is_nowhere(self._store):
            return None
        remote = {shard for shard in map(self._shard, plan.items) if self._is_remote(shard)}
        wanted = self._group_by_shard(item for item in plan.items if self._shard(item) in remote)
        windows = windows_for(wanted, lambda _: True, sorted(self._survey.manifest.shards))
        if not windows:
            return None
        self._spool = self._new_spool()
        return RemoteNeeds(self._own_node, tuple(windows), None if self._spool is None else self._spool.name)

    def _new_spool(self) -> Spool | None:
        try:
            return Spool(self._store.root_agent_directory(), self._world.size, CELL_BYTES)
        except OSError as exc:
            log.warning("this rank fetches for itself alone: %s", exc)
            return None

    def read(self, plan: LoadPlan, planner: LoadPlanner, bucket: Bucket | None) -> Traffic:
        """Reads every item of the plan, verified, into the planner's tensors; says where the bytes came from.

        What lies here of the save is not removed meanwhile, however long it takes.

        Raises:
            ShardLost: no intact copy is left. And what the planner raises.
        """
        spool, self._spool = self._spool, None
        save, key = self._survey.found, f"rank {self._world.rank}"
        wanted = self._group_by_shard(plan.items)
        shards = sorted(self._survey.manifest.shards)
        remote = {shard for shard in wanted if self._is_remote(shard)}
        windows = windows_for(wanted, remote.__contains__, shards)
        with ExitStack() as stack:
            if spool is not None:
                stack.callback(spool.close)
            version = lock_version(self._store.catalog, save.checkpoint_id, save.save_id)
            if version is not None:
                stack.callback(os.close, version)
            reader = ShardReader(self._store, self._own_node, self._survey, sorted(wanted), key, bucket, self._places)
            reader.findings.note_silent(self._silent)
            stack.callback(reader.tell_suspects)
            stack.callback(reader.close)
            items = {shard: ShardItems(shard, ones, reader, self._items, planner) for shard, ones in wanted.items()}
            exchange = self._join(plan.storage_data, spool, windows)
            if exchange is not None:
                stack.enter_context(closing(exchange))
                reader.findings.exchange = exchange
            loading = Loading(reader, remote.__contains__, exchange)

            def feed(window: Window, raw: memoryview) -> None:
                items[window.shard].take(window, raw)
                self._remind_if_due(reader, remote)

            loading.run(windows, shards, feed)
            for ones in items.values():
                ones.finish()
        return reader.findings.traffic

    def _remind_if_due(self, reader: ShardReader, shards: Collection[str]) -> None:
        """Has the nodes that these shards lie on keep them, however long this rank is busy with others."""
        if time.monotonic() < self._remind_at:
            return
        self._remind_at = time.monotonic() + REMIND_S
        holders = {held.node_id for held in self._survey.holdings if not held.sizes.keys().isdisjoint(shards)}
        holders = {node for node in holders if not reader.findings.is_silent(node)}
        tell_load([peer for peer in self._survey.addresses if peer.node_id in holders], self._survey, self._world)

    def _join(self, shared: object, spool: Spool | None, windows: Sequence[Window]) -> Exchange | None:
        if spool is None or not isinstance(shared, NodeSharing):
            return None
        directory = self._store.root_agent_directory()
        exchange = join_exchange(shared, self._world.rank, spool, directory, self._world.size, windows)
        if exchange is None:
            spool.close()
        return exchange

    def _group_by_shard(self, items: Iterable[ReadItem]) -> dict[str, list[Wanted]]:
        wanted: dict[str, list[Wanted]] = {}
        for item in items:
            info = self._info(item)
            stored = self._stored.of(item, info)
            one = Wanted(item, info, stored, plan_ranges(item, info, stored))
            wanted.setdefault(self._shard(item), []).append(one)
        return wanted

    def _info(self, item: ReadItem) -> StorageInfo:
        info = self._info_by_index.get(item.storage_index)
        if info is None:
            raise ManifestInvalid(f"The .metadata does not say where {item.storage_index.fqn!r} lies.", _BAD_METADATA)
        if getattr(info, "transform_descriptors", None):
            raise ManifestInvalid(
                f"{item.storage_index.fqn!r} was saved through stream transforms, which are not read.", _TRANSFORMED
            )
        return info

    def _shard(self, item: ReadItem) -> str:
        """Name of the shard that an item lies in; in a bucket its path may have the save's own prefix before it."""
        return str(self._info(item).relative_path).removeprefix(self._prefix)

    @cached_property
    def _own_node(self) -> str:
        return self._store.read_node_id()

    def _is_remote(self, shard: str) -> bool:
        """Whether no copy of a shard lies on this node."""
        size = self._survey.manifest.shards[shard].size_bytes
        return self._own_node not in self._survey.found.holders_of(shard, size)
