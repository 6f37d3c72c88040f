"""One save on one rank: its steps, in the order in which DCP calls them."""

import contextlib
import logging
import os
import secrets
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from replicated_ckpt import failpoints
from replicated_ckpt.config import WriterConfig
from replicated_ckpt.core.divergence import Divergence, describe_divergences, without_allowed
from replicated_ckpt.core.lineage import Version
from replicated_ckpt.core.parts import Part
from replicated_ckpt.core.rank_report import Span
from replicated_ckpt.core.upkeep.policy import scope_of
from replicated_ckpt.dcp.agreement.decision import (
    STAYS,
    Receipt,
    SaveDecision,
    SavePost,
    ShardReceipt,
    decide,
    list_weaknesses,
    name_checkpoint,
)
from replicated_ckpt.dcp.agreement.node_post import (
    NodePost,
    find_seen_lineage,
    register_again,
    register_alone,
    register_for_save,
    remember,
)
from replicated_ckpt.dcp.agreement.nodes import AgentCluster, LoneNode, Opened, cluster_of
from replicated_ckpt.dcp.c10d.group_pool import describe_wanted
from replicated_ckpt.dcp.c10d.world import World
from replicated_ckpt.dcp.find.overwrite_check import check_overwritable
from replicated_ckpt.dcp.memory.root import MemoryLimit
from replicated_ckpt.dcp.metadata.saved_metadata import SavedMetadata, broadcast_outcome
from replicated_ckpt.dcp.planning.cached_layouts import CachedLayouts
from replicated_ckpt.dcp.planning.cached_plan import find_whole
from replicated_ckpt.dcp.runtime.agent_report import report_ended, report_failed
from replicated_ckpt.dcp.runtime.gc_pause import Pause
from replicated_ckpt.dcp.runtime.torch_private import Collectives, follow_step
from replicated_ckpt.dcp.runtime.user_code import Line, call_back, warn
from replicated_ckpt.dcp.save.agent_tasks import ObjectTier, RetentionPolicies
from replicated_ckpt.dcp.save.commit import commit_save
from replicated_ckpt.dcp.save.numbering import assign_sequence, choose_file_number, open_unreached
from replicated_ckpt.dcp.save.replicas import (
    HelpPlans,
    ReplicaCheck,
    count_copies,
    find_helped,
    find_owners,
    name_divergences,
)
from replicated_ckpt.dcp.save.save_report import SaveReport, add_phases, report_ranks, report_save, report_to_agent
from replicated_ckpt.dcp.save.shard_files import Parts
from replicated_ckpt.dcp.save.shard_writer import ShardUnderWay, ShardWriter, WrittenShard
from replicated_ckpt.dcp.save.submission import Follower
from replicated_ckpt.errors import AckNotReached, CheckpointExists, ReplicasDiverged, SaveAborted
from replicated_ckpt.node.saves.shard_copies import WrittenCopies
from replicated_ckpt.stores.files.durable import translate_errors
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.peer.client import AgentAddress

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WriterParts:
    """The writer's settings, and the objects that work for each of its saves. `memory`: the limit of a store in memory.

    `planning`: pauses garbage collection while DCP plans a save. `name`: identifies this writer among all writers.
    """

    config: WriterConfig
    store: LocalStore
    shards: ShardWriter
    layouts: CachedLayouts
    object_tier: ObjectTier
    retaining: RetentionPolicies
    made_at: Line | None
    on_save: Callable[[SaveReport], object] | None
    replicas: ReplicaCheck
    parts: Parts = field(default_factory=Parts)
    help_plans: HelpPlans = field(default_factory=HelpPlans)
    memory: MemoryLimit | None = None
    planning: Pause = field(default_factory=Pause)
    name: str = field(default_factory=lambda: uuid.uuid4().hex)

    def register(
        self, checkpoint_id: str | None, items: Sequence[WriteItem], *, is_alone: bool, is_staged: bool
    ) -> SavePost:
        """Registers this rank's node, and returns the rank's post before a save. The node's agent runs then.

        `is_staged`: the save writes from a copy of the state, so that training does not wait for it.
        """
        node = (register_alone if is_alone else register_for_save)(self.store, self.config.domain)
        memory_bytes = None if self.memory is None else self.memory.measure(checkpoint_id)
        config, wants = self.config, describe_wanted(self.config)
        # With ack="local", training must not wait for copies. With on_degraded="raise", a differing copy would fail it.
        takes_help = config.copies > 1 and config.on_degraded == "warn" and (config.ack != "local" or is_staged)
        digest = self.help_plans.digest_of(items) if takes_help and not is_alone else ""
        # A helper has no list of this rank's entries that lie in a file of their own.
        takes_copies = self.shards.unchanged is None or not self.shards.unchanged.chosen
        given = memory_bytes, wants, len(items), digest, self.help_plans.token, takes_copies
        return SavePost(checkpoint_id, node, *given)


