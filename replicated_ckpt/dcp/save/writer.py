"""The StorageWriter that users pass to `dcp.save`: drives one save through its steps, on every rank."""

import logging
import os
import time
import uuid
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from replicated_ckpt import failpoints
from replicated_ckpt.config import Ack, BestIs, CheckpointIdFrom, DirectIO, OnDegraded, Retention, WriterConfig
from replicated_ckpt.core.lineage import Version
from replicated_ckpt.core.upkeep.policy import scope_of
from replicated_ckpt.dcp.c10d.presence import announce
from replicated_ckpt.dcp.c10d.tellable import make_tellable
from replicated_ckpt.dcp.c10d.world import world_of_call
from replicated_ckpt.dcp.find.standing import check_gives_way
from replicated_ckpt.dcp.node.node import lone_post, node_post, present_again
from replicated_ckpt.dcp.node.seen_lineage import remember, seen_lineage
from replicated_ckpt.dcp.save.bucket import WAIT_TIMEOUT_S, ObjectTier
from replicated_ckpt.dcp.save.commit import commit_save
from replicated_ckpt.dcp.save.decision import Receipt, SaveDecision, SavePost, decide, name_checkpoint, weaknesses
from replicated_ckpt.dcp.save.held_save import HeldSave
from replicated_ckpt.dcp.save.nodes import Cluster, LoneNode, Opened, cluster_of
from replicated_ckpt.dcp.save.numbering import assign_sequence
from replicated_ckpt.dcp.save.receipts import check_none_aborted, collect_receipts, receipt_post
from replicated_ckpt.dcp.save.report import SaveReport, report_save
from replicated_ckpt.dcp.save.retention import Retaining
from replicated_ckpt.dcp.save.shard_writer import ShardWriter, WrittenShard
from replicated_ckpt.errors import (
    AckNotReached,
    CheckpointExists,
    ConfigInvalid,
    ReplicatedCkptWarning,
    SaveAborted,
)
from replicated_ckpt.stores.bucket.url import ObjectTarget
from replicated_ckpt.stores.local.store import LocalStore

log = logging.getLogger(__name__)

DECISION_TIMEOUT_S = 30.0


