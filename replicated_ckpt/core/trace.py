"""A Chrome trace of a save and a load, which Perfetto opens: nodes, their ranks and agents, and the phases of each."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from replicated_ckpt.core.rank_report import RankReport, Span

_GAP = 0.1
"""Between a save and a load that are drawn side by side, as a share of the first."""
_Event = dict[str, Any]


def make_trace(operations: Iterable[Sequence[RankReport]], name_by_node: Mapping[str, str]) -> dict[str, Any]:
    """The trace of a save and a load, each given by the reports of its ranks. Ranks without spans are left out.

    A process of the trace is a node, a thread a rank or the node's agent. Work of one rank that overlaps gets further
    threads. Clocks of nodes may differ: the ranks are aligned at the end of `plan`, which DCP ends on all ranks at once.
    What follows the first operation is drawn right after it, whatever time lay between them.
    """
    tracks = _Tracks(name_by_node)
    events: list[_Event] = []
    for reports in operations:
        begin_s = (1 + _GAP) * max((event["ts"] + event["dur"] for event in events), default=0) / 1e6
        drawn = [one for one in reports if one.spans]
        longest_s = max((_plan_s(one) for one in drawn), default=0.0)
        slices = [each for one in drawn for each in _list_slices(one, begin_s + longest_s - _plan_s(one))]
        # In the order of their begins: the node's agent works for several ranks at once.
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
    """The processes and threads of a trace. Slices of one thread may contain each other, and not overlap otherwise."""

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
