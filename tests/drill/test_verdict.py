"""Verdicts: every broken promise is found, and nothing else."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from replicated_ckpt.drill.evidence import Evidence, LoadFailure, LoadRecord, RankReport, SaveRecord, WaitRecord
from replicated_ckpt.drill.plan import DrillOptions, DrillPlan, Scenario, plan_drill
from replicated_ckpt.drill.verdict import LOSS_TOLERANCE, SHARD_LOST_LIMIT_S, ScenarioReport, judge

STEPS = 6
NAME = "step-4"
LOSSES = {5: 2.0, 6: 1.5}
SAVED = {"model.weight": "aa", "optim.state.weight.exp_avg": "bb"}
END = {"model.weight": "cc"}
LOADED = LoadRecord("latest", 0.5, checkpoint_id=NAME, step=4, bytes_local=10, bytes_peer=3)
NAMED_REFUSAL = LoadRecord(
    NAME,
    1.0,
    raised="CheckpointException",
    failures=(LoadFailure("ShardLost", "gone", 0, ("__2_0.distcp", "__3_0.distcp")),),
)
FROM_BUCKET = replace(LOADED, bytes_local=0, bytes_peer=0, bytes_object=13)
LATEST_REFUSAL = LoadRecord("latest", 0.1, raised="CheckpointNotFound")

Tamper = Callable[[Evidence], Evidence]


def plan_of(scenario: Scenario) -> DrillPlan:
    return plan_drill(DrillOptions(scenarios=(scenario,), ranks_per_node=1, steps=STEPS))


def saved(ranks: int) -> Evidence:
    reports = tuple(
        RankReport(
            rank,
            (SaveRecord("step-2", 2, 9.0, (), 2), SaveRecord(NAME, 4, 0.1 * rank, (f"__{rank}_0.distcp",), 2)),
            (),
            {1: 4.0, **LOSSES},
        )
        for rank in range(ranks)
    )
    return Evidence(reports, {f"saved-{NAME}": SAVED, "end": END})


def uploaded(ranks: int) -> Evidence:
    """Like `saved`, and `wait` has returned the uploads."""
    before = saved(ranks)
    wait = WaitRecord(("step-2", NAME), 0.2)
    return replace(before, reports=tuple(replace(report, wait=wait) for report in before.reports))


def resumed(ranks: int, loads: tuple[LoadRecord, ...] = (LOADED,)) -> Evidence:
    reports = tuple(RankReport(rank, (), loads, LOSSES) for rank in range(ranks))
    return Evidence(reports, {f"loaded-{NAME}": SAVED, "end": END})


def verdict(scenario: Scenario, before: Evidence, after: Evidence) -> ScenarioReport:
    plan = plan_of(scenario)
    (run,) = plan.runs
    return judge(plan, run, run.resumes[0], before=before, after=after, detect_s=1.25)


def on_rank(rank: int, change: Callable[[RankReport], RankReport]) -> Tamper:
    def tampered(evidence: Evidence) -> Evidence:
        reports = tuple(change(report) if report.rank == rank else report for report in evidence.reports)
        return replace(evidence, reports=reports)

    return tampered


def on_load(rank: int, index: int, **changes: object) -> Tamper:
    def tampered(report: RankReport) -> RankReport:
        loads = list(report.loads)
        loads[index] = replace(loads[index], **changes)  # type: ignore[arg-type]
        return replace(report, loads=tuple(loads))

    return on_rank(rank, tampered)


def with_digests(**changes: Mapping[str, str]) -> Tamper:
    renamed = {name.replace("_", "-"): digests for name, digests in changes.items()}
    return lambda evidence: replace(evidence, digests={**evidence.digests, **renamed})


def with_loss(rank: int, step: int, loss: float) -> Tamper:
    return on_rank(rank, lambda report: replace(report, loss_by_step={**report.loss_by_step, step: loss}))


def without_rank(rank: int) -> Tamper:
    return lambda evidence: replace(evidence, reports=tuple(r for r in evidence.reports if r.rank != rank))


def without_digests(evidence: Evidence) -> Evidence:
    return replace(evidence, digests={})


@pytest.mark.parametrize(("scenario", "ranks"), [(Scenario.SHRINK, 1), (Scenario.REPLACE, 2), (Scenario.GROW, 3)])
def test_an_intact_resume_holds(scenario: Scenario, ranks: int) -> None:
    """There is no problem, and the table has the ranks' figures."""
    report = verdict(scenario, saved(2), resumed(ranks))
    assert report.problems == ()
    assert report.held
    assert (report.ranks_before, report.ranks_after) == (2, ranks)
    assert (report.shards_lost, report.shards, report.tensors_verified) == (1, 2, 2)
    assert (report.bytes_local, report.bytes_peer, report.bytes_object) == (10 * ranks, 3 * ranks, 0)
    assert (report.save_s, report.detect_s, report.restore_s) == (0.1, 1.25, 0.5)


