"""One load on one rank: its steps, in the order in which DCP calls them."""

import logging
import os
import socket
import time
import uuid
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from torch.distributed.checkpoint.metadata import STORAGE_TYPES, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

from replicated_ckpt.config import ReaderConfig
from replicated_ckpt.core.commit_mark import own_prefix
from replicated_ckpt.core.inventory import SaveFound
from replicated_ckpt.core.layout import OBJECT_NODE
from replicated_ckpt.core.reading.newest import is_newest
from replicated_ckpt.core.reading.windows import CELL_BYTES, ByteRange, Window
from replicated_ckpt.dcp.c10d.world import World
from replicated_ckpt.dcp.find.absence import with_bucket_not_asked
from replicated_ckpt.dcp.find.choice import describe_lineages
from replicated_ckpt.dcp.find.keeping import announce_load
from replicated_ckpt.dcp.find.rendezvous import RENDEZVOUS_TIMEOUT_S, AgreedError, meet
from replicated_ckpt.dcp.find.survey import Survey
from replicated_ckpt.dcp.load.ending import exchange_outcomes, outcomes_without
from replicated_ckpt.dcp.load.item_reader import ItemReader
from replicated_ckpt.dcp.load.load_report import LoadReport, report_to_agent
from replicated_ckpt.dcp.load.loading import Loading, ShardItems, Wanted, windows_for
from replicated_ckpt.dcp.load.metadata_copies import places_of, read_verified_metadata, refuse_dropped
from replicated_ckpt.dcp.load.shard_reader import ShardReader, Traffic
from replicated_ckpt.dcp.load.sharing import NodeSharing, RemoteNeeds, join_exchange, plan_sharing
from replicated_ckpt.dcp.planning.cached_plan import CachedLoadPlan, names_asked, without_items, without_names
from replicated_ckpt.dcp.rank_state.rank_state import find_world
from replicated_ckpt.dcp.runtime.agent_report import report_ended, report_failed
from replicated_ckpt.dcp.runtime.gc_pause import Pause
from replicated_ckpt.dcp.runtime.torch_private import Collectives, StorageInfo, follow_step
from replicated_ckpt.dcp.runtime.user_code import Line, call_back, warn
from replicated_ckpt.dcp.tensors.stored_tensor import StoredTensors, plan_ranges
from replicated_ckpt.errors import CheckpointNotFound, ManifestInvalid, ShardLost
from replicated_ckpt.stores.bucket.bucket import Bucket
from replicated_ckpt.stores.bucket_client.opening import open_client
from replicated_ckpt.stores.bucket_client.retry import LOOK_WITHIN_S, READ_WITHIN_S, RetryingClient
from replicated_ckpt.stores.bucket_client.url import ObjectTarget
from replicated_ckpt.stores.local.store import EmptyStore, LocalStore
from replicated_ckpt.stores.local.versions.readers import lock_version
from replicated_ckpt.stores.node_cache.cache import RankCache
from replicated_ckpt.stores.node_cache.exchange import Exchange

log = logging.getLogger(__name__)


class ReaderBucket:
    """The bucket of a reader, opened at its first use. For one thread.

    Call `close` after each load: a client that is open during a fork hangs in the new process.
    """

    def __init__(self, target: ObjectTarget | None, *, is_all: bool) -> None:
        """`is_all`: the reader has no other source, so the search in the bucket may take as long as a read."""
        self._target = target
        self._look_s = READ_WITHIN_S if is_all else LOOK_WITHIN_S
        self._bucket: Bucket | None = None
        self._is_over: Callable[[], bool] = lambda: False

    def share_timeout(self, should_stop: Callable[[], bool]) -> None:
        """Until `close`, `should_stop` ends the waits for a bucket that another rank or thread has found silent."""
        self._is_over = should_stop

    def open(self) -> Bucket | None:
        """The bucket; None if the reader has none."""
        if self._bucket is None and self._target is not None:
            # A new load waits for the bucket again, even if the bucket was silent in the load before.
            self._is_over = lambda: False
            client = open_client(self._target)
            self._bucket = Bucket(RetryingClient(client, look_within_s=self._look_s, should_stop=self._should_stop))
        return self._bucket

    def _should_stop(self) -> bool:
        return self._is_over()

    def close(self) -> None:
        """Closes the connections. A thread that still waits for an answer does not retry. The bucket may be opened
        again.
        """
        if self._bucket is not None:
            self._bucket.client.close()
            self._bucket = None
        self._is_over = lambda: True


