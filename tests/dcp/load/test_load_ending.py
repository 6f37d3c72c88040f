"""The end of a load: rank 0 gets all reports, every rank learns who failed, and nothing else is sent."""

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from traceback import FrameSummary, StackSummary, extract_tb
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from replicated_ckpt import LoadReport
from replicated_ckpt.dcp.c10d.watched_group import WatchedGroup
from replicated_ckpt.dcp.load.ending import FAILURES_MAX, exchange_outcomes
from replicated_ckpt.errors import RankFailed, ShardLost
from tests.gloo import group_of_one

REPORT = LoadReport(
    "step-1", "a" * 32, 1 << 30, 0, 0, 100, 1.5, (), 0, 0, "gpu-0123.cluster", {"plan": 0.5, "read": 1.0}
)


class Ranks:
    """Collectives of ranks that are threads. They pickle as DCP's do, and count the bytes sent to each rank."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.gathered: list[bytes] = [b""] * size
        self.told = b""
        self.barrier = threading.Barrier(size, timeout=30)

    def end(self, owns: list[object]) -> list[tuple[list[Any], list[LoadReport]]]:
        """The outcomes and reports that each rank gets. `owns`: None, or the rank's failure."""
        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(self._end, range(self.size), owns))

    def _end(self, rank: int, own: object) -> tuple[list[Any], list[LoadReport]]:
        report = LoadReport.from_dict({**REPORT.as_dict(), "rank": rank}) if own is None else None
        return exchange_outcomes(_Rank(self, rank), own, report)


class _Rank:
    def __init__(self, ranks: Ranks, rank: int) -> None:
        self._ranks = ranks
        self._rank = rank

    def get_rank(self) -> int:
        return self._rank

    def get_world_size(self) -> int:
        return self._ranks.size

    def gather_object(self, value: Any, /) -> list[Any] | None:
        self._ranks.gathered[self._rank] = pickle.dumps(value)
        self._ranks.barrier.wait()
        return [pickle.loads(each) for each in self._ranks.gathered] if self._rank == 0 else None

    def broadcast_object(self, value: Any, /) -> Any:
        if self._rank == 0:
            self._ranks.told = pickle.dumps(value)
        self._ranks.barrier.wait()
        return pickle.loads(self._ranks.told)


class _Frame(FrameSummary):
    """A frame as in Python 3.14: it holds its code, which cannot be pickled."""

    __slots__ = ("_code",)

    def __init__(self, frame: FrameSummary) -> None:
        super().__init__(frame.filename, frame.lineno, frame.name)
        self._code = _raised.__code__


def failed(error: BaseException) -> tuple[BaseException, StackSummary]:
    """A failure as DCP on torch 2.11 keeps it."""
    return error, StackSummary.from_list(list(map(_Frame, extract_tb(_raised(error).__traceback__))))


def _raised(error: BaseException) -> BaseException:
    with pytest.raises(type(error)) as caught:
        raise error
    return caught.value


@pytest.mark.parametrize("size", [1, 2, 64])
def test_a_load_that_succeeds_sends_each_rank_a_few_bytes(size: int) -> None:
    """A successful load sends each rank under 32 bytes, for any number of ranks. Rank 0 gets all reports in rank order."""
    ranks = Ranks(size)
    (first, reports), *others = ranks.end([None] * size)
    assert first == [None] * size
    assert [one.rank for one in reports] == list(range(size))
    assert others == [([None] * size, [])] * (size - 1)
    assert len(ranks.told) < 32
    assert max(map(len, ranks.gathered)) < 400


def test_every_rank_learns_of_each_failure_as_it_was_raised() -> None:
    """Every rank gets each failure with its class, message and frames. A failed load has no reports."""
    lost, plan = ShardLost("step-1", {"__1_0.distcp": "node a"}, ["node a: gone"]), ValueError("the plan")
    for outcomes, reports in Ranks(4).end([None, failed(lost), None, failed(plan)]):
        assert [type(one) for one in outcomes] == [type(None), tuple, type(None), tuple]
        assert (str(outcomes[1][0]), type(outcomes[1][0])) == (str(lost), ShardLost)
        assert (str(outcomes[3][0]), type(outcomes[3][0])) == ("the plan", ValueError)
        assert [frame.name for frame in outcomes[1][1]] == ["_raised"]
        assert reports == []
        assert outcomes[1][0].__traceback__ is None, "the frames would keep the state dict alive"


def test_an_error_that_cannot_be_pickled_is_sent_as_text() -> None:
    """An error that cannot be pickled arrives as RankFailed with its class and message. Otherwise the other ranks would
    wait forever.
    """
    error = type("Local", (RuntimeError,), {})("the plan")
    for outcomes, _ in Ranks(2).end([None, failed(error)]):
        assert isinstance(outcomes[1][0], RankFailed)
        assert "Local: the plan" in str(outcomes[1][0])


def test_the_group_of_a_save_sends_a_failure_too() -> None:
    """The group of a save sends a failure with its frames. A rank that cannot send would leave the collective and break
    the group.
    """
    with group_of_one():
        (told,) = WatchedGroup(dist.group.WORLD, mock.MagicMock()).all_gather_object(failed(ValueError("the plan")))
    assert (str(told[0]), [frame.name for frame in told[1]]) == ("the plan", ["_raised"])


def test_of_many_failures_each_class_and_the_own_one_are_sent() -> None:
    """Of many failures each rank gets a bounded number: one of each class, its own, and a summary of the other ranks."""
    size = FAILURES_MAX + 20
    owns: list[object] = [failed(OSError(5, f"rank {rank}")) for rank in range(size)]
    owns[0], owns[size - 2] = None, failed(MemoryError("alone"))
    last = size - 1
    for rank, (outcomes, _) in enumerate(Ranks(size).end(owns)):
        told = {each: one[0] for each, one in enumerate(outcomes) if one is not None}
        assert isinstance(told[size - 2], MemoryError), "one of each class comes before more of another"
        is_cut = rank >= FAILURES_MAX and rank != size - 2
        assert len(told) == FAILURES_MAX + 1 + is_cut
        assert rank == 0 or str(rank) in str(told[rank]) or rank == size - 2, "each rank has its own"
        (more,) = (str(error) for error in told.values() if isinstance(error, RankFailed))
        assert f"{last - FAILURES_MAX - is_cut} more ranks failed, too: " in more
    assert f"{FAILURES_MAX}-{size - 3}, {last}." in str(Ranks(size).end(owns)[0][0][FAILURES_MAX][0])