@pytest.mark.parametrize(
    ("tamper", "problem"),
    [
        (with_digests(loaded_step_4={**SAVED, "model.weight": "ab"}), "not as saved: 1 tensors differ: model.weight"),
        (with_digests(loaded_step_4={"model.weight": "aa"}), "only on one side: optim.state.weight.exp_avg"),
        (with_digests(end={"model.weight": "cd"}), "not as never interrupted"),
        (without_digests, "no digests to compare"),
        (without_rank(1), "1 of 2 ranks reported"),
        (with_loss(1, 6, 1.5000001), "rank 1: loss at step 6"),
        (with_loss(0, 5, float("nan")), "rank 0: loss at step 5"),
        (on_rank(1, lambda report: replace(report, loss_by_step={5: 2.0})), "rank 1: loss at step 6 is nan"),
        (on_rank(0, lambda report: replace(report, loads=())), "rank 0: loaded nothing"),
        (on_load(1, 0, checkpoint_id="step-2"), "rank 1: loaded step-2"),
        (on_load(1, 0, step=2), "rank 1: loaded step-4 (step 2), not step-4"),
        (on_load(0, 0, bad_copies=("__0_0.distcp at node x",)), "met bad copies"),
        (
            on_load(0, 0, raised="CheckpointException", failures=(LoadFailure("ShardLost", "gone", 1),)),
            "rank 0: could not load: ShardLost: gone",
        ),
    ],
)
def test_a_broken_resume_does_not_hold(tamper: Tamper, problem: str) -> None:
    """One digest, loss or rank that differs is enough."""
    report = verdict(Scenario.REPLACE, saved(2), tamper(resumed(2)))
    assert not report.held
    assert problem in "\n".join(report.problems)


def test_tensors_that_differ_are_not_counted_as_verified() -> None:
    """The table counts only equal tensors."""
    tampered = with_digests(loaded_step_4={**SAVED, "model.weight": "ab"})(resumed(2))
    assert verdict(Scenario.REPLACE, saved(2), tampered).tensors_verified == 1


def test_another_world_may_round_differently_within_the_tolerance_only() -> None:
    """With fewer ranks, the loss may differ by less than the tolerance, and the final bits may differ."""
    inside, outside = 1.5 * (1 + LOSS_TOLERANCE / 2), 1.5 * (1 + LOSS_TOLERANCE * 2)
    other_bits = with_digests(end={"model.weight": "dd"})(resumed(1))
    assert verdict(Scenario.SHRINK, saved(2), with_loss(0, 6, inside)(other_bits)).held
    assert not verdict(Scenario.SHRINK, saved(2), with_loss(0, 6, outside)(other_bits)).held


def test_a_save_with_too_few_copies_does_not_hold() -> None:
    """A resume that depends on luck does not count."""

    def fewer(report: RankReport) -> RankReport:
        return replace(report, saves=tuple(replace(save, copies_made=1) for save in report.saves))

    report = verdict(Scenario.REPLACE, on_rank(1, fewer)(saved(2)), resumed(2))
    assert report.problems == ("rank 1: the save made 1 of 2 copies",)


def test_a_complete_refusal_holds() -> None:
    """In `beyond`, a ShardLost with all lost shards on every rank is the expected result."""
    report = verdict(Scenario.BEYOND, saved(4), resumed(2, (NAMED_REFUSAL, LATEST_REFUSAL)))
    assert report.problems == ()
    assert (report.shards_lost, report.shards, report.tensors_verified) == (2, 4, 0)