@dataclass(frozen=True)
class ReaderParts:
    """The parts of a reader that outlive a load. `planning`: the pause of garbage collection while DCP plans a load."""

    config: ReaderConfig
    store: LocalStore
    bucket: ReaderBucket
    items: ItemReader
    stored: StoredTensors
    expect_partial: bool
    made_at: Line | None
    on_load: Callable[[LoadReport], object] | None
    planning: Pause = field(default_factory=Pause)


_PREFIXES_MAX = 8
_ADVICE = (
    "These entries are not restored. A new optimizer's state_dict() names no state: use get_state_dict of "
    "torch.distributed.checkpoint.state_dict. If you want only a part, pass "
    "ReplicatedReader(expect_partial=True)."
)


def describe_not_loaded(
    checkpoint_id: str, saved: Mapping[str, STORAGE_TYPES], plans: Sequence[LoadPlan]
) -> str | None:
    """A warning about the saved entries that no rank's plan asks for; None if there are none."""
    asked = names_asked(plans)
    not_loaded = [name for name, entry in saved.items() if name not in asked and _has_content(entry)]
    not_loaded = [
        name for name in not_loaded if find_world(name) in (None, len(plans))
    ]  # RankState's entries of other world sizes are left out on purpose
    if not not_loaded:
        return None
    count_by_prefix = count_prefixes(not_loaded, asked)
    listed = sorted(count_by_prefix.items(), key=lambda one: (-one[1], one[0]))
    told = [f"{prefix!r} ({count})" for prefix, count in listed[:_PREFIXES_MAX]]
    if len(listed) > _PREFIXES_MAX:
        told.append(f"and {len(listed) - _PREFIXES_MAX} other prefixes")
    total = sum(map(_has_content, saved.values()))
    return (
        f"The load of checkpoint {checkpoint_id!r} does not load {len(not_loaded)} of {total} saved entries, under "
        f"{', '.join(told)}. {_ADVICE}"
    )


def count_prefixes(not_loaded: Collection[str], asked: Collection[str]) -> Mapping[str, int]:
    """Counts the entries that are not loaded, by the shortest prefix under which no entry was asked for."""
    # A prefix of a name that was asked for would blame a part that the load does read.
    met = {prefix for name in asked for prefix in _prefixes(name)}
    return Counter(next((prefix for prefix in _prefixes(name) if prefix not in met), name) for name in not_loaded)


def _prefixes(name: str) -> Iterator[str]:
    end = name.find(".")
    while end >= 0:
        yield name[:end]
        end = name.find(".", end + 1)
    yield name


def _has_content(entry: STORAGE_TYPES) -> bool:
    """Whether a load can ask for the entry: DCP's planners plan no read of a tensor without elements."""
    return not (isinstance(entry, TensorStorageMetadata) and 0 in entry.size)


REMIND_S = 100.0
"""How often a rank renews its pins on the nodes that it reads from. Without that, a pin ends after minutes."""


_BAD_METADATA = "Load another checkpoint, and report this one: an intact save has no such metadata."
_Placed = tuple[ReadItem, StorageInfo, str]
"""An item, where it lies, and the name of its shard."""
_TRANSFORMED = (
    "Load the checkpoint with the reader that applies the transforms. Save it with ReplicatedWriter, without them."
)


