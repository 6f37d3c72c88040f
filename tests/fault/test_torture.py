"""The cluster torture: some seeds of the simulation on every run, and proof that it finds what it should."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from unittest import mock

import pytest

from replicated_ckpt.agent.repair.mender import Mender
from replicated_ckpt.dcp.load.shard_reader import ShardReader
from replicated_ckpt.stores import verified
from replicated_ckpt.stores.peer.copy import PeerSink
from tests.fault.torture.runs import outcome_of, real_outcome, run_seed
from tests.marks import long

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]
SEEDS, MORE_SEEDS = range(6), range(6, 60)
REAL_SEEDS, REAL_STEPS = (4,), 3
MUTATION_SEEDS = range(1000, 1040)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Nodes log by the thousand what is wrong with the others."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("seeds", [SEEDS, long(MORE_SEEDS)], ids=["some", "more"])
def test_no_schedule_loses_anything(seeds: range) -> None:
    """Saves, overwrites, kills, outages, histories that meet, slow disks, damage, retention, adoption, a bucket, in random
    order: with all disks back, what was acknowledged last loads bit for bit."""
    found = {seed: outcome_of(seed) for seed in seeds}
    failed = {seed: "\n".join([*lines, problem]) for seed, (lines, problem, _) in found.items() if problem}
    assert not failed, "\n\n".join(failed.values())
    counts = sum((counts for _, _, counts in found.values()), start=Counter[str]())
    assert counts["acknowledged"] > 2 * len(seeds)
    assert counts["calm"] > len(seeds), "saves that nothing disturbed, each of which was acknowledged"
    assert counts["held"] > len(seeds), "checkpoints that were looked for in the end, and loaded"
    assert counts["lost"] < counts["held"] / 2, "checkpoints that were damaged beyond repair, or that no policy keeps"


@pytest.mark.multiprocess
def test_no_schedule_with_real_processes_loses_anything() -> None:
    """The same with real agents, real ranks and real signals: `make torture` runs any number of them."""
    for seed in REAL_SEEDS:
        lines, problem, counts = real_outcome(seed, REAL_STEPS)
        assert not problem, "\n".join([*lines, problem])
        assert counts["acknowledged"] > 0


def test_a_seed_replays_exactly() -> None:
    """The same seed tells the same story, word for word, so that a failure can be looked into."""
    first, second = run_seed(4)[0].course.lines, run_seed(4)[0].course.lines
    assert [line.partition(": ShardLost")[0] for line in first] == [line.partition(": ShardLost")[0] for line in second]


@contextmanager
def checksums_are_not_compared() -> Iterator[None]:
    with mock.patch.object(verified, "_first_bad_block", return_value=None):
        yield


@contextmanager
def copies_are_reported_and_not_made() -> Iterator[None]:
    with mock.patch.object(PeerSink, "write"), mock.patch.object(PeerSink, "finish"):
        yield


@contextmanager
def only_the_first_source_is_asked() -> Iterator[None]:
    def first_only(*arguments: object) -> dict[str, tuple[str, ...]]:
        return {shard: nodes[:1] for shard, nodes in real(*arguments).items()}  # type: ignore[arg-type]

    real = ShardReader._order
    with mock.patch.object(ShardReader, "_order", first_only):
        yield


@contextmanager
def re_protection_only_says_so() -> Iterator[None]:
    with mock.patch.object(Mender, "_copy"), mock.patch("replicated_ckpt.core.upkeep.repair._Planning._add_copies"):
        yield


@pytest.mark.parametrize(
    ("mutation", "found_at"),
    [
        (checksums_are_not_compared, 1007),
        (copies_are_reported_and_not_made, 1000),
        (only_the_first_source_is_asked, 1007),
        (re_protection_only_says_so, 1016),
    ],
)
def test_broken_code_is_found(mutation: Callable[[], AbstractContextManager[None]], found_at: int) -> None:
    """Each of these defects is found within a few seeds; first comes the one that found it last time."""
    with mutation():
        assert any(run_seed(seed)[1] for seed in [found_at, *MUTATION_SEEDS])
