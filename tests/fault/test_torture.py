"""The cluster torture: some seeds of the simulation in every run, and proof that the torture detects defects."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from tests.fault.torture.mutants import MUTANTS, Mutant
from tests.fault.torture.runs import Outcome, odd_clocks_outcome, outcome_of, real_outcome, run_seed
from tests.fault.torture.scripts import lose_trainers_often, meet_errors_often
from tests.fault.torture.simulated.by_hand import SEED, a_coordinator_goes_back, touch_files_often
from tests.fault.torture.simulated.operators import remove_and_drain_often
from tests.marks import long

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]
SEEDS, MORE_SEEDS = range(2), range(2, 60)
REAL_SEEDS, REAL_STEPS = (4,), 3
MUTATION_SEEDS = range(1000, 1040)
OFF_WHILE_STARTING = 24973
PEOPLE_SEED = 124
CLOCKS_SEED = 21005
FILES_SEED = 21000
QUICK = ("checksums are not compared",)
"""Mutants that `make test` looks for."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Silences the nodes, which log thousands of warnings about each other."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("seeds", [SEEDS, long(MORE_SEEDS)], ids=["some", "more"])
def test_no_schedule_loses_anything(seeds: range) -> None:
    """Random saves, overwrites, kills, outages, conflicting histories, slow disks, damage, retention, stock torch and a
    bucket. Once all disks are back, the checkpoint acknowledged last loads bit for bit.
    """
    found = {seed: outcome_of(seed) for seed in seeds}
    failed = {seed: "\n".join([*lines, problem]) for seed, (lines, problem, _) in found.items() if problem}
    assert not failed, "\n\n".join(failed.values())
    counts = sum((counts for _, _, counts in found.values()), start=Counter[str]())
    assert counts["acknowledged"] > 2 * len(seeds)
    assert counts["calm"] > len(seeds), "saves that nothing disturbed, each of which was acknowledged"
    assert counts["held"] > len(seeds), "checkpoints that were looked for in the end, and loaded"
    assert counts["lost"] < counts["held"] / 2, "checkpoints that were damaged beyond repair, or that no policy keeps"


@pytest.mark.long
@pytest.mark.multiprocess
def test_no_schedule_with_real_processes_loses_anything() -> None:
    """The same with real agents, ranks and signals. `make torture` runs any number of such schedules."""
    for seed in REAL_SEEDS:
        lines, problem, counts = real_outcome(seed, REAL_STEPS)
        assert not problem, "\n".join([*lines, problem])
        assert counts["acknowledged"] > 0


@pytest.mark.multiprocess
@pytest.mark.parametrize("run", [long(outcome_of), long(real_outcome)], ids=["simulated", "real"])
def test_every_trainer_may_be_killed_in_a_submitted_save(run: Callable[..., Outcome]) -> None:
    """Every trainer is killed at a random step. Once an agent has the outline, the save is completed on all nodes.
    Before that, it is removed.
    """
    lines, problem, counts = run(700, script=lose_trainers_often)
    assert not problem, "\n".join([*lines, problem])
    assert counts["orphans"] > 0


@pytest.mark.timeout(300, method="thread")
def test_a_schedule_that_hangs_fails_at_its_time_limit() -> None:
    """The command then prints the seed, and continues with the next one."""
    schedule, problem = run_seed(4, script=lambda _: time.sleep(60), within_s=1)
    assert schedule.course.lines
    assert "the schedule has not ended within 1 s" in problem


def test_the_system_may_refuse_anything_at_any_step() -> None:
    """The disk is full, the file system is read-only, or no descriptor is free. That save fails or is complete, and
    nothing else is lost.
    """
    lines, problem, counts = outcome_of(1001, script=meet_errors_often)
    assert not problem, "\n".join([*lines, problem])
    assert 0 < counts["acknowledged"] < counts["saves"]


def test_operators_remove_checkpoints_and_drain_nodes_between_faults() -> None:
    """A checkpoint removed from a node stays removed, also if the node kept an older version of it. A drained node
    never had the last copy.
    """
    for seed in (PEOPLE_SEED, PEOPLE_SEED + 20):
        lines, problem, counts = outcome_of(seed, script=remove_and_drain_often)
        assert not problem, "\n".join([*lines, problem])
        assert counts["acknowledged"] > 0


def test_files_of_stores_are_copied_moved_removed_and_put_back_between_faults() -> None:
    """Acknowledged checkpoints that are complete elsewhere load. Checkpoints that operators have copied load like the
    original.
    """
    for seed in (FILES_SEED, FILES_SEED + 1):
        lines, problem, counts = outcome_of(seed, script=touch_files_often)
        assert not problem, "\n".join([*lines, problem])
        assert counts["acknowledged"] > 0


def test_a_restored_coordinator_store_drops_nothing() -> None:
    """The coordinator's store was restored to a time before its decision. Files that another node had staged for that
    save stay, and the save is completed.
    """
    lines, problem, counts = outcome_of(SEED, script=a_coordinator_goes_back)
    assert not problem, "\n".join([*lines, problem])
    assert counts["acknowledged"] == 2


def test_clocks_that_are_wrong_and_jump_change_nothing_for_one_run() -> None:
    """Sequence numbers order the saves of a run. Clocks that are years ahead, or are set back in a save, change
    nothing.
    """
    lines, problem, counts = odd_clocks_outcome(CLOCKS_SEED)
    assert not problem, "\n".join([*lines, problem])
    assert counts["acknowledged"] > 0
    assert lines[-1].startswith("clocks jumped ")
    assert lines[-1] != "clocks jumped 0 times"


def test_a_node_that_is_switched_off_while_its_agent_starts_is_off() -> None:
    """An outage while a starting agent publishes a decided save kills that agent, too. Nothing runs on the node
    afterwards.
    """
    lines, problem, counts = outcome_of(OFF_WHILE_STARTING)
    assert not problem, "\n".join([*lines, problem])
    assert counts["kills"] > 1


def test_a_seed_replays_exactly() -> None:
    """Two runs of one seed write the same log, so that a failure can be reproduced."""
    first, second = run_seed(4)[0].course.lines, run_seed(4)[0].course.lines
    assert [line.partition(": ShardLost")[0] for line in first] == [line.partition(": ShardLost")[0] for line in second]


@pytest.mark.parametrize(
    "mutant", [mutant if mutant.name in QUICK else long(mutant) for mutant in MUTANTS], ids=lambda mutant: mutant.name
)
def test_broken_code_is_found(mutant: Mutant) -> None:
    """Each defect is detected at its seed, or within a few seeds. The same seeds pass without the defect."""
    more = () if mutant.script is not None else MUTATION_SEEDS
    with mutant.install():
        found_at = next((seed for seed in (mutant.seed, *more) if mutant.problem_at(seed)), None)
    assert found_at is not None
    problem = mutant.problem_at(found_at)
    assert not problem, f"without the defect: {problem}"