@make_tellable
class ReplicatedWriter(StorageWriter):
    """Writes each rank's shard to the node's own disk and, in the same pass, to buddy nodes.

    After `dcp.save` returns: the checkpoint is committed on every node of the process group, and any `copies - 1` of
    them can vanish with their disks without a byte being lost (with `ack="peer"`). If it raises, nothing of the save
    counts anywhere, and the previous checkpoint of that id still loads.

    Args:
        root: this node's store, a directory on its own disk. Ranks with the same store are one node.
        copies: copies of every shard, the local one counted. With fewer nodes there are as many as nodes.
        ack: what has happened when `dcp.save` returns. "local": the own shard is durable, the copies follow;
            "peer-memory": the copies are in the peers' memory; "peer": they are durable there; "object": it is
            committed in the object store, too.
        domain: failure domain of this node (rack, switch, zone); buddies are in different ones where possible.
        on_degraded: when a copy cannot be made during a save: "warn" (ReplicatedCkptWarning) and go on with fewer, or
            "raise" AckNotReached.
        overwrite: allow a save to an id that exists; the old checkpoint stays loadable until the new one is committed.
        process_group: ranks of the save; None takes the one passed to `dcp.save`.
        object_store: where every checkpoint goes besides, by the nodes' agents: "s3://bucket/prefix", or any URL that
            fsspec knows. `dcp.save` does not wait for it unless ack="object"; `wait` does.
        storage_options: how to get there, as s3fs takes it; what is not given comes from the environment or a profile.
        object_every: only every so many-th checkpoint of the run goes there.
        retention, object_retention: which checkpoints of the run the nodes, and the object store, keep: a
            Retention(keep_last=3, keep_every=10), say, alike on all ranks. None: all of them. A run's checkpoints are
            those whose ids lie in one directory.
        checkpoint_id_from: "all": the ranks must pass one id. "coordinator": rank 0's is taken, the others' are ignored.
        direct_io: how this rank's own file is written: "on", past the page cache where the file system takes it; "off",
            through it; "auto", on for file systems on a block device. None: REPLICATED_CKPT_DIRECT_IO, else "auto".

    One writer serves many saves, one at a time; it may be used from the thread of `dcp.async_save`.

    Raises:
        ConfigInvalid: an argument cannot work.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        copies: int = 2,
        ack: Ack = "peer",
        domain: str | None = None,
        on_degraded: OnDegraded = "warn",
        overwrite: bool = False,
        process_group: "dist.ProcessGroup | None" = None,
        object_store: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        object_every: int = 1,
        retention: Retention | None = None,
        object_retention: Retention | None = None,
        checkpoint_id_from: CheckpointIdFrom = "all",
        direct_io: DirectIO | None = None,
    ) -> None:
        super().__init__()
        self.config = WriterConfig.checked(
            root,
            copies=copies,
            ack=ack,
            domain=domain,
            on_degraded=on_degraded,
            overwrite=overwrite,
            object_store=object_store,
            object_every=object_every,
            retention=retention,
            object_retention=object_retention,
            checkpoint_id_from=checkpoint_id_from,
            direct_io=direct_io,
        )
        self._target = None if object_store is None else ObjectTarget.checked(object_store, storage_options)
        self.last_save: SaveReport | None = None
        self._process_group = process_group
        self._storage_options = storage_options
        self._store = LocalStore(self.config.root)
        self._shards = ShardWriter(self._store, self.config.direct_io)
        self._object_tier = ObjectTier(self._store, self._target, object_every)
        self._retaining = Retaining(self._store, self.config, self._target)
        self._next_id: str | os.PathLike[str] | None = None
        self._given_id: str | os.PathLike[str] | None = None
        self._next_notes: Mapping[str, Any] = {}
        self._held = HeldSave()
        announce()

    def __getstate__(self) -> dict[str, Any]:
        """Its arguments, all that goes into another process (`dcp.async_save` does it); the group is the world there."""
        return {**vars(self.config), "storage_options": self._storage_options}

    def __setstate__(self, arguments: dict[str, Any]) -> None:
        ReplicatedWriter.__init__(self, **arguments)

    def note(self, notes: Mapping[str, Any]) -> None:
        """Keeps notes (core.notes) with the next save. The coordinator's count."""
        self._next_notes = notes

    def keep_best(self, metric: str, best_is: BestIs) -> None:
        """From the next save on, what retention keeps includes the best checkpoint by this metric."""
        tiers = {name: getattr(self.config, name) for name in ("retention", "object_retention")}
        kept = {
            name: replace(each, keep_best=metric, best_is=best_is) for name, each in tiers.items() if each is not None
        }
        self.config = replace(self.config, **kept)
        self._retaining = Retaining(self._store, self.config, self._target)

    # What DCP calls, in order ------------------------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Names the next save. Never raises: what is wrong with the id is said where DCP tells all ranks.

        DCP calls this only where `dcp.save` was passed a checkpoint_id.
        """
        self._next_id = checkpoint_id

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Finds out which ranks take part.

        Raises:
            ConfigInvalid: `use_collectives=False`, which leaves nobody to decide and commit.
        """
        del args
        self._started_at = time.monotonic()
        self._given_id, self._next_id = self._next_id, None
        self._notes, self._next_notes = self._next_notes, {}
        self._held.close()
        if not kwargs.get("use_collectives", True):
            raise ConfigInvalid("use_collectives=False is not supported: a commit needs a coordinator.")
        self._world = world_of_call(self._process_group, None)
        if is_coordinator != self._world.is_coordinator:
            raise ConfigInvalid(
                f"DCP coordinates from another rank than rank 0 of the group of {self._world.size} ranks.",
                "Pass ReplicatedWriter(process_group=...) the group that is passed to dcp.save, and leave the "
                "coordinator_rank of the deprecated save_state_dict at 0.",
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Presents this rank to the coordinator. The plan is not changed."""
        root, id_from, is_coordinator = self.config.root, self.config.checkpoint_id_from, self._world.is_coordinator
        checkpoint_id = name_checkpoint(root, self._given_id, id_from, is_coordinator=is_coordinator)
        present = lone_post if self._world.blackboard is None else node_post
        self._post = SavePost(checkpoint_id, present(self._store, self.config.domain))
        if self._world.blackboard is not None:
            self._nonce = self._world.blackboard.post("save", self._post.to_json())
        self._degraded(filter(None, [self._post.node.silence]))
        self._degraded(self._object_tier.hand_over(self._world.size))
        failpoints.reach("rank.presented")
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Coordinator: checks that the ids agree, chooses the buddies, opens the save on every node.

        Raises:
            CheckpointIdMismatch, CheckpointExists, ConfigInvalid, StoreError: nothing is open afterwards.
        """
        board = self._world.blackboard
        if board is None:
            posts, raw_posts = [self._post], []
        else:
            raw_posts = board.posts("save", DECISION_TIMEOUT_S)
            posts = [SavePost.from_json(post) for post in raw_posts]
        decision = decide(posts, self.config.copies, uuid.uuid4().hex, plans)
        self._cluster: Cluster = LoneNode(self._store) if board is None else cluster_of(decision, self._world.rank)
        decision = replace(decision, session=self._world.session, overwrite=self.config.overwrite)
        failpoints.reach("coordinator.drawn")
        try:
            opened = self._open(decision)
        except CheckpointExists:
            if decision.overwrite:
                raise
            decision = self._take_name(decision)
            opened = self._open(decision)
        failpoints.reach("coordinator.opened")
        seen = seen_lineage(self._store, scope_of(decision.checkpoint_id))
        asked = replace(decision, overwrite=self.config.overwrite)  # of the bucket: what nodes have lost may lie there
        placed, problems = assign_sequence(asked, opened, self._object_tier, seen, self._cluster)
        self._decision = replace(placed, overwrite=decision.overwrite)
        self._degraded(problems)
        if board is not None:
            board.decide("save", raw_posts, self._decision.to_json())
        failpoints.reach("coordinator.placed")
        self._degraded(weaknesses(self._decision, self.config.copies, posts))
        return plans

    def _open(self, decision: SaveDecision) -> Opened:
        try:
            return self._cluster.begin(decision.intent, partial(self._hold_as_coordinator, decision.save_id))
        except BaseException as exc:
            self._cluster.abort(decision.save_id, f"it could not be opened: {exc}")
            raise

    def _take_name(self, decision: SaveDecision) -> SaveDecision:
        """The save once more, over a checkpoint of which parts are lost for good: that does not block its name."""
        own_node = decision.node_of(self._world.rank).node_id
        addresses = [] if self._world.blackboard is None else [node.address for node in decision.nodes]
        check_gives_way(self._store, own_node, addresses, decision.checkpoint_id)
        log.warning("%s exists, and parts of it are lost: it is saved anew", decision.checkpoint_id)
        return replace(decision, save_id=uuid.uuid4().hex, overwrite=True)

    def _hold_as_coordinator(self, save_id: str) -> None:
        """However slow other nodes, or the planning, are: nobody takes this save for an abandoned one."""
        if self._world.blackboard is not None:
            self._held.hold(self._store, save_id)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's shard here and at its buddies.

        Afterwards it holds at the level of `ack`. On failure the save is given up on every node before this raises.
        """
        board = self._world.blackboard
        if board is not None and not self._world.is_coordinator:
            self._decision = SaveDecision.from_json(board.decision("save", self._nonce, DECISION_TIMEOUT_S))
            self._cluster = cluster_of(self._decision, self._world.rank)
        try:
            results, receipt = self._written(plan, planner)
        except SaveAborted as exc:
            # Somebody else failed and will be named by DCP; if nobody is, `finish` refuses this receipt.
            log.warning("rank %d stops writing: %s", self._world.rank, exc)
            results, receipt = [], Receipt(aborted=str(exc))
        except BaseException as exc:
            self._cluster.abort(self._decision.save_id, f"rank {self._world.rank} failed: {type(exc).__name__}: {exc}")
            raise
        self._receipt = receipt
        failpoints.reach("rank.written")
        if board is not None:
            now = present_again(self._store, self._post.node)
            board.post("receipt", receipt_post(receipt, self._decision.save_id, now))
        failpoints.reach("rank.receipted")
        if self._decision.upload is not None:
            self._object_tier.expect(self._decision.save_id, self._decision.checkpoint_id)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Coordinator: accounts for every shard, makes the decision durable, and has every node publish the save.

        Raises:
            SaveAborted, AckNotReached, StoreError: at the coordinator; DCP tells all ranks.
        """
        board, receipts = self._world.blackboard, [self._receipt]
        if board is not None:
            own_node = self._decision.node_of(self._world.rank).node_id
            receipts, self._cluster = collect_receipts(
                board.posts("receipt", DECISION_TIMEOUT_S), self._decision, own_node
            )
        try:
            check_none_aborted(receipts, self._decision)
            problems = commit_save(
                self._store, self._cluster, self._decision, self.config, receipts, metadata, results, self._notes
            )
        finally:
            self._held.close()
        made = Version(self._decision.lineage, self._decision.sequence, 0.0, self._decision.save_id)
        remember(self._store, self._decision.checkpoint_id, made)
        self._degraded(problems)
        self._retaining.committed(self._decision, has_agents=board is not None)
        if self._decision.upload is not None:
            self._object_tier.committed()
            if self.config.ack == "object":
                self.wait()

    def wait(self, timeout_s: float = WAIT_TIMEOUT_S) -> tuple[str, ...]:
        """Waits until this writer's saves are committed in the object store; returns their ids. Any rank may call it alone.

        Raises:
            UploadFailed: one is not, and trying longer does not help, or the time is over. Its copies on the nodes stand.
        """
        return self._object_tier.wait(timeout_s)

    # Steps -------------------------------------------------------------------------------------------------------

    def _written(self, plan: SavePlan, planner: SavePlanner) -> tuple[list[WriteResult], Receipt]:
        decision, rank = self._decision, self._world.rank
        if decision.node_of(rank).node_id in decision.unreached:
            self._store.begin(decision.intent)
        self._held.hold(self._store, decision.save_id)
        if rank == decision.ranks_of(decision.node_of(rank).node_id)[0]:
            self._store.places.note(decision.save_id, decision.lineage, decision.sequence)
        self._degraded(self._retaining.hand_over(decision, rank))
        shard: WrittenShard | None = None
        if plan.items:
            how = {"stream_to_peers": self.config.ack != "local", "durable": self.config.ack != "peer-memory"}
            shard = self._shards.write(plan, planner, decision, rank, **how)
        seconds = time.monotonic() - self._started_at
        self.last_save = report_save(decision, shard.receipt if shard else None, self.config.copies, seconds)
        if shard is None:
            return [], Receipt()
        if shard.missed and self.config.on_degraded == "raise":
            have = {shard.receipt.name: len(shard.receipt.holders)}
            raise AckNotReached(decision.placement.copies, have, "; ".join(shard.missed))
        self._degraded(shard.missed)
        return shard.results, Receipt((shard.receipt,))

    def _degraded(self, problems: Iterable[str]) -> None:
        for problem in problems:
            warnings.warn(f"{self.checkpoint_id}: {problem}.", ReplicatedCkptWarning, stacklevel=2)

    @property
    def checkpoint_id(self) -> str:
        """The id of the next save or the one under way, as it was given; the root before any."""
        return str(self._next_id or self._given_id or self.config.root)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """False: a writer cannot be guessed from an id alone; DCP asks this only when no writer was passed."""
        del checkpoint_id
        return False
