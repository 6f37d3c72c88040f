"""`find_slowest` names the slow rank or node in the reports of a save or load, and none if all are alike."""

from dataclasses import replace
from random import Random

import pytest

from replicated_ckpt.core.rank_report import RankReport, Span
from replicated_ckpt.core.timing import LATE, Slowest, find_slowest

RUNS = 100


class Job:
    """Reports of ranks whose nodes each send copies to the next node, with times of a save of some gigabytes."""

    def __init__(self, seed: int, kind: str) -> None:
        self.random, self.kind = Random(seed), kind
        self.nodes = self.random.randint(2, 9)
        self.per_node = self.random.choice((1, 2, 8))
        self.world = self.nodes * self.per_node

    def node(self, rank: int) -> str:
        return f"node-{rank // self.per_node}"

    def next_node(self, rank: int) -> str:
        return f"node-{(rank // self.per_node + 1) % self.nodes}"

    def noisy(self, seconds: float) -> float:
        return seconds * self.random.uniform(0.85, 1.15)

    def run(self, where: str = "", phase: str = "", factor: float = 3.0) -> list[RankReport]:
        """The reports if `phase` takes `factor` times as long on the rank or node `where`."""

        def spend(rank: int, name: str, usual_s: float) -> float:
            at = {f"rank {rank}", self.node(rank)}
            return self.noisy(usual_s) * (factor if where in at and phase in (name, "all") else 1.0)

        return [self._report(rank, where, phase, factor, spend) for rank in range(self.world)]

    def _report(self, rank: int, where: str, phase: str, factor: float, spend: object) -> RankReport:
        assert callable(spend)
        late = 2.0 if (where, phase) == (f"rank {rank}", LATE) else 0.0
        plan = 2.5 + self.noisy(0.02) - late
        named = ("step-1", "1" * 32, rank, "host", 1e9)
        if self.kind == "load":
            read, far = spend(rank, "read", 1.5), 0.0
            spans: tuple[Span, ...] = ()
            if (
                where == "node-0" and phase == "serve" and self.node(rank) == "node-1"
            ):  # a new node that loads from node-0
                far = self.noisy(1.5) * factor
                read += far
            by_node = {self.node(rank): read - far, **({"node-0": far} if far else {})}
            phases = {"plan": plan, "read": read}
            return RankReport("load", *named, plan + read, phases, node_id=self.node(rank), seconds_by_node=by_node)
        phases = {"plan": plan, **{name: spend(rank, name, s) for name, s in USUAL_S.items()}}
        slow_receiver = where == self.next_node(rank) and phase in ("receive", "disk")
        phases["send"] *= factor if slow_receiver else 1.0
        if phase == "disk" and where == self.node(rank):
            phases["write"], phases["fsync"] = phases["write"] * factor, phases["fsync"] * factor
        asked = [
            Span(name, 0.0, 1.0, self.noisy(0.3) * (factor if (where, phase) == (node, name) else 1.0), node)
            for name in ("open", "publish")
            for node in (f"node-{number}" for number in range(self.nodes))
        ]
        spans = tuple(asked) if rank == 0 else ()
        to = {self.next_node(rank): phases["send"]}
        end = plan + max(phases["send"], phases["write"] + phases["fsync"]) + 0.5
        return RankReport("save", *named, end, phases, node_id=self.node(rank), seconds_by_node=to, spans=spans)


USUAL_S = {"serialise": 0.6, "write": 1.2, "send": 1.4, "fsync": 0.4}


def names(found: Slowest | None, where: str, job: Job) -> bool:
    """Whether `found` is the rank, the node, the only rank of the node, or the node that the rank waited for."""
    if found is None:
        return False
    if where.startswith("node"):
        return found.node_id == where and (found.rank is None or job.per_node == 1)
    return found.rank == int(where.removeprefix("rank "))


SAVES = [
    *(("rank", phase) for phase in ("serialise", "write", "fsync", "all", LATE)),
    *(("node", phase) for phase in ("write", "disk", "receive", "open", "publish")),
]
LOADS = [("rank", "read"), ("rank", LATE), ("node", "read"), ("node", "serve")]


@pytest.mark.parametrize(
    ("kind", "what", "phase"), [*(("save", *case) for case in SAVES), *(("load", *case) for case in LOADS)]
)
def test_the_slow_rank_or_node_is_named_in_each_of_100_runs(kind: str, what: str, phase: str) -> None:
    """A rank is slow in one phase or in all, or starts late; or a node's disk, network or agent is slow."""
    for seed in range(RUNS):
        job = Job(seed, kind)
        count = job.nodes if what == "node" else job.world
        where = f"{what} {job.random.randrange(count)}" if what == "rank" else f"node-{job.random.randrange(count)}"
        where = "node-0" if phase == "serve" else where
        found = find_slowest(job.run(where, phase))
        assert names(found, where, job), (seed, where, phase, found)
        expected = {"disk": ("write", "fsync"), "receive": ("send",), "serve": ("read",), "all": tuple(USUAL_S)}
        assert found is not None
        assert found.phase in expected.get(phase, (phase,))


@pytest.mark.parametrize("kind", ["save", "load"])
def test_none_is_named_if_none_is_slow(kind: str) -> None:
    """Times that differ by a third are usual, and a single rank is not compared: no rank is named."""
    for seed in range(RUNS):
        job = Job(seed, kind)
        reports = job.run()
        assert find_slowest(reports) is None, seed
        assert find_slowest(reports[:1]) is None
    assert find_slowest([]) is None


def test_the_line_names_the_rank_the_phase_and_the_others() -> None:
    """The line has the host's name, and for a slow node the rank that waited."""
    job = Job(1, "save")
    found = find_slowest(job.run("rank 1", "write"))
    assert found is not None
    line = replace(found, seconds=2.4, median_s=0.4).describe({found.node_id: "host-b"})
    assert line == "slowest: rank 1 on host-b, write, 2.40 s; median of the others 0.40 s"
    received = find_slowest(job.run("node-1", "receive"))
    assert received is not None
    assert f"slowest: node-1, send (rank {received.waiting_rank} waited), " in received.describe({})
    late = find_slowest(job.run("rank 2", LATE))
    assert late is not None
    assert "slowest: rank 2 on " in late.describe({})
    assert "which began 2.0" in late.describe({})
