"""The course of one schedule: the cluster, its jobs, the steps so far, and the result of each save and load."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from replicated_ckpt.errors import (
    CheckpointAmbiguous,
    CheckpointNotFound,
    ManifestInvalid,
    MetadataUnsafe,
    RendezvousFailed,
    ReplicatedCkptError,
    ShardLost,
)
from replicated_ckpt.node.saves.pins import PIN_S
from tests.fault.torture.attempt import Attempt
from tests.fault.torture.disks import Disks
from tests.fault.torture.oracle import MAIN, Oracle, Violation
from tests.fault.torture.simulated.cluster import Cluster
from tests.fault.torture.simulated.jobs import Job, Policy, Saved
from tests.fault.torture.simulated.network import Killed

HANDING_SHARE = 0.4
"""The share of schedules whose jobs submit their saves to agents, as asynchronous saves do."""
BEFORE_OPENING = "coordinator.drawn"
"""A save that pauses here has not yet read the state of its nodes."""


@dataclass(frozen=True)
class Backend:
    """What a schedule runs on: a cluster of nodes, and the jobs on it. The simulated and the real cluster have the same
    methods.

    `can_pause`: an operation can pause at a failpoint while others continue. `has_true_clocks`: all nodes show the same
    time.
    """

    cluster: Callable[[Path, int, int], Any]
    job: Callable[[Any, Sequence[int], Policy], Any]
    can_pause: bool = True
    has_true_clocks: bool = True


SIMULATION = Backend(Cluster, Job)


@dataclass
class SlowSave:
    """A save that has begun and continues in a later step. `disturbed_before`: the number of disturbances when it
    began.
    """

    job: Any
    operation: Any
    attempt: Attempt
    is_calm: bool
    disturbed_before: int


@dataclass
class SlowLoad:
    """A load that has chosen its checkpoint at `found_at`, and reads it in a later step. `attempts`: the number of
    saves begun by then.
    """

    job: Any
    operation: Any
    checkpoint_id: str
    nodes: list[int]
    disturbed_before: int
    attempts: int
    found_at: float


@dataclass
class Course:
    """The state of one schedule, which is a function of the seed alone. `lines` is its log, `counts` counts events.

    `disturbances`: the number of steps so far that may make a running save fail. `knows`: for each node, the newest
    save that it has certainly seen.
    """

    seed: int
    base: Path
    backend: Backend
    themes: Sequence[str]
    random: Random = field(init=False)
    cluster: Any = field(init=False)
    policy: Policy = field(init=False)
    theme: str = field(init=False)
    disks: Disks = field(init=False)
    oracle: Oracle = field(init=False)
    job: Any = None
    slow: list[SlowSave] = field(default_factory=list)
    slow_loads: list[SlowLoad] = field(default_factory=list)
    disturbances: int = 0
    knows: Counter[int] = field(default_factory=Counter)
    wiped: set[str] = field(default_factory=set)
    lines: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    trainers_alone_die: bool = False
    """The only fault of the next save is that every trainer is killed."""
    agent_alone_dies: bool = False
    """The only fault of the next save is that one agent is killed while it writes a shard."""
    _ids: int = 0

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        count = self.random.randint(3, 5)
        self.cluster = self.backend.cluster(self.base, count, self.seed)
        self.theme = self.random.choice(self.themes)
        keep_last = self.random.choice([1, 2, 2] if self.theme == "retention" else [None, None, None, 2, 3])
        bucket = self.base / "bucket"
        url = f"file://{bucket}" if self.theme == "bucket" else None
        self.policy = Policy(self.random.choice([2, 2, 3]), keep_last, url)
        self.disks = Disks([node.root for node in self.cluster.nodes])
        self.oracle = Oracle(self.disks, keep_last, bucket, has_true_clocks=self.backend.has_true_clocks)
        self.handing = Random(f"handing {self.seed}")
        self.hands_over = self.handing.random() < HANDING_SHARE
        how = ", handing over" if self.hands_over else ""
        self.say(
            f"seed {self.seed}: {self.theme}{how}, {count} nodes, {self.policy.copies} copies, keep_last {keep_last}"
        )

    def say(self, text: str) -> None:
        self.lines.append(text)

    @property
    def has_bucket(self) -> bool:
        """Whether the run saves to a bucket, and the bucket answers now."""
        return self.policy.object_store is not None and not self.cluster.is_bucket_down

    # Nodes and jobs ------------------------------------------------------------------------------------------------

    def reachable(self) -> list[int]:
        """Running nodes that reach each other: usually the majority side of a partition."""
        on = [node.index for node in self.cluster.nodes if not node.is_off]
        network = self.cluster.network
        cut = [node for node in on if node in network.cut]
        main = [node for node in on if node not in cut]
        side = [node for node in cut if network.is_reached(node, cut[0])]
        if side and (not main or self.random.random() < 0.3):
            return side
        if cut and not main:
            self.say("every agent is stopped, and goes on")
            network.cut = set()
            return on
        return main

    def up(self) -> list[int]:
        """Nodes of the majority side whose agents run."""
        return [node.index for node in self.cluster.nodes if node.is_up and node.index not in self.cluster.network.cut]

    def are_all_up(self, nodes: Collection[int]) -> bool:
        reach = self.cluster.network.is_reached
        return all(self.cluster.nodes[node].is_up and reach(node, next(iter(nodes))) for node in nodes)

    def is_behind(self, nodes: Collection[int]) -> bool:
        """Whether none of these nodes has seen the newest save of the run. A save by them would start a conflicting
        history.
        """
        newest = max((found.number for found in self.oracle.attempts if found.run == MAIN and found.parts), default=0)
        return max(self.knows[node] for node in nodes) < newest

    def learn(self) -> None:
        """Records for each node the saves that lie on it."""
        for attempt in self.oracle.attempts:
            for node in attempt.readable_on if attempt.run == MAIN else ():
                self.knows[node] = max(self.knows[node], attempt.number)

    def current_job(self) -> Any:
        """The running job, or a new one on some of the nodes that reach each other, in random order."""
        if self.job is not None and not self.job.is_dead and self.random.random() < 0.6:
            is_busy = any(slow.job is self.job for slow in self.slow)
            if not is_busy and not any(self.cluster.nodes[node].is_off for node in self.job.nodes):
                return self.job if self.is_in_one_piece(self.job.nodes) else None
        self.end_job()
        self.job = self.new_job()
        return self.job

    def is_in_one_piece(self, nodes: Sequence[int]) -> bool:
        return all(self.cluster.network.is_reached(node, nodes[0]) for node in nodes)

    def new_job(self) -> Any:
        """A job on some of the nodes that reach each other and have seen the newest save. None: there are no such
        nodes.
        """
        nodes = self.reachable()
        if not nodes or self.is_behind(nodes):
            return None
        count = self.random.choice([len(nodes), self.random.randint(min(2, len(nodes)), len(nodes))])
        chosen = self.random.sample(nodes, count)
        if self.is_behind(chosen):
            chosen += [node for node in nodes if node not in chosen]
        world = [node for node in chosen for _ in range(self.random.choice([1, 1, 2]))]
        job = self.backend.job(self.cluster, world, self.policy)
        if self.random.random() < 0.5:  # The new job continues where the last one ended.
            self.load_in(job, "latest", readers=9, with_bucket=self.has_bucket)
        return job

    def end_job(self) -> None:
        if self.job is not None and not any(slow.job is self.job for slow in self.slow):
            self.say("the job ends")
            self.job.end()
        self.job = None

    # Saves and loads ---------------------------------------------------------------------------------------------

    def draw_id(self, *, overwrite: bool | None = None) -> tuple[str, bool]:
        """Draws a checkpoint id to save to, and whether a checkpoint of this id exists."""
        saved = [found for found in self.oracle.attempts if not found.is_stock]
        known = sorted({found.checkpoint_id for found in saved if found.run == MAIN})
        if known and (self.random.random() < 0.5 if overwrite is None else overwrite):
            return self.random.choice(known), True
        self._ids += 1
        checkpoint_id = f"step-{self._ids}"
        return checkpoint_id, checkpoint_id in {found.checkpoint_id for found in saved}

    def save(self, job: Any, checkpoint_id: str, what: str = "", *, overwrite: bool, run: str = MAIN) -> Saved:
        """Runs one save to its end."""
        is_calm = not what and self.are_all_up(job.nodes)
        attempt = self.oracle.began(checkpoint_id, len(job.nodes), run, nodes=job.nodes)
        saved = self.saved(job, attempt, overwrite=overwrite)
        self.finish(job, attempt, saved, what, is_calm=is_calm)
        return saved

    def saved(self, job: Any, attempt: Attempt, *, overwrite: bool) -> Saved:
        """Records the result of a save in the oracle, and returns it."""
        if self.hands_over:
            self.cluster.submitted.expect()
        saved: Saved = job.save(attempt.checkpoint_id, attempt.number, overwrite=overwrite, hands_over=self.hands_over)
        if self.hands_over:
            saved = self.end_submitted(job, attempt, saved)
        self.oracle.end(attempt, is_acknowledged=saved.error is None)
        return saved

    def end_submitted(self, job: Any, attempt: Attempt, saved: Saved) -> Saved:
        """Lets agents and living ranks finish a submitted save, and returns its result.

        If the only fault was that every trainer was killed, the save must be completed once the coordinator's agent had
        its outline. Before that, nothing of it may remain.
        """
        self.cluster.submitted.finish()
        error = saved.error
        if job.is_dead:  # The whole job ends if one of its ranks is killed.
            job.end()
            self.cluster.submitted.finish()
        if self.trainers_alone_die and job.is_dead:
            error = self._judge_orphan(job, attempt, error)
        rank_is_there = not job.is_dead  # Otherwise the only memory with the shard was lost with its agent.
        if self.agent_alone_dies and error is not None and rank_is_there:
            raise Violation(
                f"an agent died with a shard in its hands, and its rank did not hand it over again: {error!r}"
            )
        return Saved(error, saved.copies_made, saved.warnings)

    def _judge_orphan(self, job: Any, attempt: Attempt, error: BaseException | None) -> BaseException | None:
        """The result of a save whose trainers were all killed, without another fault. None: the save is complete."""
        self.oracle.look()
        had_outline = self.cluster.submitted.had_outline()
        had_outline = bool(attempt.parts) if had_outline is None else had_outline
        self.say(
            f"all trainers were killed, attempt {attempt.number} is to be {'completed' if had_outline else 'gone'}"
        )
        self.counts["orphans"] += 1
        self.counts["orphans completed"] += had_outline
        missing = set(job.nodes) - attempt.readable_on
        if had_outline and missing:
            raise Violation(f"agents had all they need for attempt {attempt.number}; {missing} have not published it")
        if not had_outline and attempt.parts:
            raise Violation(f"all trainers died before agents had the outline of attempt {attempt.number}")
        return None if had_outline else error

    def finish(self, job: Any, attempt: Attempt, saved: Saved, what: str, *, is_calm: bool) -> None:
        """Logs the end of a save. If nothing disturbed it, checks that it was acknowledged."""
        killed = self.cluster.settle_kill()
        self.counts["saves"] += 1
        self.counts["calm"] += is_calm
        self.counts["kills"] += killed is not None
        self.counts["acknowledged"] += saved.error is None
        who = "" if killed is None else f"; hit: {'agent' if killed.is_agent else 'rank'} of node {killed.node}"
        how = "acknowledged" if saved.error is None else f"{type(saved.error).__name__}"
        self.say(
            f"save {attempt.checkpoint_id} (attempt {attempt.number}) by nodes {job.nodes}{what}: {how}{who}"
            + (f": {saved.error!s:.300}" if saved.error else "")
        )
        if job.is_dead and job is self.job:
            self.job = None
        self.learn()
        if saved.error is None:
            for node in set(job.nodes) & attempt.readable_on:
                self.knows[node] = max(self.knows[node], attempt.number)
            if is_calm:
                if job.policy.ack != "local" or self.hands_over:
                    self.oracle.check_copies(attempt, len(set(job.nodes)))
                self.oracle.check_goes_on(attempt)
        elif is_calm:
            raise Violation(f"a save that nothing disturbed failed: {saved.error!r}")
        elif isinstance(saved.error, ReplicatedCkptError) and killed is None:
            raise Violation(f"a save failed outside of DCP's steps: {saved.error!r}")

    def load(
        self, group: Sequence[int], checkpoint_id: str, readers: int = 9, *, with_bucket: bool = False
    ) -> int | None:
        """Loads on these nodes. Returns the attempt that was loaded, or None if the load reported the checkpoint as
        lost. Wrong bytes are a Violation.
        """
        job = self.backend.job(self.cluster, group, self.policy)
        try:
            return self.load_in(job, checkpoint_id, readers, with_bucket=with_bucket)
        finally:
            job.end()

    def load_in(self, job: Any, checkpoint_id: str, readers: int, *, with_bucket: bool = False) -> int | None:
        """Like `load`, but with the running job."""
        group = job.nodes
        self.counts["loads"] += 1
        try:
            loaded = job.load(checkpoint_id, readers, with_bucket=with_bucket)
        except (ShardLost, CheckpointNotFound, MetadataUnsafe, ManifestInvalid, CheckpointAmbiguous) as exc:
            self.say(f"load {checkpoint_id} on nodes {list(group)}: {type(exc).__name__}: {exc.message}")
            return None
        except RendezvousFailed as exc:
            raise Violation(f"a load did not end: {exc}") from exc
        attempts = {attempt for attempt, _ in loaded}
        where = " or the bucket" if with_bucket else ""
        self.say(f"load {checkpoint_id} on nodes {list(group)}{where}: attempt {sorted(attempts)}")
        if len(attempts) != 1:
            raise Violation(f"the ranks of one load got different attempts: {attempts}")
        for attempt, state in loaded:
            self.oracle.check_found(checkpoint_id, attempt, state)
        known = [a.number for a in self.oracle.attempts if a.run == MAIN and a.readable_on & set(group)]
        for node in group:
            self.knows[node] = max(self.knows[node], max(known, default=0))
        return int(attempts.pop())

    def introduce(self) -> None:
        """Runs a load on all reachable nodes, so that they learn of each other and of the newest checkpoint."""
        group = self.up()
        if group:
            self.load(group, "latest", readers=1)

    def collect_slow(self) -> None:
        """Collects slow saves that have ended because another operation had to wait for them."""
        for slow in [slow for slow in self.slow if slow.operation.is_over]:
            self.go_on(slow)
        for load in [load for load in self.slow_loads if load.operation.is_over]:
            self.read_on(load)

    def finish_step(self) -> None:
        """Called after each step. Checks the operations that have ended, and lets agents do the work that they were
        woken for.
        """
        self.collect_slow()
        self.oracle.look()
        self.learn()
        if self.random.random() < 0.7:
            self.cluster.background()

    def read_on(self, load: SlowLoad) -> None:
        """A paused load reads the checkpoint that it had chosen. That checkpoint must not be removed during the load."""
        self.slow_loads.remove(load)
        if not load.operation.is_over:
            self.cluster.resume(load.operation)
        load.job.end()
        is_kept = self.cluster.now() - load.found_at < PIN_S
        error, is_due = load.operation.error, is_kept and load.disturbed_before == self.disturbances
        self.say(f"load {load.checkpoint_id} on nodes {load.nodes}, which had paused: {error or 'done'!s:.300}")
        if error is None:
            for attempt, state in load.operation.result:
                self.oracle.check_found(load.checkpoint_id, attempt, state)
        elif not isinstance(error, ReplicatedCkptError | Killed):
            raise error
        later = self.oracle.attempts[load.attempts :]
        if error and is_due and not any(found.checkpoint_id == load.checkpoint_id for found in later):
            raise Violation(f"{load.checkpoint_id} was removed while it was loaded: {error}") from error

    def end_all_slow(self) -> None:
        """Runs every paused operation to its end."""
        while self.slow:
            self.go_on(self.slow[0])
        while self.slow_loads:
            self.read_on(self.slow_loads[0])

    def go_on(self, slow: SlowSave) -> None:
        """Runs a paused save to its end."""
        self.slow.remove(slow)
        if slow.operation.paused_at == BEFORE_OPENING:
            self.oracle.go_on(slow.attempt, slow.job.nodes)
        if not slow.operation.is_over:
            self.cluster.resume(slow.operation)
        self.end_slow(slow)

    def end_slow(self, slow: SlowSave) -> None:
        if slow.operation.error is not None:
            raise slow.operation.error
        others = [
            found for found in self.oracle.of_id(slow.attempt.checkpoint_id) if found.number > slow.attempt.number
        ]
        is_calm = slow.is_calm and slow.disturbed_before == self.disturbances and not others
        what = f", which had paused at {slow.operation.paused_at}"
        self.finish(slow.job, slow.attempt, slow.operation.result, what, is_calm=is_calm)
        if slow.job is not self.job:
            slow.job.end()


__all__ = ["SIMULATION", "Backend", "Course", "Killed", "SlowSave"]