_OWN_OBJECTS_HINT = (
    "For each entry, the checkpoint has only the object of the first rank that is named, and every rank will load that "
    "one. Save what belongs to one rank in a RankState. Name other entries that may differ in may_differ=[...]. A "
    "process warns once of each entry."
)
_RESULTS_WITHIN_S = 1.0


class LockedSave:
    """A writer's lock on its save, held until `close`, or until the writer no longer exists."""

    def __init__(self) -> None:
        self._open = contextlib.ExitStack()
        self._followers: list[Follower] = []
        # A writer that is garbage-collected without `close` must release its lock: agents would wait for it forever.
        weakref.finalize(self, self._open.close)

    def lock(self, store: LocalStore, save_id: str) -> None:
        """Locks the save. This object may have locked it before.

        Raises:
            SaveAborted: the save is not open. StoreError
        """
        with translate_errors(str(store.root), "hold", save_id):
            self._open.callback(store.lock_save(save_id).release)

    def follow(self, follower: Follower | None) -> None:
        """Follows a shard that this node's agent has accepted. None: this rank has written the shard."""
        if follower is not None:
            self._followers.append(follower)
            self._open.callback(follower.leave)

    def follow_copy(self, follower: Follower | None) -> None:
        """Follows another rank's shard that this node's agent has accepted."""
        if follower is not None:
            self._open.callback(follower.leave)

    def find_written(self) -> Sequence[WrittenCopies]:
        """The agent's results for the shards that it accepted. Waits up to _RESULTS_WITHIN_S for them: the coordinator may
        have got them earlier than this rank.
        """
        ends = [follower.end for follower in self._followers]
        done = wait(ends, _RESULTS_WITHIN_S).done
        # The save is committed: a late or lost result must not fail it.
        return [end.result() for end in ends if end in done and end.exception() is None]

    def close(self) -> None:
        self._open.close()


def make_receipt_post(receipt: Receipt, save_id: str, node: NodePost) -> dict[str, Any]:
    """The fields that a rank posts once it has written, with the present state of its `node`."""
    where = {"address": node.address.to_json(), "silence": node.silence, "invitation": node.invitation}
    return {**receipt.to_json(), "save_id": save_id, **where}


def collect_receipts(
    posts: Sequence[Mapping[str, Any]], decision: SaveDecision, own_node: str
) -> tuple[list[Receipt], AgentCluster]:
    """The receipts of all ranks, and the nodes with the present addresses of their agents, which may have been started
    again.

    Raises:
        SaveAborted: a rank has not written for this save.
    """
    # A rank that was slow may still have its post of the save before.
    stale = [rank for rank, post in enumerate(posts) if post["save_id"] != decision.save_id]
    if stale:
        raise SaveAborted(f"Ranks {stale} have not reported their shards for save {decision.save_id}.")
    addresses = [AgentAddress.from_json(post["address"]) for post in posts]
    silence = {address.node_id: post["silence"] for address, post in zip(addresses, posts, strict=True)}
    silence = {node: why for node, why in silence.items() if why}
    invitations = [str(post["invitation"]) for post in posts]
    openers = [replace(at, token=given or at.token) for at, given in zip(addresses, invitations, strict=True)]
    cluster = AgentCluster(addresses, own_node, openers, silence, decision.unreached, decision.ticket)
    return [Receipt.from_json(post) for post in posts], cluster


def check_none_aborted(receipts: Sequence[Receipt], decision: SaveDecision) -> None:
    """Raises SaveAborted: a rank stopped writing because the save was aborted."""
    aborted = [f"rank {rank}: {receipt.aborted}" for rank, receipt in enumerate(receipts) if receipt.aborted]
    if aborted:
        raise SaveAborted(f"Save {decision.save_id} was aborted: {'; '.join(aborted)}")


