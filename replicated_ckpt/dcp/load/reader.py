"""The StorageReader that users pass to `dcp.load`: finds the checkpoint, and reads the bytes that each rank needs."""

import os
import threading
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from replicated_ckpt.config import NEWEST_LINEAGE, ReaderConfig, check_callable, check_root
from replicated_ckpt.core.inventory import SaveFound
from replicated_ckpt.core.reading.newest import Newest
from replicated_ckpt.dcp.c10d.picklable_error import make_picklable
from replicated_ckpt.dcp.c10d.waiting import announce
from replicated_ckpt.dcp.c10d.world import world_of_call
from replicated_ckpt.dcp.find.listing import look_up
from replicated_ckpt.dcp.load.item_reader import ItemReader
from replicated_ckpt.dcp.load.load_attempt import LoadAttempt, ReaderBucket, ReaderParts
from replicated_ckpt.dcp.load.load_report import LoadReport
from replicated_ckpt.dcp.load.metadata_copies import UnreadMetadata
from replicated_ckpt.dcp.runtime.torch_private import find_call, may_omit_items
from replicated_ckpt.dcp.runtime.user_code import as_checkpoint_exception, find_line
from replicated_ckpt.dcp.tensors.stored_tensor import StoredTensors
from replicated_ckpt.errors import ConfigInvalid, ReplicatedCkptError
from replicated_ckpt.stores.bucket.bucket import Bucket
from replicated_ckpt.stores.bucket_client.url import ObjectTarget
from replicated_ckpt.stores.local.store import EmptyStore, LocalStore

T = TypeVar("T")


