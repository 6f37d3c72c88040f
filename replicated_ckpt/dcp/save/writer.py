"""The StorageWriter that users pass to `dcp.save`: passes each of DCP's calls to the save under way."""

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from replicated_ckpt.config import (
    COMPARED_WITHIN,
    MAY_DIFFER,
    Ack,
    BestIs,
    CheckpointIdFrom,
    DirectIO,
    OnDegraded,
    OnDivergence,
    Retention,
    WriterConfig,
    check_callable,
    check_direct_io,
    check_root,
)
from replicated_ckpt.core.lineage import Version
from replicated_ckpt.dcp.c10d.picklable_error import make_picklable
from replicated_ckpt.dcp.c10d.waiting import announce
from replicated_ckpt.dcp.c10d.world import posting_if_left, watch_first_step, world_of_call
from replicated_ckpt.dcp.memory.root import MemoryLimit
from replicated_ckpt.dcp.objects.weights_only import refuse_unloadable_paths
from replicated_ckpt.dcp.planning.cached_layouts import CachedLayouts
from replicated_ckpt.dcp.planning.cached_plan import CachedSavePlanner
from replicated_ckpt.dcp.runtime.user_code import find_line
from replicated_ckpt.dcp.save.agent_tasks import WAIT_TIMEOUT_S, ObjectTier, RetentionPolicies, check_timeout
from replicated_ckpt.dcp.save.replicas import ReplicaCheck
from replicated_ckpt.dcp.save.save_attempt import SaveAttempt, WriterParts
from replicated_ckpt.dcp.save.save_report import SaveReport
from replicated_ckpt.dcp.save.shard_files import PartOf, Parts
from replicated_ckpt.dcp.save.shard_writer import ShardWriter
from replicated_ckpt.dcp.staging.stager import Stager, await_turn
from replicated_ckpt.environment import DOMAIN_ENV
from replicated_ckpt.errors import ConfigInvalid, StoreUnavailable
from replicated_ckpt.stores.bucket_client.url import ObjectTarget
from replicated_ckpt.stores.local.store import LocalStore

_GOES_ON = "The upload continues: wait again, or longer."


