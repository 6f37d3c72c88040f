"""The timing of a save or load, from the reports of its ranks: the rank or node that held it up, and a Chrome trace."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import median
from typing import Any

from replicated_ckpt.core.rank_report import RankReport, Span

OWN_PHASES = {"save": ("prepare", "register", "serialise", "write", "fsync"), "load": ("read",)}
"""The phases that a rank spends on its own work. In `plan` and `commit` it waits for the others."""
_COPY_PHASE = {"save": "send", "load": "read"}
_ASKED = ("open", "publish")
LATE = "plan"
_RATIO, _SHARE, _LEAST_S = 1.5, 0.05, 0.05


@dataclass(frozen=True)
class Slowest:
    """A rank that stands out, or a node if `rank` is None. Its `phase` took `seconds`, those of the others `median_s`.

    `waiting_rank`: the rank that waited for the node. With the phase LATE, the rank began `seconds` after the others.
    """

    node_id: str
    rank: int | None
    phase: str
    seconds: float
    median_s: float
    waiting_rank: int | None = None

    @property
    def excess_s(self) -> float:
        return self.seconds - self.median_s

    def describe(self, name_by_node: Mapping[str, str]) -> str:
        """One line, for people."""
        node = name_by_node.get(self.node_id, self.node_id)
        who = node if self.rank is None else f"rank {self.rank} on {node}"
        if self.phase == LATE:
            return f"slowest: {who}, which began {self.seconds:.2f} s after the others"
        waited = "" if self.waiting_rank is None else f" (rank {self.waiting_rank} waited)"
        return f"slowest: {who}, {self.phase}{waited}, {self.seconds:.2f} s; median of the others {self.median_s:.2f} s"


def find_slowest(reports: Sequence[RankReport]) -> Slowest | None:
    """The rank or node that exceeds the others by the most time. None: none stands out, or there is only one rank.

    `reports`: one of each rank, of one save or load. A node stands out if all of its ranks do, or if a rank waited for it
    although that rank did its own work as fast as the others.
    """
    longest_s = max((one.seconds for one in reports), default=0.0)

    def stands_out(one: Slowest) -> bool:
        return one.excess_s > max(_LEAST_S, _SHARE * longest_s, (_RATIO - 1) * one.median_s)

    nodes = list(filter(stands_out, _compare_nodes(reports)))
    # If all ranks of a node stand out, the node is named instead of them.
    whole = {one.node_id for one in nodes}
    ranks = [one for one in filter(stands_out, _compare_ranks(reports)) if one.node_id not in whole]
    waits = [_find_cause(one, [*nodes, *ranks], reports) for one in filter(stands_out, _compare_waits(reports))]
    late = filter(stands_out, _compare_begins(reports))
    return max((*nodes, *ranks, *waits, *late), key=lambda one: one.excess_s, default=None)


def _compare_ranks(reports: Sequence[RankReport]) -> Iterator[Slowest]:
    """Each rank's own phases, compared with the other ranks."""
    for phase in OWN_PHASES[reports[0].kind] if reports else ():
        spent = [_own_seconds(one, phase) for one in reports]
        for one, seconds, others_s in zip(reports, spent, _medians_of_others(spent), strict=True):
            yield Slowest(one.node_id, one.rank, phase, seconds, others_s)


