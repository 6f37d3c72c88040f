"""The trace of saves and loads for Perfetto."""

import json
from itertools import combinations
from typing import Any

from replicated_ckpt.core.rank_report import RankReport, Span
from replicated_ckpt.core.timing import make_trace

NAMES = {"a": "host-a", "b": "host-b"}


def saved(rank: int, node: str, plan_s: float, ended_unix_s: float) -> RankReport:
    """A rank's report: while the first shard is sent, the second is serialised and written, and the agent writes a
    third.
    """
    spans = (
        Span("plan", 0.0, plan_s, plan_s),
        Span("register", 0.1, 0.2, 0.1),
        Span("serialise", plan_s, plan_s + 0.1, 0.1),
        Span("send", plan_s, plan_s + 1.0, 0.9, node="b"),
        Span("serialise", plan_s + 0.1, plan_s + 0.2, 0.1),
        Span("write", plan_s + 0.1, plan_s + 0.5, 0.4),
        Span("write", plan_s, plan_s + 0.9, 0.8, by_agent=True),
        Span("commit", plan_s + 1.0, plan_s + 1.2, 0.2),
    )
    phases = {"plan": plan_s, "serialise": 0.2, "write": 1.2, "send": 0.9, "commit": 0.2}
    sizes = {"written": 7}
    return RankReport(
        "save", "step-1", "1" * 32, rank, "h", ended_unix_s, plan_s + 1.2, phases, sizes, node_id=node, spans=spans
    )


def drawn() -> tuple[list[dict[str, Any]], dict[tuple[int, int], str]]:
    """The slices, and the name of each thread with its process."""
    load_spans = (Span("plan", 0.0, 0.5, 0.5), Span("read", 0.5, 0.9, 0.4))
    load = RankReport("load", "step-1", "1" * 32, 0, "h", 9e9, 0.9, {"plan": 0.5}, node_id="a", spans=load_spans)
    # Node b's clock is an hour ahead, and its rank came late.
    saves = [saved(0, "a", 2.0, 1e9), saved(1, "b", 0.5, 1e9 + 3600), saved(2, "a", 1.9, 1e9)]
    events = json.loads(json.dumps(make_trace([saves, [load]], NAMES)))["traceEvents"]
    processes = {one["pid"]: one["args"]["name"] for one in events if one["name"] == "process_name"}
    threads = {
        (one["pid"], one["tid"]): f"{processes[one['pid']]}, {one['args']['name']}"
        for one in events
        if one["name"] == "thread_name"
    }
    return [one for one in events if one["ph"] == "X"], threads


def test_a_process_is_a_node_and_a_thread_a_rank_or_the_agent() -> None:
    """Each slice has its phase, times in microseconds, and arguments."""
    slices, threads = drawn()
    assert {name for name in threads.values() if "(" not in name} == {
        "node host-a, rank 0",
        "node host-a, rank 2",
        "node host-a, agent",
        "node host-b, rank 1",
        "node host-b, agent",
    }
    (whole,) = (one for one in slices if one["name"] == "save step-1" and one["ts"] == 0)
    assert (whole["ts"], whole["dur"], whole["args"]) == (0, 3_200_000, {"bytes written": 7})
    send, _ = (one for one in slices if one["name"] == "send" and one["pid"] == 1)
    assert (send["ts"], send["dur"]) == (2_000_000, 1_000_000)
    assert send["args"] == {"busy_s": 0.9, "node": "host-b"}
    by_agent = [one for one in slices if threads[one["pid"], one["tid"]].startswith("node host-a, agent")]
    assert [(one["name"], one["args"]["for"]) for one in by_agent] == [("write", "rank 0"), ("write", "rank 2")]


def test_ranks_are_aligned_whatever_their_clocks_show() -> None:
    """Planning ends at the same time on all ranks, and a late rank begins later. The load follows the save."""
    slices, _ = drawn()
    ends = {one["ts"] + one["dur"] for one in slices if one["name"] == "plan" and one["cat"] == "save"}
    assert ends == {2_000_000}
    (late,) = (one for one in slices if one["name"] == "plan" and one["pid"] == 2)  # the only rank of node b
    assert late["ts"] == 1_500_000
    saves, loads = ([one for one in slices if one["cat"] == kind] for kind in ("save", "load"))
    end_of_save = max(one["ts"] + one["dur"] for one in saves)
    assert end_of_save < min(one["ts"] for one in loads) < 2 * end_of_save


def test_slices_of_one_thread_contain_each_other_or_lie_apart() -> None:
    """Slices of one thread do not overlap partly, because Perfetto drops such slices."""
    slices, _ = drawn()
    for one, other in combinations(slices, 2):
        if (one["pid"], one["tid"]) == (other["pid"], other["tid"]):
            first, second = sorted((one, other), key=lambda each: (each["ts"], -each["dur"]))
            end = first["ts"] + first["dur"]
            assert second["ts"] >= end or second["ts"] + second["dur"] <= end, (first, second)
