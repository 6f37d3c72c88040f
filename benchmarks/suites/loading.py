"""The suite of loads by new processes: all shards local, a node lost, and a node replaced by a blank one."""

import contextlib
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.options import Options
from benchmarks.rank import rounds
from benchmarks.suites.limits import limits_of
from benchmarks.suites.results import Row, Sample
from benchmarks.suites.saving import STOCK, Case
from benchmarks.suites.setup import Setup, cluster_on, setups
from tests.harness.cluster import ByRank, Call, Cluster, call
from tests.harness.launch import T

SHARE = 0.22  # share of the time of all suites
ALL_LOCAL = "ours, all local"
STARTS_AGENTS = "ours, all local, agents start with it"
SHRUNK = "ours, a node lost, the others load"
REPLACED = "ours, a node lost and replaced by a blank one"
_SAVED_BY_STOCK, _SAVED_BY_OURS = "stock", "ours"
_COPIES = 2
_LAUNCH_TIMEOUT_S = 240.0


def load_suite(options: Options) -> list[Row]:
    rows: list[Row] = []
    for setup in setups(options):
        # Both checkpoints and the file of the probes.
        with cluster_on(options, setup, options.size_bytes * (_COPIES + 2)) as cluster:
            loads = _Loads(cluster, setup, options.size_bytes)
            loads.save()
            deadline = time.monotonic() + options.seconds * SHARE / len(setups(options))
            for number in range(options.rounds):
                if number and time.monotonic() > deadline:
                    break
                loads.one_round(number)
            rows += loads.rows()
    return rows


@dataclass
class _Loads:
    cluster: Cluster
    setup: Setup
    size_bytes: int
    state_bytes: int = 0
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    probes: dict[str, list[Sample]] = field(default_factory=dict)
    remote_bytes: dict[str, int] = field(default_factory=dict)

    def save(self) -> None:
        cases = [_case(_SAVED_BY_STOCK, "stock"), _case(_SAVED_BY_OURS, "ours")]
        step = call(rounds.save_once, kind="fsdp2", size_bytes=self.size_bytes, cases=cases)
        self.state_bytes = self._run(step, range(self.setup.nodes)).agreed()

    def one_round(self, number: int) -> None:
        """Each of the four worlds loads once. Stock loads in the world with all nodes and running agents."""
        everyone, lost = range(self.setup.nodes), self.setup.nodes - 1
        self._serve(everyone)
        self._load([_case(STOCK, "stock", _SAVED_BY_STOCK), _case(ALL_LOCAL, "ours", _SAVED_BY_OURS)], number, everyone)
        self._serve(())
        self._load([_case(STARTS_AGENTS, "ours", _SAVED_BY_OURS)], number, everyone)
        with self._lost(lost):
            self._serve(range(lost))
            self._load([_case(SHRUNK, "ours", _SAVED_BY_OURS)], number, range(lost))
        with self._lost(lost):
            self._serve(everyone)
            self._load([_case(REPLACED, "ours", _SAVED_BY_OURS)], number, everyone)

    def _serve(self, nodes: Iterable[int]) -> None:
        """Starts the agents of these nodes, as a service would, and stops all others."""
        self.cluster.stop_agents()
        self.cluster.start_agents({node: {} for node in nodes})

    def _load(self, cases: Sequence[Case], number: int, nodes: range) -> None:
        is_whole = len(nodes) == self.setup.nodes and len(cases) > 1
        step = call(
            rounds.load_saved,
            kind="fsdp2",
            size_bytes=self.size_bytes,
            cases=cases,
            order=number,
            is_disk=self.setup.is_disk,
            is_probed=is_whole,
        )
        by_rank = self._run(step, nodes)
        for name, taken in by_rank[0]["load"].items():
            self.samples.setdefault(name, []).extend(taken)
            self.remote_bytes[name] = sum(rank["remote_bytes"][name] for rank in by_rank)
        for name, taken in by_rank[0]["probe"].items():
            self.probes.setdefault(name, []).extend(taken)

    def _run(self, step: Call[T], nodes: range) -> ByRank[T]:
        return self.cluster.run(step, nodes=nodes, ranks=self.setup.ranks, timeout_s=_LAUNCH_TIMEOUT_S)

    @contextlib.contextmanager
    def _lost(self, index: int) -> Iterator[None]:
        """The node has no agent and no data. Afterwards its old data returns, and new data is deleted."""
        node = self.cluster.nodes[index]
        node.kill_agent()
        aside = node.disk.with_suffix(".aside")
        node.disk.rename(aside)
        node.disk.mkdir()
        try:
            yield
        finally:
            node.kill_agent()
            shutil.rmtree(node.disk)
            aside.rename(node.disk)

    def rows(self) -> list[Row]:
        limits, rows = limits_of(self.probes), []
        for name in (STOCK, ALL_LOCAL, STARTS_AGENTS, SHRUNK, REPLACED):
            fraction = self.remote_bytes[name] / self.state_bytes
            note = f"{fraction:.0%} from peers" if fraction else ""
            limit_s = limits.load_s(fraction)
            rows.append(self._row("load", name, self.samples[name], limit_s, note))
        return rows + [self._row("probe", name, samples, None, "") for name, samples in self.probes.items()]

    def _row(self, work: Any, name: str, samples: Sequence[Sample], limit_s: float | None, note: str) -> Row:
        return Row("load", self.setup.name, work, name, STOCK, self.state_bytes, samples, limit_s, note=note)


def _case(name: str, way: str, saved_by: str = "") -> Case:
    options = {"copies": _COPIES} if way == "ours" else {}
    return {"name": name, "way": way, "options": options, "saved_by": saved_by}
