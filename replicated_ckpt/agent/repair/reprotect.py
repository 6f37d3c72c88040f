"""Re-protection: a background thread that restores the number of copies of every committed checkpoint."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, replace
from typing import TypeAlias

from replicated_ckpt.agent.repair.mender import Mender, find_damaged, restore_replaced
from replicated_ckpt.core.inventory import Holding
from replicated_ckpt.core.lineage import histories_of
from replicated_ckpt.core.manifest import Manifest
from replicated_ckpt.core.upkeep.overview import Look
from replicated_ckpt.core.upkeep.policy import NOTHING_REPORTED, NodeReport
from replicated_ckpt.core.upkeep.repair import NodeView, Presence, plan_repair
from replicated_ckpt.core.upkeep.repair_plan import (
    Action,
    Finding,
    RepairPlan,
    RestoreManifest,
    is_of_held_save,
    refuse_unplanned,
)
from replicated_ckpt.core.upkeep.retention import without_retired
from replicated_ckpt.errors import ObjectCorrupt, ReplicatedCkptError, StoreError, StoreUnavailable
from replicated_ckpt.node.peers.manifests import ManifestBook
from replicated_ckpt.node.peers.watch import NodeHoldings, PeerWatch, SilenceTimeouts
from replicated_ckpt.node.saves.collector import Collector
from replicated_ckpt.node.saves.service import NodeService
from replicated_ckpt.node.saves.settle import settle
from replicated_ckpt.stores.files.durable import is_refusal
from replicated_ckpt.stores.local.versions.full_disk import try_room
from replicated_ckpt.stores.node_cache.cache import sweep
from replicated_ckpt.stores.threads import start_thread
from replicated_ckpt.stores.throttle import Pace, Stopped
from replicated_ckpt.wording import one_line

log = logging.getLogger(__name__)

RETRY_S = 900.0
"""Pause before the next try of a copy for which no node has intact bytes: a try reads whole shards on several nodes."""

_Place = tuple[str, str]


class DeferredActions:
    """Planned actions that this node puts off. For use by one thread.

    A user may delete a checkpoint on all nodes, one after the other. So when a save has vanished from this node's disk, the
    node does not copy it back for `lost_after_s` seconds. An action for which no node had intact bytes waits RETRY_S.
    """

    def __init__(self, lost_after_s: float, clock: Callable[[], float]) -> None:
        self._lost_after_s = lost_after_s
        self._clock = clock
        self._held: set[_Place] = set()
        self._gone_since: dict[_Place, float] = {}
        self._failed: dict[Action, tuple[float, str]] = {}

    def look(self, holdings: Iterable[Holding], planned: Collection[Action]) -> None:
        """Finds the saves that have vanished since the last call. Forgets the failures of actions that `planned` lacks."""
        now, held = self._clock(), {_place_of(holding) for holding in holdings}
        for place in self._held - held:
            self._gone_since.setdefault(place, now)
        self._held = held
        self._gone_since = {
            place: since
            for place, since in self._gone_since.items()
            if place not in held and now - since < self._lost_after_s
        }
        # When a node with intact bytes comes back, the plan changes, and the new action is tried at once.
        self._failed = {action: failed for action, failed in self._failed.items() if action in planned}

    def is_removed_now(self, action: Action) -> bool:
        """Whether the save has vanished here within `lost_after_s`. If other nodes keep it, the action is done later."""
        return _place_of(action) in self._gone_since

    def note_failure(self, action: Action, why: str) -> None:
        """Puts the action off: no node had intact bytes for it."""
        self._failed[action] = self._clock() + RETRY_S, why

    def find_recent_error(self, action: Action) -> str:
        """The error of an action that failed less than RETRY_S ago; "" if the action may be tried."""
        until, why = self._failed.get(action, (0.0, ""))
        return why if self._clock() < until else ""


def _place_of(found: Holding | Action) -> _Place:
    return found.checkpoint_id, found.save_id


PAUSE_S = 2.0
FIRST_PAUSE_S = 0.1
IDLE_PAUSE_S = 15.0
_FIRST_PER_NODE_S, _IDLE_PER_NODE_S = 0.002, 0.05
"""The pause grows with the number of nodes, so that an agent answers about as many requests a second."""

RESTS_PER_ROUND = 4.0
"""After a round that copied nothing, its thread rests this many times the processor time of the round.

