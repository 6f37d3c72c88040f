"""The end of a load: each rank sends its report or its error to the coordinator, and gets the errors of the others.

DCP sends every outcome to every rank, so the number of messages grows with the square of the ranks. Here only failures
go to all ranks.
"""

import pickle
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from traceback import StackSummary
from typing import Any

from replicated_ckpt.dcp.c10d.picklable_error import dump, make_sendable
from replicated_ckpt.dcp.c10d.waiting import describe_ended
from replicated_ckpt.dcp.load.load_report import LoadReport
from replicated_ckpt.dcp.runtime.torch_private import Collectives
from replicated_ckpt.errors import RankFailed
from replicated_ckpt.wording import plural

FAILURES_MAX = 32
"""How many failures all ranks get as they were raised. Of further failures, they get only the ranks."""


def exchange_outcomes(
    collectives: Collectives, own: object, report: LoadReport | None
) -> tuple[list[Any], list[LoadReport]]:
    """Ends the load on this rank. Returns the outcome of each rank as DCP expects it: None, or its failure.

    `own`: None, or this rank's failure, wrapped as DCP does. At the coordinator of a successful load this also returns
    all ranks' reports, in order.
    """
    own = _as_sent(own)
    told = collectives.gather_object(own if report is None or own is not None else report.as_dict())
    chosen = None if told is None else _choose({rank: one for rank, one in enumerate(told) if isinstance(one, tuple)})
    failures, others = collectives.broadcast_object(chosen)
    rank = collectives.get_rank()
    outcomes = [failures.get(each) for each in range(collectives.get_world_size())]
    left = [each for each in others if each != rank]
    if left:
        what = f"{plural(len(left), 'more rank')} failed, too: {', '.join(_intervals(left))}."
        outcomes[left[0]] = RankFailed(what), StackSummary()
    # This rank's own failure as it was raised, with its cause and notes; never a summary.
    outcomes[rank] = own
    reports = [] if told is None or failures else [LoadReport.from_dict(one) for one in told if one is not None]
    return outcomes, reports


def outcomes_without(lost: Sequence[int], collectives: Collectives, own: object) -> list[Any]:
    """The outcome of each rank as DCP expects it, if some ranks have died. No collective is begun, because it would
    hang.
    """
    outcomes: list[Any] = [None] * collectives.get_world_size()
    outcomes[collectives.get_rank()] = _as_sent(own)
    for rank in lost:
        outcomes[rank] = describe_ended([rank]), StackSummary()
    return outcomes


def _choose(failures: Mapping[int, Any]) -> tuple[dict[int, Any], Sequence[int]]:
    """The failures that are sent to all ranks, a few of each class of error, and the other failed ranks."""
    seen: Counter[str] = Counter()
    order: list[tuple[int, int]] = []
    for rank, (error, _) in failures.items():
        kind = type(error).__name__
        # A few of each class: a thousand ranks that fail alike must not hide one rank that fails differently.
        order.append((seen[kind], rank))
        seen[kind] += 1
    chosen = {rank for _, rank in sorted(order)[:FAILURES_MAX]}
    return {rank: one for rank, one in failures.items() if rank in chosen}, sorted(failures.keys() - chosen)


def _as_sent(own: object) -> object:
    """A failure as it is sent to other ranks. A failure that cannot be pickled is replaced by a description.

    The result has no traceback objects, because their frames would keep the reader and the state dict in memory.
    """
    if not isinstance(own, tuple):
        return own
    copied: object = pickle.loads(dump(make_sendable(own)))  # noqa: S301 - of this very process
    return copied


def _intervals(ranks: Iterable[int]) -> list[str]:
    """Ranks in order as intervals: "3", "5-9"."""
    found: list[list[int]] = []
    for rank in ranks:
        if found and found[-1][-1] == rank - 1:
            found[-1][1:] = [rank]
        else:
            found.append([rank])
    return ["-".join(map(str, one)) for one in found]