DECISION_TIMEOUT_S = 30.0


class SaveAttempt:
    """One save: every rank calls `register` and `write_shard`. The coordinator also calls `decide` between them, then
    `commit`.

    If a step after the opening raises, KeyboardInterrupt included, the save is first aborted on every node that
    answers, and nothing remains of it. A save that may be decided is not aborted: agents publish or abort it. This rank
    locks the save until it has the outcome, or until `close`, so that agents leave the save alone. One thread at a time.
    """

    def __init__(
        self,
        parts: WriterParts,
        world: World,
        given_id: str | os.PathLike[str] | None,
        notes: Mapping[str, Any],
        keep_report: Callable[[SaveReport], None],
    ) -> None:
        """`notes` are stored in the manifest; only the coordinator's are used.

        `keep_report` is called with this rank's report once it has written, and again when the save is committed.
        """
        self._parts, self._config, self._store = parts, parts.config, parts.store
        self._world, self._given_id, self._notes = world, given_id, notes
        self._started_at, self.thread = time.monotonic(), threading.get_ident()
        self._held, self._keep_report = LockedSave(), keep_report
        self._receipts: Sequence[Receipt] = []
        self._reference: SavedMetadata | None = None
        self._is_undecided = False
        self._divergences: Sequence[Divergence] = ()
        self._spans: list[Span] = []
        self.version: Version | None = None
        """The save's place in its lineage, once this rank writes."""

    def register(self, plan: SavePlan, *, is_staged: bool) -> None:
        """Posts to the coordinator the id that was passed to this rank, and the address of its node.

        `plan`: this rank's plan, before DCP drops items that other ranks have, too. `is_staged`: as of WriterParts.
        """
        self._local_plan = find_whole(plan)
        board = self._world.blackboard
        checkpoint_id = name_checkpoint(
            self._config.root,
            self._given_id,
            self._config.checkpoint_id_from,
            is_coordinator=self._world.is_coordinator,
        )
        items = self._local_plan.items
        began = time.monotonic()
        self._spans.append(Span("prepare", self._started_at, began, began - self._started_at))
        self._post = self._parts.register(checkpoint_id, items, is_alone=board is None, is_staged=is_staged)
        self._spans.append(Span("register", began, time.monotonic(), time.monotonic() - began))
        if board is not None:
            board.share_in(self._store.root_agent_directory())
            self._nonce = board.post("save", self._post.to_json())
        self._warn(filter(None, [self._post.node.silence]))
        self._warn(self._parts.object_tier.submit(self._world.size))
        failpoints.reach("rank.registered")

    def decide(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Coordinator: checks that the ids agree, chooses the buddies, opens the save on every node, posts the
        decision.

        Returns the plans, with the items that some ranks copy for others. Raises CheckpointIdMismatch,
        CheckpointExists, ConfigInvalid, MemoryTierShort, StoreError: then nothing is open.
        """
        board, config = self._world.blackboard, self._config
        raw_posts = board.posts("save", DECISION_TIMEOUT_S) if board is not None else []
        posts = [SavePost.from_json(post) for post in raw_posts] or [self._post]
        # A random ticket: a rank may abort this save, and no other.
        decision = replace(decide(posts, config.copies, uuid.uuid4().hex, plans), ticket=secrets.token_hex(16))
        self._cluster: AgentCluster | LoneNode
        self._cluster = LoneNode(self._store) if board is None else cluster_of(decision, self._world.rank)
        known, session = self._parts.layouts.save_id, self._world.session_of_writer(self._parts.name)
        turn = self._parts.replicas.next_turn(sum(post.items for post in posts), plans)
        self._decision = replace(decision, session=session, overwrite=config.overwrite, known_layout=known, turn=turn)
        # Before the opening: a save that does not fit is refused while there is nothing to undo.
        if self._parts.memory is not None:
            self._parts.memory.check_limit(self._decision, posts, plans)
        failpoints.reach("coordinator.drawn")
        # From here on a node may have opened the save: any error of this rank must abort it.
        self._is_undecided = True
        with self._abort_on_error():
            opened = self._open()
            failpoints.reach("coordinator.opened")
            overwrites = self._decision.overwrite
            seen = find_seen_lineage(self._store, scope_of(decision.checkpoint_id))
            # As configured: a checkpoint that the nodes have lost may be complete in the bucket, and must stay there.
            asked = replace(self._decision, overwrite=config.overwrite)
            placed, problems = assign_sequence(asked, opened, self._parts.object_tier, seen)
            self._decision = replace(placed, overwrite=overwrites, file_number=choose_file_number(opened))
            self._warn(problems)
            if self._parts.replicas.is_all_known:
                self._decision = self._parts.help_plans.choose(self._decision, posts, plans)
                plans = self._parts.help_plans.add_to_plans(plans, self._decision, posts)
            # Last: ranks write as soon as they read the decision, and the save must be open on the nodes by then.
            if board is not None:
                board.decide("save", raw_posts, self._decision.to_json(), stays=STAYS)
            failpoints.reach("coordinator.placed")
            self._warn(list_weaknesses(self._decision, config.copies, posts), of=config.root)  # one text for all saves
            self._warn(self._parts.retaining.warn_of_name(decision.checkpoint_id), of=config.root)
        return plans

    def write_shard(self, plan: SavePlan, planner: SavePlanner, staged: memoryview | None = None) -> list[WriteResult]:
        """Writes this rank's shard here and at its buddies, and posts its receipt to the coordinator.

        `staged`: the memory of its tensors, if this node's agent can map it. Afterwards the shard is safe at the level
        of `ack`. If another rank has failed, there are no results: DCP names that rank, and `commit` refuses the
        receipt.
        """
        board = self._world.blackboard
        if board is not None and not self._world.is_coordinator:
            self._decision = SaveDecision.from_json(board.decision("save", self._nonce, DECISION_TIMEOUT_S))
            self._cluster = cluster_of(self._decision, self._world.rank)
        save_id = self._decision.save_id
        self.version = Version(self._decision.lineage, self._decision.sequence, 0.0, save_id)
        with self._abort_on_error():
            # SaveAborted follows from another rank's error: raised here, it would hide the cause that DCP reports.
            try:
                results, self._receipt = self._write_shard(plan, planner, staged)
                copies = self._copy_others(plan, planner, staged if self._receipt.is_submitted else None)
                self._receipt = replace(self._receipt, copies=copies)
            except SaveAborted as exc:
                log.warning("rank %d stops writing: %s", self._world.rank, exc)
                results, self._receipt = [], Receipt(aborted=exc.message)
            failpoints.reach("rank.written")
            if board is not None:
                # The agent may have died and been started again meanwhile, under another port.
                now = register_again(self._store, self._post.node)
                board.post("receipt", make_receipt_post(self._receipt, save_id, now))
            failpoints.reach("rank.receipted")
            if self._decision.upload is not None:
                self._parts.object_tier.expect(save_id, self._decision.checkpoint_id)
        self._written_at = time.monotonic()
        self._is_followed = follow_step(self._learn_outcome)
        return self._parts.layouts.refer(results, save_id, self._decision.known_layout)

    def commit(self, metadata: Metadata, results: list[list[WriteResult]]) -> bool:
        """Coordinator: checks that every shard is written, makes the decision durable, and has every node publish the
        save.

        Returns whether the save is also uploaded to the bucket.

        Raises:
            SaveAborted, AckNotReached, StoreError: at the coordinator. DCP raises them on all ranks.
        """
        board, receipts, decision = self._world.blackboard, [self._receipt], self._decision
        # From here on `break_off` must not abort: `commit_save` decides when that is still allowed.
        self._is_undecided = False
        with self._abort_on_error():
            if board is not None:
                self._spans += self._cluster.spans
                own_node, posts = decision.node_of(self._world.rank).node_id, board.posts("receipt", DECISION_TIMEOUT_S)
                receipts, self._cluster = collect_receipts(posts, decision, own_node)
            check_none_aborted(receipts, decision)
            self._counted = count_copies(receipts, decision)
            self._exclude(self._counted.differing)
        self._commit(self._counted.receipts, metadata, results)
        return decision.upload is not None

    def _commit(self, receipts: Sequence[Receipt], metadata: Metadata, results: list[list[WriteResult]]) -> None:
        decision = self._decision
        try:
            problems, self._receipts = commit_save(
                self._store,
                self._cluster,
                decision,
                self._config,
                receipts,
                metadata,
                results,
                notes=self._notes,
                start_agent=self._agent_starter(),
                layouts=self._parts.layouts,
                parts=self._parts.parts,
                find_divergences=partial(self._find_divergences, receipts),
                helpers_by_shard=self._counted.pending,
                exclude=lambda differing: self._exclude(find_owners(differing)),
            )
        except BaseException as exc:
            self._report_failed(exc)
            raise
        finally:
            # The lock must go even if publishing failed: agents complete a decided save only once its ranks have left.
            self.close()
        assert self.version is not None, "it was written"
        remember(self._store, decision.checkpoint_id, self.version)
        self._warn(problems)
        self._warn(self._counted.missed)
        self._warn_of_divergences()
        # With problems a node may lack `.metadata`: the ranks must not read it from their own disk.
        self._reference = None if problems else SavedMetadata.of(decision.checkpoint_id, decision.save_id)
        self._parts.retaining.note_committed(decision, has_agents=self._world.blackboard is not None)
        if decision.upload is not None:
            self._parts.object_tier.note_committed()

    def end(self) -> None:
        """Coordinator: ends the save. Ranks report in DCP's last collective. If DCP did not begin the save, this rank
        reports now.
        """
        if not self._is_followed:
            self._report_committed()

    def _learn_outcome(self, collectives: Collectives, value: object) -> object:
        """Every rank gets the outcome from the coordinator. This ends the save on this rank."""
        outcome = broadcast_outcome(collectives.broadcast_object, value, self._store, self._reference)
        if not isinstance(outcome, CheckpointException):
            self._report_committed()
        self.close()
        return outcome

    def _report_committed(self) -> None:
        now = time.monotonic()
        if self._parts.shards.unchanged is not None:
            is_helped = bool(find_helped(self._decision, self._world.rank))
            self._parts.shards.unchanged.commit(
                self._decision.checkpoint_id, self._decision.save_id, is_helped=is_helped
            )
        ranks = report_ranks(self._decision, self._receipts, self._config.copies)
        helpers = len(find_helped(self._decision, self._world.rank))
        spent = now - self._started_at, now - self._written_at
        written = self._held.find_written()
        report = self._report.end(*spent, ranks, self._receipt.shards, written, helpers)
        report = replace(report, divergences=tuple(self._divergences))
        self._keep_report(report)
        if self._world.is_coordinator:
            log.info("%s", report)
        spans = [
            *(
                span.since(self._started_at, report.seconds, by_agent=False)
                for span in (*self._spans, *self._cluster.spans)
            ),
            *(span.since(self._started_at, report.seconds, by_agent=True) for one in written for span in one.spans),
        ]
        report_ended(self._store, report_to_agent(report, time.time(), self._decision, spans))
        call_back(self._parts.on_save, report)

    def break_off(self) -> None:
        """Called when the ranks can no longer communicate. The coordinator aborts an undecided save, and this rank
        closes the save.
        """
        try:
            if self._is_undecided:
                self._abort("the ranks no longer meet: one of them has ended, or left a collective")
        finally:
            self.close()

    def close(self) -> None:
        """Ends this rank's part in the save."""
        self._held.close()

    def _agent_starter(self) -> Callable[[], object]:
        """A function that starts this node's agent. It must not refer to this attempt: followers hold the function, and an
        attempt without other references must be garbage-collected, which releases its lock.
        """
        return partial(register_again, self._store, self._post.node)

    def _write_shard(
        self, plan: SavePlan, planner: SavePlanner, staged: memoryview | None
    ) -> tuple[list[WriteResult], Receipt]:
        decision, rank, config, began = self._decision, self._world.rank, self._config, time.monotonic()
        # The node's agent did not answer at the opening, so this rank opens the save here before it stages anything.
        if decision.node_of(rank).node_id in decision.unreached:
            open_unreached(self._store, decision, self._post.node.host)
        # Before the first byte: an unlocked save counts as stale, and an agent would remove it.
        self._held.lock(self._store, decision.save_id)
        # One rank of each node notes the place, which is the same for all ranks of the node.
        if rank == decision.ranks_of(decision.node_of(rank).node_id)[0]:
            self._store.note_place(decision.save_id, decision.lineage, decision.sequence)
        self._warn(self._parts.retaining.submit(decision, rank))
        own_apart, entries = bool(find_helped(decision, rank)), self._parts.shards.unchanged
        changing, unchanged = (plan.items, ()) if entries is None else entries.begin_save(plan.items)
        under_way: list[WrittenShard | ShardUnderWay] = []
        shards: list[WrittenShard] = []
        try:
            for part, items in self._parts.parts.divide(changing, own_apart=own_apart).items():
                under_way.append(self._begin_part(items, part, planner, staged))
            if unchanged:
                under_way.append(self._parts.shards.write_unchanged(unchanged, planner, decision, rank))
            # At the same time, disks and buddies take the last bytes.
            replicas = self._hash_replicas(planner)
            while under_way:
                shards.append(under_way.pop(0).end())
        except BaseException:
            # The caller may change the state once this has raised.
            for shard in under_way:
                shard.wait()
            raise
        receipt = Receipt(
            tuple(shard.receipt for shard in shards),
            seconds=time.monotonic() - self._started_at,
            phases={"plan": began - self._started_at, **add_phases(shard.phases for shard in shards)},
            replicas=replicas,
        )
        self._spans += [span for shard in shards for span in shard.spans]
        self._report = report_save(decision, rank, receipt, config.copies)
        self._keep_report(self._report)
        missed = [what for shard in shards for what in shard.missed]
        if missed and config.on_degraded == "raise":
            have = {shard.receipt.name: len(shard.receipt.holders) for shard in shards if shard.missed}
            raise AckNotReached(decision.placement.copies, have, "; ".join(missed))
        self._warn(missed)
        return [result for shard in shards for result in shard.results], receipt

    def _begin_part(
        self, items: Sequence[WriteItem], part: Part, planner: SavePlanner, staged: memoryview | None
    ) -> WrittenShard | ShardUnderWay:
        writer, decision, rank = self._parts.shards, self._decision, self._world.rank
        has_agent = self._world.blackboard is not None and not decision.node_of(rank).silence
        if staged is not None and has_agent:
            submitted = writer.submit(items, part, planner, decision, rank, staged, self._agent_starter())
            if submitted is not None:
                self._held.follow(submitted.follower)
                return submitted
        # No agent takes the shard, or it does not lie in shared memory.
        return writer.begin_shard(items, part, planner, decision, rank)

    def _copy_others(self, plan: SavePlan, planner: SavePlanner, staged: memoryview | None) -> tuple[ShardReceipt, ...]:
        """Writes or submits the copies for which this rank is the helper. The rank's own shard comes first, because the
        save waits for it.
        """
        items_by_owner, rank, decision = self._parts.help_plans.take(plan), self._world.rank, self._decision
        copies = []
        for owner in decision.owners_by_helper.get(rank, ()):
            # A user's planner may have made a new plan, without the added items.
            if owner not in items_by_owner:
                continue
            parts = self._parts.parts.divide(items_by_owner[owner], own_apart=True)
            try:
                for part, items in parts.items():
                    if part is not Part.REST:  # this part has what this rank may not have
                        copies.append(self._copy(items, part, planner, owner, staged))
            except SaveAborted:
                raise
            # An error in a value that this rank need not write must not fail the save: agents make the copy then.
            except Exception as exc:  # noqa: BLE001
                log.warning("no copy of the shard of rank %d is written from rank %d's memory: %s", owner, rank, exc)
        # Without replicas no helper is possible, and later saves need no digest of the plan.
        if decision.turn is not None:
            self._parts.help_plans.note_planner(planner)
        return tuple(copies)

    def _copy(
        self, items: Sequence[WriteItem], part: Part, planner: SavePlanner, owner: int, staged: memoryview | None
    ) -> ShardReceipt:
        shards, decision, rank = self._parts.shards, self._decision, self._world.rank
        if staged is not None:
            submitted = shards.submit_copy(items, part, planner, decision, owner, rank, staged, self._agent_starter())
            if submitted is not None:
                self._held.follow_copy(submitted.follower)
                return submitted.receipt
        return shards.write_copy(items, part, planner, decision, owner, rank)

    def _exclude(self, owners: Collection[int]) -> None:
        if owners:
            # A copy that differs shows that some value differs, but not which one.
            self._parts.replicas.suspect()
            self._parts.help_plans.exclude_owners(owners)

    def _hash_replicas(self, planner: SavePlanner) -> bytes:
        turn = self._decision.turn
        return b"" if turn is None else self._parts.replicas.hash_units(self._local_plan, planner, turn)

    def _find_divergences(self, receipts: Sequence[Receipt], metadata: Metadata) -> Sequence[Divergence]:
        """Coordinator: the values that differ between ranks. Raises ReplicasDiverged: a tensor differs, and `on_divergence`
        is "raise".
        """
        if self._decision.turn is not None:
            reports = {rank: receipt.replicas for rank, receipt in enumerate(receipts)}
            found = name_divergences(reports, metadata)
            found = without_allowed(found, self._config.may_differ)
            self._parts.help_plans.exclude(found)
            self._divergences = self._parts.replicas.without_named_objects(found)
        tensors = [one for one in self._divergences if not one.is_object]
        if tensors and self._config.on_divergence == "raise":
            raise ReplicasDiverged(self._decision.checkpoint_id, describe_divergences(tensors, self._hosts))
        return self._divergences

    def _warn_of_divergences(self) -> None:
        news = self._parts.replicas.without_named(self._divergences)
        self._parts.replicas.note_committed(self._decision.turn, self._divergences)
        tensors = [one for one in news if not one.is_object]
        objects = [one for one in news if one.is_object]
        name = self._decision.checkpoint_id
        if tensors:
            found, hint = describe_divergences(tensors, self._hosts), ReplicasDiverged.default_hint
            saved = f"{name} has the bytes of the first rank that is named for each entry"
            self._warn([f"replicas have diverged: {found}. {saved}. {hint}"])
        if objects:
            found = describe_divergences(objects, self._hosts)
            self._warn([f"ranks save different objects under one name: {found}. {_OWN_OBJECTS_HINT}"])

    @property
    def _hosts(self) -> Mapping[int, str]:
        decision = self._decision
        return {rank: decision.node_of(rank).host for rank in range(len(decision.node_by_rank))}

    def _open(self) -> Opened:
        """Opens the save on every node. If the existing checkpoint of its name is lost for good, opens a save under a new
        save id, which may overwrite it.
        """
        decision = self._decision
        try:
            return self._begin(decision)
        except CheckpointExists:
            if decision.overwrite:
                raise
        own_node = decision.node_of(self._world.rank).node_id
        addresses = [] if self._world.blackboard is None else [node.address for node in decision.nodes]
        check_overwritable(self._store, own_node, addresses, decision.checkpoint_id)
        log.warning("%s exists, but parts of it are lost: this save replaces it", decision.checkpoint_id)
        self._cluster.abort(decision.save_id, "it is opened again, to replace a lost checkpoint")
        # A new id: nodes remember the aborted one, and never open it again.
        self._decision = replace(decision, save_id=uuid.uuid4().hex, overwrite=True)
        return self._begin(self._decision)

    def _begin(self, decision: SaveDecision) -> Opened:
        return self._cluster.begin(decision.intent, partial(self._lock_as_coordinator, decision.save_id))

    def _lock_as_coordinator(self, save_id: str) -> None:
        """Locks the save here, so that no agent treats it as stale, however slow other nodes or the planning are."""
        if self._world.blackboard is not None:
            self._held.lock(self._store, save_id)

    @contextmanager
    def _abort_on_error(self) -> Iterator[None]:
        """If the block raises, the save is aborted on every node that answers, and this rank's lock on it ends."""
        try:
            yield
        except BaseException as exc:
            try:
                self._abort(f"rank {self._world.rank} on {self._post.node.host} failed: {type(exc).__name__}: {exc}")
            # Also if the abort itself is interrupted: with the lock, this rank would still seem to write.
            finally:
                self.close()
                self._report_failed(exc)
            raise

    def _report_failed(self, error: BaseException) -> None:
        spent = time.monotonic() - self._started_at
        report_failed(self._store, "save", self._decision.checkpoint_id, self._world.rank, spent, error)

    def _abort(self, why: str) -> None:
        self._cluster.abort(self._decision.save_id, why)

    def _warn(self, problems: Iterable[str], of: str = "") -> None:
        for problem in problems:
            warn(f"{of or self._given_id or self._config.root}: {problem.rstrip('.')}.", self._parts.made_at)
