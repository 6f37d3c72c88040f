"""The StorageReader that users pass to `dcp.load`: finds the checkpoint, and gives each rank the bytes that it needs."""

import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from replicated_ckpt.config import NEWEST_LINEAGE, ReaderConfig
from replicated_ckpt.core.layout import LATEST
from replicated_ckpt.core.reading.source_order import ByteRange
from replicated_ckpt.dcp.c10d.presence import announce
from replicated_ckpt.dcp.c10d.tellable import make_tellable
from replicated_ckpt.dcp.c10d.world import world_of_call
from replicated_ckpt.dcp.find.lineage_choice import describe_lineage
from replicated_ckpt.dcp.find.lookup import look_up
from replicated_ckpt.dcp.find.rendezvous import AgreedError, meet
from replicated_ckpt.dcp.find.survey import Survey
from replicated_ckpt.dcp.load.item_reader import ItemReader
from replicated_ckpt.dcp.load.metadata_copies import UnreadMetadata, read_verified_metadata
from replicated_ckpt.dcp.load.rank_load import RankLoad, places_of
from replicated_ckpt.dcp.load.report import LoadReport
from replicated_ckpt.dcp.load.sharing import plan_sharing
from replicated_ckpt.dcp.load.unasked import describe_unasked
from replicated_ckpt.dcp.runtime.callback import call_back
from replicated_ckpt.dcp.runtime.caller import find_line, warn
from replicated_ckpt.dcp.runtime.raised_by_load import as_checkpoint_exception
from replicated_ckpt.dcp.runtime.torch_private import calling, follow_step
from replicated_ckpt.dcp.tensors.stored_tensor import StoredTensors
from replicated_ckpt.errors import CheckpointNotFound, ReplicatedCkptError
from replicated_ckpt.stores.bucket.bucket import Bucket
from replicated_ckpt.stores.bucket.opening import open_client
from replicated_ckpt.stores.bucket.retry import LOOK_WITHIN_S, READ_WITHIN_S, RetryingClient
from replicated_ckpt.stores.bucket.url import ObjectTarget
from replicated_ckpt.stores.local.store import NOWHERE, LocalStore

log = logging.getLogger(__name__)
T = TypeVar("T")


