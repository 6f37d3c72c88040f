"""Drill plans: which nodes die, which nodes resume, and which options are refused first."""

import re

import pytest

from replicated_ckpt.drill.plan import (
    GLOBAL_BATCH_MIN,
    MOTO,
    NO_MOTO,
    DrillOptions,
    Promise,
    ResumePlan,
    RunPlan,
    Scenario,
    Seat,
    plan_drill,
)
from replicated_ckpt.errors import ConfigInvalid


def planned(scenario: Scenario, options: DrillOptions | None = None) -> tuple[RunPlan, ResumePlan]:
    plan = plan_drill(options or DrillOptions(scenarios=(scenario,)))
    (run,) = plan.runs
    (resume,) = run.resumes
    return run, resume


@pytest.mark.parametrize(
    ("scenario", "dies", "seats", "ranks", "promise"),
    [
        (Scenario.SHRINK, (1,), (Seat(0, False),), 4, Promise.SAME_LOSS),
        (Scenario.REPLACE, (1,), (Seat(0, False), Seat(1, True)), 8, Promise.SAME_BITS),
        (Scenario.COORDINATOR, (0,), (Seat(0, True), Seat(1, False)), 8, Promise.SAME_BITS),
        (Scenario.GROW, (1,), (Seat(0, False), Seat(1, True), Seat(2, True)), 12, Promise.SAME_LOSS),
        (Scenario.BEYOND, (2, 3), (Seat(0, False), Seat(1, False)), 2, Promise.SHARD_LOST),
        (Scenario.CLUSTER, (0, 1), (Seat(0, True), Seat(1, True)), 4, Promise.SAME_LOSS),
    ],
)
def test_each_scenario_loses_and_resumes_as_documented(
    scenario: Scenario, dies: tuple[int, ...], seats: tuple[Seat, ...], ranks: int, promise: Promise
) -> None:
    """By default there are 2 nodes of 4 ranks, and the last node dies. `beyond` kills one of two pairs, `cluster` all
    nodes.
    """
    run, resume = planned(scenario)
    assert (run.dies, resume.seats, resume.ranks, resume.promise) == (dies, seats, ranks, promise)


def test_scenarios_of_one_loss_share_its_run() -> None:
    """Six scenarios need only four runs."""
    runs = plan_drill(DrillOptions()).runs
    assert [[resume.scenario for resume in run.resumes] for run in runs] == [
        [Scenario.SHRINK, Scenario.REPLACE, Scenario.GROW],
        [Scenario.COORDINATOR],
        [Scenario.BEYOND],
        [Scenario.CLUSTER],
    ]


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (3, 1), (4, 2)])
def test_a_cluster_resumes_with_another_number_of_ranks(before: int, after: int) -> None:
    """The checkpoint in the bucket is always read with another number of ranks."""
    _, resume = planned(Scenario.CLUSTER, DrillOptions(scenarios=(Scenario.CLUSTER,), ranks_per_node=before))
    assert resume.ranks_per_node == after


def test_only_a_run_that_loses_everything_has_an_object_store() -> None:
    """The other scenarios must hold without one."""
    plan = plan_drill(DrillOptions())
    assert [run.is_total for run in plan.runs] == [False, False, False, True]
    assert plan.object_store == MOTO
    assert plan_drill(DrillOptions(scenarios=(Scenario.REPLACE,))).object_store is None
    assert plan_drill(DrillOptions(object_store="s3://bucket/x"), has_moto=False).object_store == "s3://bucket/x"


def test_without_moto_and_a_bucket_the_cluster_is_skipped_and_the_rest_runs() -> None:
    """The plan has the reason."""
    plan = plan_drill(DrillOptions(), has_moto=False)
    assert plan.skipped == {Scenario.CLUSTER: NO_MOTO}
    assert plan.object_store is None
    assert {resume.scenario for run in plan.runs for resume in run.resumes} == set(Scenario) - {Scenario.CLUSTER}
    assert plan_drill(DrillOptions()).skipped == {}


@pytest.mark.parametrize(
    "options", [DrillOptions(object_store=MOTO), DrillOptions(scenarios=(Scenario.CLUSTER,))], ids=["moto", "cluster"]
)
def test_a_scenario_that_was_named_is_not_skipped(options: DrillOptions) -> None:
    """The error says what to install."""
    with pytest.raises(ConfigInvalid, match="moto is not installed") as refused:
        plan_drill(options, has_moto=False)
    assert "pip install 'moto[server]'" in refused.value.hint


def test_the_victim_can_be_chosen() -> None:
    """--victim selects the node that dies, and the survivor becomes the first seat."""
    run, resume = planned(Scenario.SHRINK, DrillOptions(scenarios=(Scenario.SHRINK,), victim=0))
    assert run.dies == (0,)
    assert run.survivors == (1,)
    assert resume.seats == (Seat(1, blank=False),)


def test_beyond_loses_all_copies_of_something() -> None:
    """With more copies, more nodes of one placement group die."""
    run, _ = planned(Scenario.BEYOND, DrillOptions(scenarios=(Scenario.BEYOND,), nodes=3, copies=3))
    assert run.nodes == 6
    assert run.dies == (3, 4, 5)


@pytest.mark.parametrize("nodes", [2, 3, 5])
@pytest.mark.parametrize("ranks_per_node", [1, 3, 4])
def test_the_global_batch_divides_over_every_world(nodes: int, ranks_per_node: int) -> None:
    """Losses of different world sizes are averages over the same images."""
    plan = plan_drill(DrillOptions(nodes=nodes, ranks_per_node=ranks_per_node))
    worlds = {ranks for run in plan.runs for ranks in (run.ranks, *(resume.ranks for resume in run.resumes))}
    assert len(worlds) > 2
    assert all(plan.global_batch % ranks == 0 for ranks in worlds)
    assert plan.global_batch >= GLOBAL_BATCH_MIN


@pytest.mark.parametrize("steps", [3, 4, 12, 100])
def test_a_run_saves_twice_and_goes_on(steps: int) -> None:
    """There is an older checkpoint than the latest, and steps to lose after it."""
    schedule = plan_drill(DrillOptions(steps=steps)).schedule
    first, last = schedule.save_steps
    assert 0 < first < last < schedule.end_step == steps


@pytest.mark.parametrize(
    "options",
    [
        DrillOptions(scenarios=()),
        DrillOptions(nodes=1),
        DrillOptions(ranks_per_node=0),
        DrillOptions(copies=1),
        DrillOptions(copies=3),
        DrillOptions(steps=2),
        DrillOptions(victim=2),
        DrillOptions(victim=-1),
        DrillOptions(model_size="enormous"),
        DrillOptions(scenarios=(Scenario.REPLACE,), object_store=MOTO),
    ],
)
def test_options_that_cannot_work_are_refused(options: DrillOptions) -> None:
    """The error names an option, and has a hint."""
    with pytest.raises(ConfigInvalid, match="--") as refused:
        plan_drill(options)
    assert re.search(r"\w\)?\. Hint: [A-Z].*\.$", str(refused.value))