@pytest.mark.parametrize(
    ("tamper", "problem"),
    [
        (on_load(1, 0, raised=None, failures=()), "rank 1: loading step-4 raised None"),
        (on_load(0, 0, failures=(LoadFailure("OSError", "x", 1),)), "failed without ShardLost: OSError: x"),
        (on_load(0, 0, failures=(LoadFailure("ShardLost", "x", 1, ("__2_0.distcp",)),)), "not name __3_0.distcp"),
        (on_load(1, 0, seconds=SHARD_LOST_LIMIT_S + 1), "failed only after 31 s"),
        (on_load(1, 1, raised=None), "rank 1: loading latest was not refused"),
        (on_rank(0, lambda report: replace(report, loads=report.loads[:1])), "tried 1 of 2 loads"),
        (without_rank(0), "1 of 2 ranks reported"),
    ],
)
def test_an_incomplete_refusal_does_not_hold(tamper: Tamper, problem: str) -> None:
    """A rank that loads, hangs or raises another error breaks the promise."""
    report = verdict(Scenario.BEYOND, saved(4), tamper(resumed(2, (NAMED_REFUSAL, LATEST_REFUSAL))))
    assert not report.held
    assert problem in "\n".join(report.problems)


def test_a_problem_of_many_ranks_is_one_line() -> None:
    """Ranks with the same problem share one line."""
    report = verdict(Scenario.BEYOND, saved(4), resumed(2, (NAMED_REFUSAL,)))
    assert report.problems == ("rank 0, 1: tried 1 of 2 loads",)


def test_a_cluster_that_comes_back_from_the_bucket_holds() -> None:
    """All shards are lost, no surviving node detects the loss, and every byte comes from the object store."""
    plan = plan_of(Scenario.CLUSTER)
    (run,) = plan.runs
    report = judge(plan, run, run.resumes[0], before=uploaded(2), after=resumed(4, (FROM_BUCKET,)), detect_s=None)
    assert report.problems == ()
    assert (report.ranks_before, report.ranks_after, report.shards_lost, report.shards) == (2, 4, 2, 2)
    assert (report.bytes_local, report.bytes_peer, report.bytes_object) == (0, 0, 52)
    assert (report.detect_s, report.wait_s, report.tensors_verified) == (None, 0.2, 2)


@pytest.mark.parametrize(
    ("tamper_before", "tamper_after", "problem"),
    [
        (
            on_rank(1, lambda report: replace(report, wait=None)),
            None,
            "rank 1: wait() did not return step-2, step-4 as uploaded",
        ),
        (
            on_rank(0, lambda report: replace(report, wait=WaitRecord(("step-2",), 0.1))),
            None,
            "rank 0: wait() did not return step-4 as uploaded",
        ),
        (None, on_load(2, 0, bytes_local=1), "rank 2: loaded 1 bytes from its own store"),
        (None, on_load(3, 0, bytes_peer=7), "rank 3: loaded 0 bytes from its own store, 7 from peers"),
        (None, on_load(1, 0, bytes_object=0), "and 0 from the object store"),
        (None, with_digests(loaded_step_4={**SAVED, "model.weight": "ab"}), "not as saved: 1 tensors differ"),
        (None, with_loss(1, 6, 1.6), "rank 1: loss at step 6"),
        (None, on_load(0, 0, raised="CheckpointNotFound"), "rank 0: could not load: CheckpointNotFound"),
    ],
)
def test_a_cluster_that_did_not_come_from_the_bucket_does_not_hold(
    tamper_before: Tamper | None, tamper_after: Tamper | None, problem: str
) -> None:
    """An unconfirmed upload, bytes from a node, or a tensor that differs breaks the promise."""
    before, after = uploaded(2), resumed(4, (FROM_BUCKET,))
    report = verdict(
        Scenario.CLUSTER,
        tamper_before(before) if tamper_before else before,
        tamper_after(after) if tamper_after else after,
    )
    assert not report.held
    assert problem in "\n".join(report.problems)