def _medians_of_others(values: Sequence[float]) -> list[float]:
    """For each value the median of all others; itself, if there are none."""
    # Sorted once: a job may have 10,000 ranks.
    ordered, last = sorted(values), len(values) - 2
    if last < 0:
        return list(values)
    places = [bisect_left(ordered, value) for value in values]
    return [sum(ordered[at + (at >= place)] for at in (last // 2, (last + 1) // 2)) / 2 for place in places]


def _compare_nodes(reports: Sequence[RankReport]) -> Iterator[Slowest]:
    """Each node with several ranks: the fastest of them, compared with the ranks of other nodes."""
    for phase in OWN_PHASES[reports[0].kind] if reports else ():
        spent_by_node: dict[str, list[float]] = {}
        for one in reports:
            spent_by_node.setdefault(one.node_id, []).append(_own_seconds(one, phase))
        fastest = min(min(spent) for spent in spent_by_node.values())
        for node, spent in spent_by_node.items():
            # Checked first, and false for most nodes: a comparison goes through all ranks.
            if len(spent) > 1 and len(spent_by_node) > 1 and min(spent) > _RATIO * fastest:
                others = chain.from_iterable(each for other, each in spent_by_node.items() if other != node)
                yield Slowest(node, None, phase, min(spent), median(others))


def _own_seconds(one: RankReport, phase: str) -> float:
    """Seconds that a rank spent on a phase. In a load, reads from other nodes do not count."""
    if one.kind == "load":
        waited = sum(spent for node, spent in one.seconds_by_node.items() if node != one.node_id)
        return max(0.0, one.phases.get(phase, 0.0) - waited)
    # The phases within `plan` are only in the spans.
    return one.phases.get(phase) or sum(span.busy_s for span in one.spans if span.phase == phase)


def _compare_waits(reports: Sequence[RankReport]) -> Iterator[Slowest]:
    """Each wait of a rank for a node, compared with the other waits of that phase."""
    waits_by_phase: dict[str, list[tuple[RankReport, str, float]]] = {}
    for one in reports:
        for phase, node, spent in _list_waits(one):
            waits_by_phase.setdefault(phase, []).append((one, node, spent))
    for phase, waits in waits_by_phase.items():
        # A rank that loads only from its own disk waits for no node: it counts with 0 s.
        idle = len(reports) - len({one.rank for one, _, _ in waits}) if phase == "read" else 0
        medians = _medians_of_others([*(spent for _, _, spent in waits), *[0.0] * idle])
        for (one, node, spent), others_s in zip(waits, medians, strict=False):
            yield Slowest(node, None, phase, spent, others_s, one.rank)


def _list_waits(one: RankReport) -> Iterator[tuple[str, str, float]]:
    """The phase, the node and the seconds of each wait of a rank for a node."""
    for node, spent in one.seconds_by_node.items():
        if node != one.node_id:
            yield _COPY_PHASE[one.kind], node, spent
    for span in one.spans:
        if span.phase in _ASKED:
            yield span.phase, span.node, span.busy_s


def _find_cause(wait: Slowest, slow: Sequence[Slowest], reports: Sequence[RankReport]) -> Slowest:
    """The cause of a long wait for a node: the node, or the rank that waited. `slow`: those whose own work was slow."""
    at_node = [one for one in slow if one.node_id == wait.node_id]
    # If the node's own work is slow, too, that explains the wait.
    if at_node and (worst := max(at_node, key=lambda one: one.excess_s)).excess_s > wait.excess_s / 4:
        return worst
    (waiting,) = (one for one in reports if one.rank == wait.waiting_rank)
    is_slow_itself = any(one.node_id == waiting.node_id and one.rank in (None, waiting.rank) for one in slow)
    # A rank that does its own work slowly also sends slowly, even to a fast node.
    if is_slow_itself and wait.phase not in _ASKED:
        return Slowest(waiting.node_id, waiting.rank, wait.phase, wait.seconds, wait.median_s)
    return wait


def _compare_begins(reports: Sequence[RankReport]) -> Iterator[Slowest]:
    """The rank that began last: all others wait for it in `plan`, and it waits for none."""
    waited = [one.phases.get(LATE, 0.0) for one in reports]
    least_s = min(waited, default=0.0)
    for one, own_s, others_s in zip(reports, waited, _medians_of_others(waited), strict=True):
        if own_s == least_s:
            yield Slowest(one.node_id, one.rank, LATE, others_s - own_s, 0.0)


_GAP = 0.1
"""Gap in the picture between a save and the load after it, as a share of the first's duration."""
_Event = dict[str, Any]


def make_trace(operations: Iterable[Sequence[RankReport]], name_by_node: Mapping[str, str]) -> dict[str, Any]:
    """The trace of a save and a load, each given by the reports of its ranks. Ranks without spans are left out.

    Each node is a process of the trace, each rank and agent a thread. Overlapping work of one rank gets further threads.
    Clocks of nodes may differ: the ranks are aligned at the end of `plan`, which DCP ends on all ranks at once. The second
    operation is drawn right after the first, whatever time lay between them.
    """
    tracks = _Tracks(name_by_node)
    events: list[_Event] = []
    for reports in operations:
        begin_s = (1 + _GAP) * max((event["ts"] + event["dur"] for event in events), default=0) / 1e6
        drawn = [one for one in reports if one.spans]
        longest_s = max((_plan_s(one) for one in drawn), default=0.0)
        slices = [each for one in drawn for each in _list_slices(one, begin_s + longest_s - _plan_s(one))]
        # Sorted by start, as `take` requires: an agent works for several ranks at once.
        events += [_draw(*each, tracks) for each in sorted(slices, key=lambda each: (each[2], -each[3]))]
    return {"displayTimeUnit": "ms", "traceEvents": [*tracks.describe(), *events]}


def _plan_s(one: RankReport) -> float:
    return one.phases.get("plan", 0.0)


def _list_slices(one: RankReport, began_s: float) -> Iterator[tuple[RankReport, Span | None, int, int]]:
    """The whole operation of a rank, and each span of it, with begin and end in microseconds."""
    for span, begin_s, end_s in ((None, 0.0, one.seconds), *((each, each.begin_s, each.end_s) for each in one.spans)):
        yield one, span, round((began_s + begin_s) * 1e6), round((began_s + end_s) * 1e6)


def _draw(one: RankReport, span: Span | None, begin_us: int, end_us: int, tracks: "_Tracks") -> _Event:
    rank = f"rank {one.rank}"
    is_by_agent = span is not None and span.by_agent
    pid, tid = tracks.take(one.node_id, "agent" if is_by_agent else rank, begin_us, end_us)
    args: dict[str, Any] = {f"bytes {name}": size for name, size in one.sizes.items()}
    if span is not None:
        args = {"busy_s": round(span.busy_s, 6)}
        args |= {"node": tracks.name(span.node)} if span.node else {}
        args |= {"for": rank} if is_by_agent else {}
    name = f"{one.kind} {one.checkpoint_id}" if span is None else span.phase
    where = {"pid": pid, "tid": tid, "ts": begin_us, "dur": end_us - begin_us}
    return {"name": name, "cat": one.kind, "ph": "X", **where, "args": args}


class _Tracks:
    """The processes and threads of a trace. Slices of one thread may contain each other, but not overlap otherwise."""

    def __init__(self, name_by_node: Mapping[str, str]) -> None:
        self._names = name_by_node
        self._pids: dict[str, int] = {}
        self._threads: dict[tuple[str, str], list[int]] = {}
        self._open: dict[int, list[int]] = {}
        """By thread, the ends of the slices that contain the next one."""

    def name(self, node: str) -> str:
        return self._names.get(node, node)

    def take(self, node: str, track: str, begin_us: int, end_us: int) -> tuple[int, int]:
        """The process, and a thread of it that can show this slice. Call it in the order in which slices begin."""
        pid = self._pids.setdefault(node, len(self._pids) + 1)
        threads = self._threads.setdefault((node, track), [])
        for thread in threads:
            ends = self._open[thread]
            while ends and ends[-1] <= begin_us:
                ends.pop()
            if not ends or end_us <= ends[-1]:
                break
        else:
            thread = len(self._open) + 1
            threads.append(thread)
        self._open.setdefault(thread, []).append(end_us)
        return pid, thread

    def describe(self) -> Iterator[_Event]:
        """The names of nodes, and of their ranks and agents."""
        for node, pid in self._pids.items():
            yield {"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": f"node {self.name(node)}"}}
        for (node, track), threads in self._threads.items():
            for number, thread in enumerate(threads, 1):
                name = track if number == 1 else f"{track} ({number})"
                where = {"pid": self._pids[node], "tid": thread}
                yield {"name": "thread_name", "ph": "M", **where, "args": {"name": name}}