@make_tellable
class ReplicatedReader(StorageReader):
    """Loads a checkpoint from whatever survived: own store first, then any peer that holds a copy, then the object store.

    After `dcp.load` returns, every tensor holds the bytes that were saved, each checked against the checksum taken then;
    on any number of ranks, on blank nodes too. If no intact copy of a needed shard is left, every rank raises, and the
    error names the shards, their owners and where they were looked for (ShardLost, in DCP's CheckpointException).

    `checkpoint_id="latest"` means the newest checkpoint of which every shard has a copy; every rank gets the same one.

    Args:
        root: this node's store. It may be empty (a replaced node), and is then filled with nothing but its identity.
            None: no store and no agent, only the object store; one process or any number.
        process_group: ranks of the load; None takes the one passed to `dcp.load`.
        no_dist: load on this process alone, although a process group exists; None takes what `dcp.load` was passed.
        object_store: the bucket that the writer was given, "s3://bucket/prefix", say. Checkpoints that stock torch's
            FsspecWriter wrote there can be loaded, too; nobody took checksums of them.
        storage_options: how to get there, as s3fs takes it.
        lineage: which run to load where checkpoints of several lie in one directory of ids: "newest", the one saved last
            by the clock, with a ReplicatedCkptWarning; "refuse" (LineagesMet); or the lineage that a warning named.
        trust_pickles: hand objects that are no tensors to the planner as they lie in the shards. DCP unpickles them, so
            whoever can write the checkpoint runs code here. Off: an object is loaded that names only what
            `torch.load(weights_only=True)` knows, what `torch.serialization.add_safe_globals` added, or numpy's
            plain scalars and arrays; another one is ObjectUnsafe.
        expect_partial: a load may leave saved entries unasked. Off: rank 0 warns, once a load, with their prefixes.
        on_load: called on every rank with its LoadReport once all ranks have read. What it raises is logged.

    One reader serves many loads, one at a time.

    Raises:
        ConfigInvalid: an argument cannot work.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        *,
        process_group: "dist.ProcessGroup | None" = None,
        no_dist: bool | None = None,
        object_store: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        lineage: str = NEWEST_LINEAGE,
        trust_pickles: bool = False,
        expect_partial: bool = False,
        on_load: Callable[[LoadReport], object] | None = None,
    ) -> None:
        super().__init__()
        self.config = ReaderConfig.check(root, object_store=object_store, lineage=lineage)
        self.last_load: LoadReport | None = None
        self._made_at = find_line()
        self._process_group = process_group
        self._no_dist = no_dist
        self._store = LocalStore(self.config.root or NOWHERE)
        self._target = None if object_store is None else ObjectTarget.check(object_store, storage_options)
        self._bucket: Bucket | None = None
        self._given_id: str | os.PathLike[str] | None = None
        self._items = ItemReader(trust_pickles=trust_pickles)
        self._stored = StoredTensors()
        self._expect_partial = expect_partial
        self._on_load = on_load
        self._forget()
        if not no_dist:
            announce()

    def _forget(self) -> None:
        self._survey: Survey | None = None
        self._is_met = False
        self._failure: BaseException | None = None
        self._places: Mapping[str, Sequence[ByteRange]] | None = None
        self._silent: set[str] = set()
        self._started_at = time.monotonic()

    def exists(self, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether there is a committed checkpoint of this id, in any store; the same on every rank, and all must ask.

        A test of the own disk would answer differently on each node. One that is there and no longer whole exists.

        Raises:
            StoreUnavailable: none was found, but not all were reached. Other ReplicatedCkptErrors, on every rank alike.
        """
        return self._look_up(os.fspath(checkpoint_id)) is not None

    def latest(self) -> str | None:
        """The id that "latest" means now, None where no checkpoint is; the same on every rank, and all must ask.

        Raises:
            ShardLost: there are checkpoints, and none is whole. StoreUnavailable: as for `exists`.
        """
        return self._look_up(LATEST)

    def _look_up(self, checkpoint_id: str) -> str | None:
        try:
            world = world_of_call(self._process_group, self._no_dist)
            return look_up(self._store, world, checkpoint_id, self._open_bucket, self.config.lineage)
        finally:
            self._close_bucket()

    def list_keys(self, look: Callable[[LocalStore, Bucket | None, str], T]) -> T:
        """What `look` finds in this reader's store, bucket and lineage. By this process alone: no rank meets another."""
        try:
            return look(self._store, self._open_bucket(), self.config.lineage)
        finally:
            self._close_bucket()

    # What DCP calls, in order ------------------------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new load begins: the ranks meet and find the checkpoint.

        Raises:
            CheckpointNotFound, CheckpointNotCommitted, CheckpointIdMismatch, ShardLost, ConfigInvalid, StoreError: on
                every rank alike, each of them a CheckpointException, too. What went wrong on this rank alone is raised
                later, where DCP tells all ranks.
        """
        if checkpoint_id is not None:
            self._given_id = checkpoint_id
        self._forget()
        if calling() is not None:
            try:
                self._meet()
            except ReplicatedCkptError as exc:
                raise as_checkpoint_exception(exc, self._world.rank) from exc.__cause__

    def _meet(self) -> None:
        self._is_met = True
        is_alone = True if calling() is None else self._no_dist
        self._world = world_of_call(self._process_group, is_alone)
        try:
            where, lineage = self._open_bucket, self.config.lineage
            self._survey = meet(self._store, self._world, self._given_id, where, lineage=lineage)
        except AgreedError as exc:
            self._failure = exc.error
            raise exc.error from None
        except BaseException as exc:
            self._failure = exc  # this rank's alone: raised where DCP tells all ranks
            if self._world.blackboard is None:
                raise

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The checkpoint's `.metadata`, verified and safely read.

        Called outside of a load it asks for this process alone, whatever process group is there, and waits for no rank.

        Called by DCP, what went wrong is raised a moment later, by `set_up_storage_reader` or whatever looks at the
        metadata before: DCP would take it for metadata that every rank has for itself, and raise an AssertionError.

        Raises:
            ReplicatedCkptError: as above.
        """
        del args
        try:
            if "rank" not in kwargs and not self._is_met:  # no reset came first: DCP calls it only with a checkpoint_id
                self._forget()
                self._meet()
            self._is_met = False
            return self._read_metadata()
        except Exception as exc:
            self._failure = exc
            if calling() is None:
                raise
            return UnreadMetadata(exc)

    def _read_metadata(self) -> Metadata:
        if self._failure is not None:
            raise self._failure
        metadata = read_verified_metadata(
            self._store, self._surveyed, self._open_bucket(), self._reader_key, self._silent
        )
        self._places = places_of(metadata) if self._surveyed.unmanaged_warning else None
        if self._surveyed.unmanaged_warning and self._world.is_coordinator:
            warn(self._surveyed.unmanaged_warning, self._made_at)
        if len(self._surveyed.lineages) > 1:
            warn(_lineages_warning(self._surveyed), self._made_at)
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Prepares to read what `read_metadata` gave. Raises what kept it from reading."""
        del is_coordinator, args, kwargs
        if self._failure is not None:
            raise self._failure
        self._stored.describe(metadata)
        self._saved = metadata.state_dict_metadata
        self._load = RankLoad(
            self._store,
            self._world,
            self._surveyed,
            metadata.storage_data,
            self._stored,
            self._items,
            self._places,
            self._silent,
        )

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Checks that every item this rank needs lies in a shard of the save that has a copy somewhere.

        Raises:
            ShardLost: naming the shards that have none. ManifestInvalid: metadata and manifest contradict each other.
        """
        self._load.check(plan)
        return replace(plan, storage_data=self._load.remote_needs(plan))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Tells the ranks of each node which of them fetches what several need from elsewhere: each block once.

        Warns of saved entries for which no rank asks, unless that is expected.
        """
        if not self._expect_partial:
            warning = describe_unasked(self.checkpoint_id, self._saved, plans)
            if warning is not None:
                warn(warning, self._made_at)
        return plan_sharing(plans, sorted(self._surveyed.manifest.shards))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads every item of the plan, verified, into the planner's tensors.

        Raises:
            ShardLost: no intact copy is left. ObjectUnsafe: an object names what nothing allows. Tensors that were not read
                yet keep what they held. One that was being read holds bytes of the checkpoint, each verified, up to some
                place in it, and what it held from there on.
        """
        began = time.monotonic()
        try:
            traffic = self._load.read(plan, planner, self._open_bucket())
        finally:
            self._close_bucket()
        now = time.monotonic()
        self.last_load = LoadReport(
            self._surveyed.found.checkpoint_id,
            self._surveyed.found.save_id,
            traffic.bytes_local,
            traffic.bytes_peer,
            traffic.bytes_object,
            len(plan.items),
            now - self._started_at,
            tuple(traffic.bad_copies),
            traffic.bytes_shared,
            self._world.rank,
            socket.gethostname(),
            {"plan": began - self._started_at, "read": now - began},
        )
        if not follow_step(self._learn_outcome):
            self._tell_loaded([self.last_load])
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _learn_outcome(self, all_gather: Callable[[Any], list[Any]], value: object) -> list[Any]:
        """Every rank tells all others that it has read, and here what: the end of the load, on this rank.

        DCP gathers None from a rank that has, and takes what else it finds for an error.
        """
        told = all_gather(self.last_load.as_dict() if value is None and self.last_load is not None else value)
        if all(one is None or isinstance(one, dict) for one in told):
            self._tell_loaded([LoadReport.from_dict(one) for one in told if one is not None])
        return [None if isinstance(one, dict) else one for one in told]

    def _tell_loaded(self, reports: Sequence[LoadReport]) -> None:
        assert self.last_load is not None
        self.last_load = replace(self.last_load, ranks=tuple(reports))
        if self._world.is_coordinator:
            log.info("%s", self.last_load)
        call_back(self._on_load, self.last_load)

    # Steps -------------------------------------------------------------------------------------------------------

    @property
    def _reader_key(self) -> str:
        return f"rank {self._world.rank}"

    @property
    def _surveyed(self) -> Survey:
        if self._survey is None:
            raise CheckpointNotFound("No checkpoint has been looked for: read_metadata comes first.")
        return self._survey

    def _open_bucket(self) -> Bucket | None:
        """The bucket, from the first use in a load to its end: a client must not be forked with its user."""
        if self._bucket is None and self._target is not None:
            look_s = READ_WITHIN_S if self.config.root is None else LOOK_WITHIN_S
            self._bucket = Bucket(RetryingClient(open_client(self._target), look_within_s=look_s))
        return self._bucket

    def _close_bucket(self) -> None:
        if self._bucket is not None:
            self._bucket.client.close()
            self._bucket = None

    @property
    def checkpoint_id(self) -> str:
        """The checkpoint that was found; before that, the id as it was given, or the root."""
        if self._survey is not None:
            return self._survey.found.checkpoint_id
        return str(self._given_id or self.config.root or self.config.object_store or "")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """False: a reader cannot be guessed from an id alone; DCP asks this only when no reader was passed."""
        del checkpoint_id
        return False


def _lineages_warning(survey: Survey) -> str:
    chosen, *others = map(describe_lineage, survey.lineages)
    return (
        f"Checkpoints of several runs lie in one directory of ids. Loaded is {chosen}. Left alone is {'; '.join(others)}. "
        "Pass ReplicatedReader(lineage=...) to load another, and give each run a directory of its own."
    )