@make_picklable
class ReplicatedReader(StorageReader):
    """Loads a checkpoint from all stores that survived: own store first, then any peer with a copy, then the object store.

    After `dcp.load` returns, every tensor has the bytes that were saved. Each byte was checked against a checksum from the
    save. This holds for any number of ranks, and on blank nodes, too. If no intact copy of a needed shard is left, every
    rank raises ShardLost, in DCP's CheckpointException. The error names the shards, their owners, and the searched places.

    `checkpoint_id="latest"` is the newest checkpoint whose shards all have a copy. Every rank gets the same one. If
    checkpoints lie in several directories of ids, name one: "run-a/latest" is the newest of `run-a/step-1`,
    `run-a/step-2`, ..., and "./latest" is the newest of `step-1`, `step-2`, ....

    Args:
        root: this node's store. It may be empty, as on a replaced node; the load then writes only the node's identity.
            None: the load reads only the object store, without an agent. It may have any number of ranks.
        process_group: ranks of the load. With None it is the group that `dcp.load` was passed.
        no_dist: load on this process alone, although a process group exists. None: as `dcp.load` was passed.
        object_store: the bucket of the writer, for example "s3://bucket/prefix". Checkpoints that stock torch's
            FsspecWriter wrote there can be loaded, too. Each of their items is checked by the CRC32 of torch.save in it.
        storage_options: how to reach the bucket, as s3fs takes it.
        lineage: which run to load if a directory of ids has several. "newest": the one saved last by the clock, with a
            ReplicatedCkptWarning. "refuse": raise LineagesMet. Otherwise a lineage that a warning named.
        trust_pickles: pass objects other than tensors to the planner as they are in the shards. DCP unpickles them, so
            anyone who can write the checkpoint can run code here. By default an object is loaded only if it names only what
            `torch.load(weights_only=True)` allows, what `torch.serialization.add_safe_globals` added, or numpy's
            plain scalars and arrays. Any other object raises ObjectUnsafe.
        expect_partial: do not warn of saved entries that the load leaves out. By default rank 0 warns once per load.
        on_load: called on every rank with its LoadReport once all ranks have read. Its exceptions are logged.

    One reader serves many loads, one at a time.

    Raises:
        ConfigInvalid: an argument is invalid.
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
        check_callable("on_load", on_load)
        self.config = ReaderConfig(None if root is None else check_root(root), object_store, lineage)
        self.last_load: LoadReport | None = None
        self.max_tries: int | None = None
        """For the next load of "latest": it skips a checkpoint that was restored this many times without a later save."""
        self._process_group = process_group
        self._no_dist = no_dist
        target = ObjectTarget.check_given(object_store, storage_options)
        self._given_id: str | os.PathLike[str] | None = None
        self._parts = ReaderParts(
            self.config,
            EmptyStore() if self.config.root is None else LocalStore(self.config.root),
            ReaderBucket(target, is_all=self.config.root is None),
            ItemReader(trust_pickles=trust_pickles),
            StoredTensors(),
            expect_partial,
            find_line(),
            on_load,
        )
        self._attempt_by_thread: dict[int, LoadAttempt] = {}
        self._attempt = self._begin(None)
        # Otherwise other ranks of this host could not notice the death of this rank before its first load.
        if not no_dist:
            announce()

    def __repr__(self) -> str:
        bucket = "" if self.config.object_store is None else f", object_store={self.config.object_store!r}"
        return f"<ReplicatedReader({self.config.root!r}{bucket})>"

    def _begin(self, given_id: str | os.PathLike[str] | None) -> LoadAttempt:
        attempt = LoadAttempt(self._parts, given_id, self._keep_report, self.max_tries)
        self._attempt_by_thread[threading.get_ident()] = attempt
        return attempt

    def _find_own(self) -> LoadAttempt:
        """The load that this thread began, else the load that began last."""
        return self._attempt_by_thread.get(threading.get_ident(), self._attempt)

    @property
    def _under_way(self) -> LoadAttempt:
        """This thread's load. Raises ConfigInvalid: another thread has begun one with this reader."""
        attempt = self._find_own()
        # Two loads would share one rendezvous, and each would get the other's checkpoint.
        if attempt is not self._attempt:
            raise ConfigInvalid(
                f"Two threads load with {self!r} at once.", "Give each thread its own ReplicatedReader."
            )
        return attempt

    def _keep_report(self, report: LoadReport) -> None:
        self.last_load = report

    def exists(self, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a committed checkpoint of this id is in any store. The same on every rank; all ranks must call it.

        A test of the node's own disk could differ between nodes. A checkpoint that is no longer complete exists, too.

        Raises:
            StoreUnavailable: none was found, but not all stores were reached. Other ReplicatedCkptErrors, on every rank
                alike.
        """
        return self.find(os.fspath(checkpoint_id)) is not None

    def latest(self, directory: str | None = None) -> str | None:
        """The id that "latest" means now; None if there is no checkpoint. The same on every rank; all ranks must call
        it.

        `directory`: a directory of ids, such as "run-a", or "" for ids of one part. None: the only directory with
        checkpoints.

        Raises:
            LatestAmbiguous: several directories have checkpoints. ShardLost: there are checkpoints, but none is
                complete. StoreUnavailable: as for `exists`.
        """
        found = self.find(str(Newest(directory)))
        return None if found is None else found.checkpoint_id

    def find(self, checkpoint_id: str) -> SaveFound | None:
        """The save that a load of this id, or of "latest", would read. Raises as `exists` and `latest`."""
        with closing(self._parts.bucket) as bucket:
            world = world_of_call(self._process_group, self._no_dist)
            return look_up(self._parts.store, world, checkpoint_id, bucket.open, self.config.lineage)

    def leave_group(self) -> None:
        """Drops the reference to the process group, which may end now. This reader must not search or load afterwards."""
        self._process_group = None

    def release_files(self) -> None:
        """Releases the last load's lock on files of this node's store, whether or not the load succeeded."""
        self._attempt.release_files()

    def look_alone(self, look: Callable[[LocalStore, Bucket | None, str], T]) -> T:
        """The result of `look` for this reader's store, bucket and lineage, on this process alone."""
        with closing(self._parts.bucket) as bucket:
            return look(self._parts.store, bucket.open(), self.config.lineage)

    # What DCP calls, in order ------------------------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new load begins: the ranks meet and find the checkpoint.

        Raises:
            CheckpointNotFound, CheckpointNotCommitted, CheckpointIdMismatch, ShardLost, ConfigInvalid, StoreError: on
                every rank alike. Each of them is a CheckpointException, too. An error of this rank alone is raised
                later, in a step whose errors DCP sends to all ranks. If a rank passed no id, every error is raised
                there.
        """
        given_id = self._given_id if checkpoint_id is None else checkpoint_id
        self._given_id = given_id
        # The previous load may have failed in the middle: its lock would keep that checkpoint for ever.
        self.release_files()
        self._attempt = self._begin(given_id)
        # Outside of a DCP call no other rank takes part: `reset` by hand only sets the id.
        if find_call() is not None:
            try:
                self._meet()
            except ReplicatedCkptError as exc:
                raise as_checkpoint_exception(exc, self._world.rank) from exc.__cause__

    def _meet(self, *, in_step: bool = False) -> None:
        is_restore = find_call() is not None
        is_alone = self._no_dist if is_restore else True
        self._world = replace(world_of_call(self._process_group, is_alone), is_restore=is_restore)
        with self._under_way.reporting_failure():
            self._under_way.meet(self._world, in_step=in_step)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The checkpoint's `.metadata`, verified and read without an unpickler.

        Outside of a load it works for this process alone, whatever process group exists, and waits for no rank.

        When DCP calls it, it raises no error. DCP would conclude from an error that each rank has metadata of its own,
        and raise an AssertionError. `set_up_storage_reader`, or an earlier access to the metadata, raises it instead.

        Raises:
            ReplicatedCkptError: as above.
        """
        del args
        try:
            if "rank" not in kwargs and not self._find_own().is_met:
                # DCP calls `reset` only if it was passed a checkpoint_id.
                self._attempt = self._begin(self._given_id)
                self._meet(in_step=find_call() is not None)
            # The next load with this reader needs its own rendezvous, even if DCP calls no `reset`.
            self._under_way.is_met = False
            if find_call() is not None:
                self._world.watch_call()
                self._parts.planning.begin_pause()
            metadata = self._under_way.read_metadata()
            if find_call() is not None:
                return self._under_way.refuse_dropped(metadata)
        except Exception as exc:
            self._attempt.fail(exc)
            if find_call() is None:
                raise
            return UnreadMetadata(exc)
        # Called by hand: nothing reads shards afterwards, so the lock is released.
        self.release_files()
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Prepares the reads, from the result of `read_metadata`. Raises the error that `read_metadata` kept."""
        del is_coordinator, args, kwargs
        with self._under_way.reporting_failure():
            self._under_way.prepare(metadata)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Checks that every item this rank needs lies in a shard of the save that has a copy somewhere.

        If DCP calls it for a planner that never changes plans, it keeps the items here, and returns only their names.

        Raises:
            ShardLost: names the shards without a copy. ManifestInvalid: metadata and manifest contradict each other.
        """
        # A subclass may read the items in its own hooks: then they must be sent with the plan.
        with self._under_way.reporting_failure():
            return self._under_way.plan(plan, keeps_items=type(self) is ReplicatedReader and may_omit_items(self))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """If several ranks of a node need the same window from another node, chooses one of them to fetch it for all.

        Warns of saved entries that no rank asks for, unless `expect_partial` is set.
        """
        return self._under_way.share(plans)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads every item of the plan, verified, into the planner's tensors.

        Raises:
            ShardLost: no intact copy is left. ObjectUnsafe: an object names a class that is not allowed. Tensors that
                were not read yet keep their values. A tensor that was being read has verified bytes of the checkpoint
                up to some position, and its earlier values after it.
        """
        try:
            with self._under_way.reporting_failure():
                self._under_way.read_items(plan, planner)
        finally:
            self._parts.planning.end_pause()
            # Otherwise every thread that ever loaded would keep its attempt, and with it the metadata.
            self._attempt_by_thread.pop(threading.get_ident(), None)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @property
    def checkpoint_id(self) -> str:
        """The id of the checkpoint that was found. Before that, the id as it was passed, or the root."""
        return str(self._attempt.checkpoint_id or self._given_id or self.config.root or self.config.object_store or "")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """False, so that DCP never chooses this reader by an id alone. DCP asks only if it was passed no reader."""
        del checkpoint_id
        return False