A round looks at every checkpoint, and each save wakes the thread. Without the rest, saves would slow down with each
checkpoint that the node holds.
"""


class Pauses:
    """The pause of the thread after each round, unless something wakes it earlier.

    While there is work, the pause is FIRST_PAUSE_S after the round that the thread was woken for, and doubles each time, up
    to PAUSE_S. Otherwise it is `idle_s`. No pause with work is longer than `idle_s`.
    """

    def __init__(self, idle_s: float) -> None:
        self._idle_s = idle_s
        self._next_s = PAUSE_S

    def begin_round(self, nodes: int) -> None:
        """A round begins because an event has woken the thread: the next pause is short again."""
        self._next_s = min(PAUSE_S, max(FIRST_PAUSE_S, _FIRST_PER_NODE_S * nodes))

    def after(self, nodes: int, *, is_active: bool) -> float:
        """Seconds until the next round, which asks `nodes` other nodes."""
        if not is_active:
            return max(self._idle_s, _IDLE_PER_NODE_S * nodes)
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, PAUSE_S)
        return min(pause_s, self._idle_s)


@dataclass(frozen=True)
class Protection:
    """The result of one round. `is_complete`: every checkpoint has all its copies, and no silent node is in doubt.

    `planned`: number of actions of all nodes together. `done`: of this node's. `failed`: the errors of this node's actions.
    `short`: number of shards with too few copies, for which no node can take another one. `lost`: number of those without
    any copy, also on nodes that this node has no address of. `in_doubt`: a silent node does not count as lost yet.
    """

    is_complete: bool
    planned: int = 0
    done: int = 0
    failed: tuple[str, ...] = ()
    short: int = 0
    lost: int = 0
    in_doubt: bool = False


STALE_ROUNDS_MAX = 10  # rounds with the same plan: by then all possible actions are done
STALE_SAVE_GRACE_S = 60.0
SUSPECTS_MAX = 4096  # any peer may name files: the queue stays bounded
LOAD_FIRST_S = 0.3
"""A round competes with the load for processors. With two processors for four ranks, a load took up to a fifth longer."""
_NOT_PLANNED = (
    "this node's own plan does not have that action, so it refuses the action from another node's plan. Run the command "
    "on this node's host"
)

Outcome: TypeAlias = tuple[Action, str]


class Reprotector:
    """One thread that looks at all nodes, plans, and does this node's part: when woken, and every `idle_pause_s`.

    All nodes make the same plan from the same holdings, so no node is in charge. The collector removes superseded and
    retired saves, and nothing else is deleted: a node that returns after it counted as lost leaves extra copies.
    `node_report` returns this node's report for the other nodes. `round` may also be called directly, without the thread.
    """

    def __init__(
        self,
        service: NodeService,
        timeouts: SilenceTimeouts,
        pace: Pace,
        stopping: threading.Event,
        clock: Callable[[], float] = time.monotonic,
        node_report: Callable[[], NodeReport] = lambda: NOTHING_REPORTED,
        on_seen: Callable[[Collection[str]], None] = lambda _: None,
        idle_pause_s: float = IDLE_PAUSE_S,
    ) -> None:
        self._service = service
        self.node_report = node_report
        self._on_seen = on_seen
        self._pauses = Pauses(idle_pause_s)
        self._collector = Collector(service, stopping)
        self._clock = clock
        self.watch = PeerWatch(service.peers, timeouts, clock)
        self._mender = Mender(service, pace, self._remove_meanwhile)
        self._stopping = stopping
        self._woken = threading.Event()
        self._loads = threading.Event()
        self._busy = threading.Event()
        self._suspects = deque(service.damage.read_all(), maxlen=SUSPECTS_MAX)
        self._orders: deque[tuple[RepairPlan, bool, Future[list[Outcome]]]] = deque()
        self._manifests = ManifestBook(service.store, service.node_id, service.peers)
        self._deferred = DeferredActions(timeouts.lost_after_s, clock)
        self._stale: tuple[RepairPlan, int] = (RepairPlan(), 0)
        self._began_at: float | None = None
        self._look_again_at = clock()
        self._rounds = 0
        self.last = Protection(is_complete=False)
        self.seen: Look | None = None
        """The last look at all nodes; None before the first one."""
        self._thread = threading.Thread(target=self._run, name="rckpt-reprotect", daemon=True)

    def start(self) -> None:
        start_thread(self._thread)

    def wake(self) -> None:
        self._busy.set()
        self._woken.set()

    def wake_for_load(self) -> None:
        """As `wake`, when a load begins: the round waits LOAD_FIRST_S, unless something else wakes the thread."""
        self._loads.set()
        self.wake()

    def join(self) -> None:
        """Waits up to PAUSE_S for the thread, after `stopping` was set. A thread that hangs ends with the process."""
        self._woken.set()
        self._thread.join(PAUSE_S)

    def suspect(self, checkpoint_id: str, save_id: str, name: str, why: str) -> None:
        """Queues a file that the thread reads again soon, and repairs if it is bad. Cheap; call it from any thread.

        A file that is known to be bad is being repaired already, and is not queued.
        """
        # A load on a thousand ranks reports the same file a thousand times.
        if self._service.damage.is_known(checkpoint_id, save_id, name):
            return
        log.info("reads %s/%s of save %s again, which was reported as bad: %s", checkpoint_id, name, save_id, why)
        self._suspects.append((checkpoint_id, save_id, name))
        self.wake()

    def suspect_finding(self, finding: Finding) -> None:
        """As `suspect`, for a finding of an inspection of this node."""
        self.suspect(finding.checkpoint_id, finding.save_id, finding.name, str(finding))

    @property
    def is_busy(self) -> bool:
        """Whether there is work, or will be soon. An agent with work does not exit as idle."""
        return self._busy.is_set()

    @property
    def bytes_fetched(self) -> int:
        """The bytes fetched for copies since the agent started, also for copies that are under way or have failed."""
        return self._mender.bytes_fetched

    def status(self) -> Mapping[str, object]:
        return {
            **asdict(self.last),
            "bytes_copied": self._mender.bytes_copied,
            "rounds": self._rounds,
            "retention": self._collector.status(),
            "over_bound": self._manifests.over_bound,
        }

    def carry_out(self, part: RepairPlan, *, may_replace: bool) -> list[Outcome]:
        """Has the thread of re-protection do this node's part of a plan, and waits. Returns each action's error, or "".

        `may_replace`: the plan may publish a save in place of another one. Without it, such an action is done only if this
        node makes the same plan from its own look at all nodes.

        Raises:
            StoreUnavailable: the agent exits; some actions may have been done. ReplicatedCkptError: this node could not
                read its own store; nothing was done.
        """
        order: Future[list[Outcome]] = Future()
        # One thread changes checkpoints: with two, each would act on a state that the other has changed since.
        self._orders.append((part, may_replace, order))
        self.wake()
        # Short waits: the thread that does the actions ends when the agent exits, and this call must notice it.
        while not wait([order], PAUSE_S).done:
            if self._stopping.is_set():
                raise StoreUnavailable("this node", "repair", "", "its agent is about to exit")
        return order.result()

    def _run(self) -> None:
        while not self._stopping.is_set():
            if self._woken.is_set():
                self._pauses.begin_round(self._service.peers.count())
            self._woken.clear()
            if self._loads.is_set() and not self._orders:
                self._woken.wait(LOAD_FIRST_S)
                self._woken.clear()
            self._loads.clear()
            began = time.thread_time()
            try:
                self._do_orders()
                began = time.thread_time()
                self.last = self.round()
                self._rounds += 1
            except Stopped:
                return
            except (ReplicatedCkptError, OSError) as exc:
                self._service.figures.count_error("repair", exc)
                log.error("re-protection continues soon: %s", exc)  # noqa: TRY400 - it explains itself
                self.last = Protection(is_complete=False, failed=(str(exc),))
            except Exception as exc:
                self._service.figures.count_error("repair", exc)
                log.exception("a defect in replicated_ckpt: re-protection continues soon")
                self.last = Protection(is_complete=False, failed=(repr(exc),))
            is_active = self._is_active(self.last)
            if not self.last.done:
                self._rest(RESTS_PER_ROUND * (time.thread_time() - began))
            # If the thread was woken during the round there is work, and an idle agent must not exit before it.
            if not is_active and not self._woken.is_set():
                self._busy.clear()
            self._woken.wait(self._pauses.after(self._service.peers.count(), is_active=is_active))

    def _rest(self, seconds: float) -> None:
        """Sleeps for this time, unless `carry_out` is called or the agent exits."""
        until = self._clock() + seconds
        while not self._orders and (left := until - self._clock()) > 0:
            if self._stopping.wait(min(left, FIRST_PAUSE_S)):
                return

    def _is_active(self, found: Protection) -> bool:
        return found.in_doubt or (found.planned > 0 and self._stale[1] < STALE_ROUNDS_MAX)

    def round(self) -> Protection:
        """Looks at all nodes, plans, and does this node's part.

        Raises:
            StoreError: the node's own store cannot be read. Stopped: the agent exits.
        """
        # Before the look: a bad file must not count as a copy in this round's plan.
        self._read_suspects()
        self._settle_stale_saves()
        # Read before the look: a policy may be applied only to answers that were given after it.
        policies = self._service.policies.read_all()
        manifests, (own, *others) = self._look()
        if self._stopping.is_set():
            raise Stopped
        self._on_seen([view.node_id for view in others if view.presence is Presence.UP])
        for view in others:
            # This node's next save must be newer than any save that a peer holds.
            told = histories_of(holding.version for holding in view.holdings or ())
            self._service.learn_sequences(
                {lineage: history.sequence for lineage, history in told.items()}, view.node_id
            )
        self._service.learn_marks(view.node_report.marks for view in others)
        in_doubt = self.watch.is_in_doubt(others)
        damaged = find_damaged(self._service)
        is_restored = restore_replaced(self._service, damaged, manifests, others)
        going, is_removed = self._collector.retire(manifests, (own, *others), policies, in_doubt=in_doubt)
        if is_restored or is_removed:  # a name may now be free for another run's checkpoint
            own = replace(own, holdings=self._service.holdings(), unclaimed=self._service.unclaimed.find_files())
        views = (own, *others)
        look = self.seen = Look(manifests, views, going, self._service.peers.read_forgotten())
        plan = plan_repair(manifests, views, self._service.node_id, going=going)
        self._stale = (plan, self._stale[1] + 1 if plan == self._stale[0] else 0)
        is_complete = plan.is_complete and not in_doubt
        self._collector.drop_superseded(
            without_retired(manifests, going),
            views,
            # A version without a manifest may hold the last copy of a shard, so it is removed only after all is complete.
            damaged=damaged if is_complete and not is_restored else (),
            # The superseded saves may take the room that the missing copies need.
            is_stuck=self._stale[1] >= STALE_ROUNDS_MAX
            and not (in_doubt or any(view.node_report.is_busy for view in others)),
        )
        found = Protection(
            is_complete=is_complete,
            planned=len(plan.actions),
            short=len(plan.short),
            lost=sum(not look.has_unknown_holder(short.save_id, short.shard) for short in plan.lost),
            in_doubt=in_doubt,
        )
        if self._is_active(found):
            self._busy.set()  # before the work begins: no event may have woken the thread for this round
        done, failed = self._carry_out(plan.of_node(self._service.node_id))
        found = replace(found, done=done, failed=(*self._collector.failed, *failed))
        self._log_found(found, plan)
        return found

    def _remove_meanwhile(self) -> None:
        """Runs the collector during a long copy, as often as when idle: jobs go on saving, and the disk would fill."""
        if self._clock() < self._look_again_at:
            return
        try:
            policies = self._service.policies.read_all()
            manifests, views = self._look()
            going, _ = self._collector.retire(manifests, views, policies, in_doubt=self.watch.is_in_doubt(views))
            self._collector.drop_superseded(without_retired(manifests, going), views)
        except (ReplicatedCkptError, OSError) as exc:
            log.warning("superseded files stay for now: %s", exc)

    def _read_suspects(self) -> None:
        """Reads all suspect files, and those of a wrong size. A damaged file no longer counts as a copy.

        A file that the system refuses to read now, for example for lack of descriptors, is read in the next round.
        """
        self._suspects.extend(self._mender.of_wrong_size())
        refused = []
        while self._suspects:
            checkpoint_id, save_id, name = place = self._suspects.popleft()
            try:
                self._mender.examine(checkpoint_id, save_id, name)
            except ReplicatedCkptError as exc:
                log.info("%s/%s of save %s was not read: %s", checkpoint_id, name, save_id, exc)
                refused += [place] if isinstance(exc, StoreError) and is_refusal(exc) else []
        self._suspects.extend(refused)

    def _settle_stale_saves(self) -> None:
        """Settles stale saves and removes stale files. An error of the disk is logged, and the round goes on."""
        try:
            self._service.store.tidy(is_alone=True)  # no other thread adds files to checkpoints
            sweep(self._service.store.root_agent_directory())
            stale_saves = self._service.find_settleable(STALE_SAVE_GRACE_S)
            if stale_saves:
                settle(self._service, stale_saves, self._service.peers.read_all())
        except (ReplicatedCkptError, OSError) as exc:
            log.warning("stale saves are not settled yet: %s", exc)

    def _look(self) -> tuple[Mapping[str, Manifest], tuple[NodeView, ...]]:
        """The manifests of the saves that nodes hold, and the views of all nodes, this one first."""
        others, service = self.watch.look(self._manifests.known), self._service
        self._look_again_at = self._clock() + self._pauses.after(len(others), is_active=False)
        unclaimed, node_report = service.unclaimed.find_files(), self.node_report()
        own = NodeHoldings(service.holdings(), unclaimed, node_report, try_room(service.store.root)).view_of(
            service.node_id
        )
        manifests = self._manifests.of((own, *others))
        return manifests, self.watch.with_newer((own, *others), manifests)

    def _do_orders(self) -> None:
        while self._orders:
            part, may_replace, order = self._orders.popleft()
            try:
                refused = frozenset() if may_replace else self._not_planned_here(part.restore)
                order.set_result(
                    [(action, _NOT_PLANNED if action in refused else self._try(action)) for action in part.actions]
                )
            except Stopped:
                raise
            except Exception as exc:  # noqa: BLE001 - the thread that called `carry_out` raises it
                order.set_exception(exc)

    def _not_planned_here(self, restored: Sequence[RestoreManifest]) -> frozenset[RestoreManifest]:
        held = self._service.holdings()
        others = [action for action in restored if not is_of_held_save(action, held)]
        if not others:
            return frozenset()
        return refuse_unplanned(others, plan_repair(*self._look(), self._service.node_id).restore)

    def _try(self, action: Action) -> str:
        """Does one action. Returns its error, or ""."""
        if self._stopping.is_set():
            raise Stopped
        try:
            self._mender.carry_out(action)
        except ReplicatedCkptError as exc:
            self._service.figures.count_error("repair", exc)
            log.warning("not done: %s: %s", one_line(action), one_line(exc))
            # No node has intact bytes. The action waits, because a try reads whole shards on several nodes.
            if isinstance(exc, ObjectCorrupt):
                self._deferred.note_failure(action, one_line(exc))
            return one_line(exc)
        return ""

    def _carry_out(self, part: RepairPlan) -> tuple[int, list[str]]:
        """Carries out a part of a plan. Returns the number of actions done, and the errors of the failed ones.

        After a long time the rest is left to a new plan, in which the copies of a newer save come first.
        """
        self._deferred.look(self._service.holdings(), part.actions)
        done, failed, until = 0, list[str](), self._look_again_at
        for action in part.actions:
            # A user may be deleting the checkpoint on every node: this node must not copy it back meanwhile.
            if self._deferred.is_removed_now(action):
                continue
            if error := self._deferred.find_recent_error(action) or self._try(action):
                failed.append(f"{action}: {error}")
                continue
            done += 1
            if self._clock() >= until:
                self.wake()
                break
        return done, failed

    def _log_found(self, found: Protection, plan: RepairPlan) -> None:
        # A first plan may only show that nodes are publishing a save at this moment.
        is_confirmed = bool(found.done or found.failed or self._stale[1])
        if found.planned and is_confirmed and self._began_at is None:
            self._began_at = self._clock()
            log.info("re-protection: %d copies or checkpoints are missing, on all nodes together", found.planned)
        # Logged once for each plan, not in every round.
        if self._stale[1] == 1:
            for short in plan.short:
                log.warning("re-protection: nothing can be done now for %s", short)
        if found.is_complete and self._began_at is not None:
            seconds = self._clock() - self._began_at
            log.info("re-protection is done: every checkpoint has its copies again, after %.1f s", seconds)
            self._began_at = None