class LoadAttempt:
    """One load on one rank. Its steps: `meet`, `read_metadata`, `prepare`, `plan`, `share` (coordinator), `read_items`.

    If only this rank fails in the first two steps, its error is kept. `prepare` raises it, because DCP sends the errors of
    that step to all ranks. One thread.
    """

    def __init__(
        self,
        parts: ReaderParts,
        given_id: str | os.PathLike[str] | None,
        keep_report: Callable[[LoadReport], None],
        max_tries: int | None = None,
    ) -> None:
        """`keep_report` is called with this rank's report after the read, and again once all ranks have read. At the
        coordinator the second one has the reports of all ranks.

        `max_tries`: "latest" skips a checkpoint that was restored this many times without a later save.
        """
        self._parts, self._max_tries = parts, max_tries
        self._store = parts.store
        self._given_id = given_id
        self._keep_report = keep_report
        self._started_at = time.monotonic()
        self._own_load_id = uuid.uuid4().hex  # of a load on one process; a conversion reads many times in one load
        self._found: Survey | None = None
        self._failure: BaseException | None = None
        self._silent: set[str] = set()
        self._places: Mapping[str, Sequence[ByteRange]] | None = None
        self._stored = parts.stored
        self._cache: RankCache | None = None
        self._held: list[_Placed] = []
        self._report: LoadReport | None = None
        self._is_followed = False
        self._release_lock: Callable[[], object] = lambda: None
        self.is_met = False

    @property
    def checkpoint_id(self) -> str | None:
        """The id of the checkpoint that was found, if any."""
        return None if self._found is None else self._found.found.checkpoint_id

    def meet(self, world: World, *, in_step: bool = False) -> None:
        """The ranks meet and find the checkpoint. `in_step`: called in DCP's first step, because this rank passed no
        id.

        Raises:
            ReplicatedCkptError: on every rank alike. `prepare` raises an error of this rank alone instead. If a rank is
                in DCP's first step, `prepare` raises every error, because DCP waits there for all ranks.
        """
        self._world = world
        lineage, bucket = self._parts.config.lineage, self._parts.bucket.open
        try:
            given_id, tries = self._given_id, self._max_tries
            self._found = meet(self._store, world, given_id, bucket, lineage=lineage, in_step=in_step, max_tries=tries)
            self._silent |= {*self._found.silent} - {self._own_node}  # this node's disk is read without its agent
            self._keep_here(self._found.found)
        except AgreedError as exc:
            self._failure = exc.error
            if not exc.in_step:
                raise exc.error from None
        except BaseException as exc:
            # The other ranks go on into DCP's first step, and wait there for this one: `prepare` raises the error there.
            self._failure = exc
            if world.blackboard is None:
                raise
        self.is_met = True

    def _keep_here(self, save: SaveFound) -> None:
        """Locks the save's files here against removal by any process: not only the agent removes files."""
        # None: the save has no files here, or they were removed a moment ago. The bytes then come from a peer.
        version = lock_version(self._store.catalog, save.checkpoint_id, save.save_id)
        if version is not None:
            self._release_lock()
            # finalize: a load that ends by an exception may never call `release_files`, and the lock would outlive it.
            self._release_lock = weakref.finalize(self, version.release)

    @contextmanager
    def reporting_failure(self) -> Iterator[None]:
        """If the block raises, this node's agent gets the class of the error."""
        try:
            yield
        except BaseException as exc:
            wanted = self.checkpoint_id or str(self._given_id or "")
            report_failed(self._store, "load", wanted, self._world.rank, time.monotonic() - self._started_at, exc)
            raise

    def release_files(self) -> None:
        """Releases the lock on this load's files here. Closes this rank's cache if the load ended before it read."""
        with ExitStack() as stack:
            self._take_cache(stack)
        self._release_lock()

    def fail(self, error: BaseException) -> None:
        """Keeps an error, which `prepare` raises."""
        self.release_files()
        self._failure = error

    def read_metadata(self) -> Metadata:
        """The checkpoint's `.metadata`, verified and read without an unpickler. Warns of anything unusual about its
        sources.
        """
        self.check_failure()
        key, bucket = f"rank {self._world.rank}", self._parts.bucket.open()
        metadata = read_verified_metadata(self._store, self._survey, bucket, key, self._silent)
        there = self._survey.in_bucket
        # Stock torch took no checksums: the items' places are needed to check each by torch.save's own CRC32.
        if self._survey.unmanaged_warning or (there is not None and there.is_unmanaged):
            self._places = places_of(metadata)
        # One warning for the job, not one for each rank.
        if self._survey.unmanaged_warning and self._world.is_coordinator:
            warn(self._survey.unmanaged_warning, self._parts.made_at)
        if self._survey.skipped and self._world.is_coordinator:
            warn(self._survey.skipped, self._parts.made_at)
        if self._survey.guard and self._world.is_coordinator:
            warn(self._survey.guard, self._parts.made_at)
        if len(self._survey.lineages) > 1:
            warn(describe_lineages(self._survey.lineages), self._parts.made_at)
        return metadata

    def refuse_dropped(self, metadata: Metadata) -> Metadata:
        """The metadata for a planner. A look-up of an entry that the checkpoint has dropped raises OptimizerDropped."""
        return refuse_dropped(metadata, self._survey.manifest, self._survey.newest_full)

    def check_failure(self) -> None:
        """Raises the error that kept this rank from reading the metadata."""
        if self._failure is not None:
            raise self._failure

    def prepare(self, metadata: Metadata) -> None:
        """Takes the result of `read_metadata`, as DCP passes it on. Raises the error that prevented it."""
        self.check_failure()
        self._stored.set_metadata(metadata)
        self._saved = metadata.state_dict_metadata
        self._info_by_index: Mapping[MetadataIndex, StorageInfo] = metadata.storage_data
        self._prefix = own_prefix(self._survey.found.save_id)
        self._remind_at = time.monotonic() + REMIND_S

    def _forget_metadata(self) -> None:
        """Drops the metadata: a reader may live as long as the training, and the metadata of a million chunks takes a
        gigabyte.
        """
        self._saved, self._info_by_index, self._places, self._held = {}, {}, None, []
        self._stored.set_metadata(None)

    def plan(self, plan: LoadPlan, *, keeps_items: bool) -> LoadPlan:
        """The plan, with the windows that this rank would fetch from other nodes. Checks it as
        ReplicatedReader.prepare_local_plan.

        `keeps_items`: no planner or reader of this load reads the items before `read_items`, so the items stay on this
        rank.
        """
        try:
            placed = self._place(plan.items)
            self._check(placed)
        except BaseException:
            self.release_files()
            raise
        self._is_followed = follow_step(self._learn_outcome)
        plan = replace(plan, storage_data=self._remote_needs(placed))
        # A subclass of LoadPlan may carry fields that a plan with names alone would drop.
        if not keeps_items or type(plan) is not LoadPlan or self._world.blackboard is None:
            return plan
        self._held = placed
        return without_items(plan)

    def share(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Coordinator: as ReplicatedReader.prepare_global_plan."""
        if not self._parts.expect_partial:
            warning = describe_not_loaded(self._survey.found.checkpoint_id, self._saved, plans)
            if warning is not None:
                warn(warning, self._parts.made_at)
        return plan_sharing(list(map(without_names, plans)), sorted(self._survey.manifest.shards))

    def _check(self, placed: Sequence[_Placed]) -> None:
        """Checks that every item lies in a shard of the save that has a copy somewhere. Raises as `plan`."""
        manifest, found = self._survey.manifest, self._survey.found
        asked = {shard for _, _, shard in placed}
        unknown = asked - set(manifest.shards)
        if unknown:
            raise ManifestInvalid(
                f"The .metadata names {sorted(unknown)}, which the manifest does not have.", _BAD_METADATA
            )
        # Metadata and manifest are two files: here they are compared, before memory is taken for a read.
        for item, info, shard in placed:
            if info.offset + info.length > manifest.shards[shard].size_bytes:
                raise ManifestInvalid(
                    f"The .metadata places {item.storage_index.fqn!r} beyond the end of {shard}.", _BAD_METADATA
                )
        lost = found.list_missing({shard: manifest.shards[shard].size_bytes for shard in asked})
        if lost:
            owners = {shard: manifest.owner_of(shard) for shard in lost}
            searched = with_bucket_not_asked(self._survey.searched, manifest)
            is_latest = self._given_id is not None and is_newest(os.fspath(self._given_id))
            raise ShardLost(found.checkpoint_id, owners, searched, is_latest)

    def _remote_needs(self, placed: Sequence[_Placed]) -> RemoteNeeds | None:
        """For the coordinator: the windows that this rank would fetch from other nodes, and the nodes that it found silent.
        None: there are neither, or the ranks share nothing.

        This rank's cache exists when this returns: other ranks get its name with the plan, and need not wait for the
        file.
        """
        if self._world.blackboard is None or isinstance(self._store, EmptyStore):
            return None
        remote = {shard for shard in {shard for _, _, shard in placed} if self._is_remote(shard)}
        wanted = self._group_by_shard(one for one in placed if one[2] in remote)
        windows = windows_for(wanted, lambda _: True, sorted(self._survey.manifest.shards))
        silent = frozenset(self._silent.difference(self._survey.silent))
        if not windows and not silent:
            return None
        self._cache = self._new_cache() if windows else None
        return RemoteNeeds(self._own_node, tuple(windows), None if self._cache is None else self._cache.name, silent)

    def _new_cache(self) -> RankCache | None:
        try:
            return RankCache.create(self._store.root_agent_directory(), self._world.size, CELL_BYTES)
        # A full disk or a missing /dev/shm costs the sharing, not the load.
        except OSError as exc:
            log.warning("this rank reads only for itself: %s", exc)
            return None

    def read_items(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        """As ReplicatedReader.read_data. The save's files here stay locked against removal, however long it takes."""
        began, key = time.monotonic(), f"rank {self._world.rank}"
        placed = self._held if isinstance(plan, CachedLoadPlan) else self._place(plan.items)
        wanted = self._group_by_shard(placed)
        shards = sorted(self._survey.manifest.shards)
        remote = {shard for shard in wanted if self._is_remote(shard)}
        windows = windows_for(wanted, remote.__contains__, shards)
        with ExitStack() as stack:
            stack.callback(self._parts.bucket.close)
            cache = self._take_cache(stack)
            stack.callback(self.release_files)
            # Again: a save that was published here after `meet` must be locked, too.
            self._keep_here(self._survey.found)
            bucket = self._parts.bucket.open()
            reader = ShardReader(self._store, self._own_node, self._survey, sorted(wanted), key, bucket, self._places)
            # A node that was silent for the metadata would be silent again: its time-out is paid once.
            reader.findings.silent |= self._silent | self._find_silent_elsewhere(plan.storage_data)
            self._parts.bucket.share_timeout(partial(reader.findings.is_silent, OBJECT_NODE))
            stack.callback(reader.report_suspects)
            stack.callback(reader.close)
            exchange = self._join(plan.storage_data, cache, windows)
            if exchange is not None:
                stack.enter_context(closing(exchange))
                reader.findings.exchange = exchange
            items = {
                shard: ShardItems(shard, ones, reader, self._parts.items, planner) for shard, ones in wanted.items()
            }

            def feed(window: Window, raw: memoryview) -> None:
                items[window.shard].take_item(window, raw)
                self._remind_if_due(reader, remote)

            def place_of(window: Window) -> memoryview | None:
                return items[window.shard].place_of(window)

            Loading(reader, remote.__contains__, exchange).run(windows, shards, feed, place_of)
            for ones in items.values():
                ones.finish_shard()
        self._report_read(reader.findings.traffic, len(placed), began)

    def _take_cache(self, stack: ExitStack) -> RankCache | None:
        cache, self._cache = self._cache, None
        if cache is not None:
            stack.callback(cache.close)
        return cache

    def _report_read(self, traffic: Traffic, items: int, began: float) -> None:
        now = time.monotonic()
        self._report = report = LoadReport(
            self._survey.found.checkpoint_id,
            self._survey.found.save_id,
            traffic.bytes_local,
            traffic.bytes_peer,
            traffic.bytes_object,
            items,
            now - self._started_at,
            tuple(traffic.bad_copies),
            traffic.bytes_shared,
            self._world.rank,
            socket.gethostname(),
            {"plan": began - self._started_at, "read": now - began},
            self._own_node,
            self._survey.load_id or self._own_load_id,
            traffic.seconds_by_node,
        )
        self._keep_report(report)
        # Outside of DCP, or on a torch whose last step cannot be followed, no other rank's outcome arrives.
        if not self._is_followed:
            self._report_loaded(report, [report])

    def _learn_outcome(self, collectives: Collectives, value: object) -> list[Any]:
        """Every rank gets from the coordinator whether all ranks have read. This ends the load on this rank."""
        self.release_files()
        self._forget_metadata()
        # Watched collectives notice a dead rank themselves; others would hang in the gather.
        board = None if self._world.watched is not None else self._world.blackboard
        arrival = f"load/arrived/{self._survey.load_id}"
        if board is not None and (lost := board.await_all(arrival, RENDEZVOUS_TIMEOUT_S, "this load")):
            return outcomes_without(lost, collectives, value)
        outcomes, reports = exchange_outcomes(collectives, value, self._report)
        if board is not None and self._world.is_coordinator:
            board.forget(arrival)
        if self._report is not None and outcomes.count(None) == len(outcomes):
            self._report_loaded(self._report, reports)
        return outcomes

    def _report_loaded(self, own: LoadReport, reports: Sequence[LoadReport]) -> None:
        report = replace(own, ranks=tuple(reports))
        self._keep_report(report)
        if self._world.is_coordinator:
            log.info("%s", report)
        report_ended(self._store, report_to_agent(report, time.time()))
        call_back(self._parts.on_load, report)

    def _remind_if_due(self, reader: ShardReader, shards: Collection[str]) -> None:
        """Renews the pins on the nodes of these shards while this rank reads from other sources."""
        if time.monotonic() < self._remind_at:
            return
        self._remind_at = time.monotonic() + REMIND_S
        holders = {held.node_id for held in self._survey.holdings if not held.sizes.keys().isdisjoint(shards)}
        holders = {node for node in holders if not reader.findings.is_silent(node)}
        # The pins of nodes that only this rank reads from would expire: the load's begin was minutes ago.
        told = [peer for peer in self._survey.addresses if peer.node_id in holders]
        reader.findings.silent |= announce_load(told, self._survey, self._world)[1]

    def _find_silent_elsewhere(self, shared: object) -> frozenset[str]:
        """Nodes that any rank found silent while it read the metadata. This node is left out: its disk is read without
        its agent.
        """
        return shared.silent - {self._own_node} if isinstance(shared, NodeSharing) else frozenset()

    def _join(self, shared: object, cache: RankCache | None, windows: Sequence[Window]) -> Exchange | None:
        if cache is None or not isinstance(shared, NodeSharing) or not shared.units:
            return None
        directory = self._store.root_agent_directory()
        exchange = join_exchange(shared, self._world.rank, cache, directory, self._world.size, windows)
        if exchange is None:
            # No other rank takes from this cache: it must not fill.
            cache.close()
        return exchange

    def _group_by_shard(self, placed: Iterable[_Placed]) -> dict[str, list[Wanted]]:
        wanted: dict[str, list[Wanted]] = {}
        for item, info, shard in placed:
            stored = self._stored.of(item, info)
            one = Wanted(item, info, stored, plan_ranges(item, info, stored))
            wanted.setdefault(shard, []).append(one)
        return wanted

    def _place(self, items: Iterable[ReadItem]) -> list[_Placed]:
        """The place of each item. In a bucket a path may have the save's own prefix before the shard's name."""
        infos = ((item, self._find_info(item)) for item in items)
        return [(item, info, str(info.relative_path).removeprefix(self._prefix)) for item, info in infos]

    def _find_info(self, item: ReadItem) -> StorageInfo:
        info = self._info_by_index.get(item.storage_index)
        if info is None:
            raise ManifestInvalid(f"The .metadata has no place for {item.storage_index.fqn!r}.", _BAD_METADATA)
        if getattr(info, "transform_descriptors", None):
            raise ManifestInvalid(
                f"{item.storage_index.fqn!r} was saved through stream transforms, which this package does not read.",
                _TRANSFORMED,
            )
        return info

    @property
    def _survey(self) -> Survey:
        if self._found is None:
            raise CheckpointNotFound(
                "The reader has not looked for a checkpoint yet.", "Call dcp.load, or read_metadata first."
            )
        return self._found

    @cached_property
    def _own_node(self) -> str:
        return self._store.read_node_id()

    def _is_remote(self, shard: str) -> bool:
        """Whether no copy of a shard lies on this node."""
        size = self._survey.manifest.shards[shard].size_bytes
        return self._own_node not in self._survey.found.holders_of(shard, size)