@make_picklable
class ReplicatedWriter(StorageWriter, AsyncStager):
    """Writes each rank's shard to the node's own disk and, in the same pass, to buddy nodes.

    After `dcp.save` returns, the checkpoint is committed. A warning names nodes that do not have it yet. With `ack="peer"`
    and without a warning, any `copies - 1` nodes can be lost with their disks, and no byte is lost. If `dcp.save` raises,
    the previous checkpoint of that id still loads. After UploadFailed or AckNotReached, the new one may still be committed.

    Args:
        root: this node's store, a directory on its own disk. Ranks with the same store are one node.
        copies: copies of every shard, the local one included. With fewer nodes there are as many copies as nodes.
        ack: what holds when `dcp.save` returns, or the future of `dcp.async_save` is done. "local": the shard is
            durable on this node, and the copies follow. "peer-memory": the copies are in the peers' memory. "peer":
            they are durable on the peers. "object": the checkpoint is committed in the object store, too.
        domain: failure domain of this node (rack, switch, zone). Copies go to other domains where possible. None:
            REPLICATED_CKPT_DOMAIN, else its host.
        on_degraded: if a copy cannot be made during a save: "warn" (ReplicatedCkptWarning) and continue with fewer, or
            "raise" AckNotReached.
        overwrite: a save to an existing id replaces that checkpoint, which stays loadable until the new one is
            committed. A process warns once (ReplicatedCkptWarning) if it replaces a checkpoint of a run that it neither
            loaded nor saved. False: such a save raises CheckpointExists, unless parts of the old checkpoint are lost
            for good.
        process_group: ranks of the save. None: the group that was passed to `dcp.save`.
        object_store: a bucket to which the nodes' agents upload every checkpoint: "s3://bucket/prefix", or any URL that
            fsspec supports. `dcp.save` waits for the upload only with ack="object"; `wait()` does.
        storage_options: credentials and endpoint of the bucket, as s3fs takes them. Missing options come from the
            environment or a profile.
        object_every: upload only every n-th checkpoint of the run.
        retention, object_retention: which checkpoints of the run the nodes, and the object store, keep, such as
            Retention(keep_last=3, keep_every=10); the same on all ranks. None: all of them. The checkpoints of a run
            are those whose ids lie in one directory.
        checkpoint_id_from: "all": the ranks must pass the same id. "coordinator": all ranks use rank 0's id.
        direct_io: how this rank writes its own file. "on": past the page cache where the file system allows it. "off":
            through the page cache. "auto": "on" for file systems on a block device. None: REPLICATED_CKPT_DIRECT_IO,
            else "auto".
        on_save: called on every rank with its SaveReport once the save is committed, in the thread that saves. Its
            exceptions are logged. If other code than DCP calls the hooks, only the coordinator calls it.
        overlap: `dcp.async_save` returns while GPUs still copy the state. Before the state changes, as in the
            optimizer's step, call `hold_until_copied`.
        compare_replicas: compare the values that several ranks have under one name. The first save of a process
            compares all of them. Each later save compares a part; this number of saves together compares all. "all": all
            in each save. None: never. A value that differs is reported once by a warning on rank 0, and in its
            SaveReport and the manifest.
        on_divergence: "raise": a save whose tensors differ fails with ReplicasDiverged before it is committed.
        may_differ: patterns (fnmatch) of names of entries that may differ, and are not reported.
        part_of: returns "weights", "optimizer" or "rest" for an entry's FQN, the same on all ranks. A rank writes a
            file for each part, so that old checkpoints can keep the weights alone. None: by usual names, such as
            `model` and `optim`.
        link_unchanged: put large tensors whose bytes stay the same from save to save into a file of their own. If
            128-bit hashes show the same bytes, a save links that file on each node instead of writing and sending it.
            Each checkpoint is still complete by itself, and any may be removed. False: each save writes everything.

    One writer serves many saves, one at a time. It is also the stager of `dcp.async_save`: it copies the state once,
    into memory that the next save uses again. A second save waits for the first before it copies. `close` frees that
    memory.

    Raises:
        ConfigInvalid: an argument is invalid.
    """

    _next_id: str | os.PathLike[str] | None = None
    _given_id: str | os.PathLike[str] | None = None

    def __init__(  # noqa: PLR0913 - each by its name
        self,
        root: str | os.PathLike[str],
        *,
        copies: int = 2,
        ack: Ack = "peer",
        domain: str | None = None,
        on_degraded: OnDegraded = "warn",
        overwrite: bool = True,
        process_group: "dist.ProcessGroup | None" = None,
        object_store: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        object_every: int = 1,
        retention: Retention | None = None,
        object_retention: Retention | None = None,
        checkpoint_id_from: CheckpointIdFrom = "all",
        direct_io: DirectIO | None = None,
        on_save: Callable[[SaveReport], object] | None = None,
        overlap: bool = False,
        compare_replicas: int | Literal["all"] | None = COMPARED_WITHIN,
        on_divergence: OnDivergence = "warn",
        may_differ: Sequence[str] = MAY_DIFFER,
        part_of: PartOf | None = None,
        link_unchanged: bool = True,
    ) -> None:
        super().__init__()
        check_callable("on_save", on_save)
        check_callable("part_of", part_of)
        self.config = WriterConfig(
            check_root(root),
            copies=copies,
            ack=ack,
            domain=os.environ.get(DOMAIN_ENV) or None if domain is None else domain,
            on_degraded=on_degraded,
            overwrite=overwrite,
            object_store=object_store,
            object_every=object_every,
            retention=retention,
            object_retention=object_retention,
            checkpoint_id_from=checkpoint_id_from,
            direct_io=check_direct_io(direct_io),
            overlap=overlap,
            compare_replicas=compare_replicas,
            on_divergence=on_divergence,
            may_differ=may_differ,
            link_unchanged=link_unchanged,
        )
        self._target = ObjectTarget.check_given(object_store, storage_options)
        self.last_save: SaveReport | None = None
        self._process_group = process_group
        self._storage_options = storage_options
        self._on_save, self._part_of = on_save, part_of
        self._parts = self._make_parts()
        self._attempt: SaveAttempt | None = None
        self._next_notes: Mapping[str, Any] = {}
        self._stager = Stager(overlaps=overlap)
        announce()

    def _make_parts(self) -> WriterParts:
        store = LocalStore(self.config.root)
        return WriterParts(
            self.config,
            store,
            ShardWriter(store, self.config.direct_io, self.config.ack, links=self.config.link_unchanged),
            CachedLayouts(),
            ObjectTier(store, self._target, self.config.object_every),
            RetentionPolicies(store, self.config, self._target),
            find_line(),
            self._on_save,
            ReplicaCheck(self.config.parts_compared),
            Parts(self._part_of, self.config.may_differ),
        )

    def __repr__(self) -> str:
        used = self.config
        bucket = "" if used.object_store is None else f", object_store={used.object_store!r}"
        return f"<ReplicatedWriter({used.root!r}, copies={used.copies}, ack={used.ack!r}{bucket})>"

    def __getstate__(self) -> dict[str, Any]:
        """The constructor's arguments, which `dcp.async_save` sends to another process. The writer there uses the default
        process group.
        """
        kept = {"storage_options": self._storage_options, "on_save": self._on_save, "part_of": self._part_of}
        return {**vars(self.config), **kept}

    def __setstate__(self, arguments: dict[str, Any]) -> None:
        ReplicatedWriter.__init__(self, **arguments)

    @property
    def store(self) -> LocalStore:
        """This node's store."""
        return self._parts.store

    def note(self, notes: Mapping[str, Any]) -> None:
        """Stores the notes in the manifest of the next save. Only those of the coordinator are used."""
        self._next_notes = notes

    def keep_best(self, metric: str, best_is: BestIs) -> None:
        """From the next save on, retention also keeps the best checkpoint by this metric."""
        tiers = {name: getattr(self.config, name) for name in ("retention", "object_retention")}
        kept = {
            name: replace(each, keep_best=metric, best_is=best_is) for name, each in tiers.items() if each is not None
        }
        self.config = replace(self.config, **kept)
        retaining = RetentionPolicies(self._parts.store, self.config, self._target)
        self._parts = replace(self._parts, config=self.config, retaining=retaining)

    def limit_memory(self, generations: int) -> None:
        """For a store in memory: a save raises MemoryTierShort if the memory has no room for this number of
        checkpoints.
        """
        self._parts = replace(self._parts, memory=MemoryLimit(self._parts.store, generations))

    def use_stager(self, stager: Stager) -> None:
        """From now on this writer uses the stager of another writer."""
        self._stager = stager

    @property
    def last_version(self) -> Version | None:
        """The lineage and sequence of the last save that this rank wrote for. None before the first, or if the last was
        refused.
        """
        return None if self._attempt is None else self._attempt.version

    # What `dcp.async_save` calls, before it saves in the background ------------------------------------------------

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copies the state into this process's memory, each byte once. If this writer still saves, waits for that save
        first.

        A state that does not fit into memory is not copied. That is logged, and `synchronize_staging` waits for the
        write.
        """
        with posting_if_left(self._process_group):
            return self._stager.stage(state_dict)

    def synchronize_staging(self) -> None:
        """When this returns, the staged tensors may change. It waits only for a state that was not copied."""
        self._stager.synchronize()

    def hold_until_copied(self) -> None:
        """With `overlap`: work that is queued after this call on the GPUs' current streams may change the state. Does
        not wait.
        """
        self._stager.hold_until_copied()

    def close(self) -> None:
        """Waits for this writer's save, and frees the memory of copied states in this process.

        A later `async_save` allocates new memory. Called from `on_save`, it does not wait for a save.
        """
        self._stager.close()

    # What DCP calls, in order ------------------------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Names the next save. Never raises: a bad id is reported in a step whose errors DCP sends to all ranks.

        DCP calls this only where `dcp.save` was passed a checkpoint_id. Waits for an asynchronous save of this writer.
        """
        self._stager.begin_save()
        self._parts.planning.begin_pause()
        self._next_id = checkpoint_id

    def storage_meta(self) -> StorageMeta:
        """DCP calls this before the planner gets the state. When it returns, the state is copied."""
        self._stager.await_copy()
        # Here, because the planner may raise before our next hook: other ranks would not notice the end of this one.
        watch_first_step(self._process_group)
        return StorageMeta(checkpoint_id=self.checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Finds out which ranks take part.

        Raises:
            ConfigInvalid: `use_collectives=False`, which leaves no rank to decide and commit; or the process groups of an
                asynchronous save were destroyed.
        """
        del args
        # Again: DCP calls `reset` only if it was passed a checkpoint_id.
        self._stager.begin_save()
        self._stager.free_flattened()
        self._parts.planning.begin_pause()
        # Taken once: the next save without an id must not get this one's name or notes.
        self._given_id, self._next_id = self._next_id, None
        notes, self._next_notes = self._next_notes, {}
        # A save that failed before its last step is still locked by this rank, and agents would wait for it.
        if self._attempt is not None:
            self._attempt.close()
        if not kwargs.get("use_collectives", True):
            raise ConfigInvalid(
                "use_collectives=False is not supported: a commit needs a coordinator.",
                "Leave use_collectives at True.",
            )
        world = world_of_call(self._process_group, None)
        # Two saves in one group at once would mix their collectives.
        await_turn(world.group_name)
        # Otherwise each rank would save its part as the whole state.
        if self._stager.is_of_group() and world.blackboard is None:
            raise ConfigInvalid(
                f"The asynchronous save of {self.checkpoint_id!r} is lost: its process groups were destroyed before it "
                "had begun.",
                "Wait for its future on every rank before destroy_process_group.",
            )
        # DCP's deprecated calls may name another coordinator: the ranks would wait for rank 0's decision in vain.
        if is_coordinator != world.is_coordinator:
            raise ConfigInvalid(
                f"DCP coordinates from a rank that is not rank 0 of the group of {world.size} ranks.",
                "Pass ReplicatedWriter(process_group=...) the same group as dcp.save, and leave coordinator_rank of the "
                "deprecated save_state_dict at 0.",
            )
        self._attempt = SaveAttempt(self._parts, world, self._given_id, notes, self._keep_report)
        world.watch_call(self._attempt.break_off)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Registers this rank with the coordinator, and returns the plan unchanged. Raises ConfigInvalid: no load could
        read the saved plan.
        """
        # Before anything is open: a checkpoint with such a path could be saved, and never loaded.
        refuse_unloadable_paths(plan)
        self._under_way.register(plan, is_staged=self._stager.memory() is not None)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Coordinator: opens the save on every node, as SaveAttempt.decide. It does not change what each rank writes."""
        return self._under_way.decide(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's shard here and at its buddies.

        Afterwards the shard is safe at the level of `ack`. On failure, the save is aborted on every node before this
        raises.
        """
        future: Future[list[WriteResult]] = Future()
        try:
            future.set_result(self._under_way.write_shard(plan, planner, self._stager.memory()))
        finally:
            if isinstance(planner, CachedSavePlanner):
                # The cached planner keeps its plan, but must not keep the state in memory until the next save.
                planner.forget_state()
            self._stager.note_written()
            self._parts.planning.end_pause()
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Coordinator: commits the save on every node; with `ack="object"` waits for the bucket. As SaveAttempt.commit."""
        goes_to_bucket = self._under_way.commit(metadata, results)
        if goes_to_bucket and self.config.ack == "object":
            # Before `end`: with ack="object" the report and DCP's return mean that the bucket has it.
            self.wait(ack="object")
        self._under_way.end()

    def wait(self, timeout_s: float = WAIT_TIMEOUT_S, *, ack: Ack | None = None) -> tuple[str, ...]:
        """Waits until this writer's saves and their uploads have ended. Returns the ids in the object store. Works on any
        rank.

        With `ack`, it waits until the last save has reached that level. The levels "local", "peer-memory" and "peer",
        up to the writer's own, are reached at the commit. With "object" the ids are returned; with any other level
        none. A call from `on_save` does not wait for the save that it reports, which is committed by then.

        Raises:
            UploadFailed: a checkpoint is not in the object store, and waiting longer does not help, or the time is
                over. With "object" also if the last save was aborted, replaced or removed first; otherwise that is only
                logged. The copies on nodes are safe.
            StoreUnavailable: the time is over, and the save continues. ConfigInvalid: no save of this writer reaches
                that level, or `timeout_s` (which may be infinite) is not a number. CheckpointException,
                ReplicatedCkptError: the last save failed.
        """
        deadline = time.monotonic() + (timeout_s := check_timeout(timeout_s))
        if ack is not None:
            self.config.check_awaitable(ack)
        try:
            self._stager.wait_for_staging(timeout_s)
        except TimeoutError as exc:
            why = f"the save is not finished after {timeout_s:g} s"
            raise StoreUnavailable(f"store {self.config.root}", "wait", self.checkpoint_id, why, _GOES_ON) from exc
        if ack not in (None, "object"):
            return ()
        return self._parts.object_tier.wait_for_upload(
            max(0.0, deadline - time.monotonic()), is_last_wanted=ack == "object"
        )

    def _keep_report(self, report: SaveReport) -> None:
        self.last_save = report

    @property
    def _under_way(self) -> SaveAttempt:
        """This thread's save. Raises ConfigInvalid: another thread has begun one with this writer."""
        attempt = self._attempt
        assert attempt is not None, "DCP calls set_up_storage_writer first"
        # Attempt and staging belong to one save: two threads would mix their shards.
        if attempt.thread != threading.get_ident():
            raise ConfigInvalid(f"Two threads save with {self!r} at once.", "Give each thread its own writer.")
        return attempt

    @property
    def checkpoint_id(self) -> str:
        """The id of the save under way, or of the next one, as it was passed. Before the first: the root."""
        return str(self._next_id or self._given_id or self.config.root)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Always False. DCP calls this only without a writer, to choose one, and an id alone does not determine ours."""
        del checkpoint_id
        return False
