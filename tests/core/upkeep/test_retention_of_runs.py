"""Retention with several runs: another run's checkpoints are neither counted nor removed, except for overwritten parts."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from replicated_ckpt import Retention
from replicated_ckpt.core.manifest import Manifest
from replicated_ckpt.core.upkeep.collection import find_whole_versions
from replicated_ckpt.core.upkeep.policy import NODES, NodeReport, Policy, find_series_name
from replicated_ckpt.core.upkeep.repair import NodeView, Presence
from replicated_ckpt.core.upkeep.retention import (
    OTHER_STAYS,
    RetentionPlan,
    find_retired,
    plan_retention,
    without_retired,
)
from tests.core.upkeep.test_retention import NAMES, by_save, holding, manifest, save_id

OURS, OTHER = "a" * 16, "b" * 16
KEEP_TWO = Policy("", NODES, 1, Retention(keep_last=2), lineage=OURS)


def of_run(lineage: str, *sequences: int) -> list[Manifest]:
    return [replace(manifest(sequence), lineage=lineage) for sequence in sequences]


def plan_of(saves: Sequence[Manifest], policies: Sequence[Policy] = (KEEP_TWO,)) -> RetentionPlan:
    """The plan of one node with all these saves, complete."""
    held = tuple(replace(holding("a", one), lineage=one.lineage) for one in saves)
    return plan_retention(by_save(saves), [NodeView("a", Presence.UP, held)], policies)


def test_another_runs_checkpoints_are_neither_counted_nor_removed() -> None:
    """Another run's higher and lower sequences do not count, and its policy does not affect this run."""
    ours, other = of_run(OURS, 4, 5, 6), of_run(OTHER, 1, 2, 3, 7, 8, 9)
    assert plan_of([*ours, *other]).retired == {save_id(4)}
    assert plan_of([*ours, *other], [replace(KEEP_TWO, lineage=OTHER)]).retired == {save_id(n) for n in (1, 2, 3, 7)}
    assert plan_of([*ours, *other], [replace(KEEP_TWO, lineage="")]).retired == frozenset()


def overwritten(*, ours: bool, theirs: bool, is_replaced: bool = True) -> tuple[Manifest, list[Manifest], NodeView]:
    """A view of a node with three saves of this run, the oldest of which replaced another run's save. `ours` and
    `theirs`: whether each of these two is complete.
    """
    (old,) = of_run(OTHER, 9)
    over = replace(of_run(OURS, 1)[0], checkpoint_id=old.checkpoint_id)
    saves = [over, *of_run(OURS, 2, 3), old]
    held = [replace(holding("a", one), lineage=one.lineage) for one in saves]
    held[0] = held[0] if ours else replace(held[0], sizes=dict(list(held[0].sizes.items())[:1]))
    sizes = held[-1].sizes if theirs else dict(list(held[-1].sizes.items())[:1])
    held[-1] = replace(held[-1], sizes=sizes, is_replaced=is_replaced)
    return old, saves, NodeView("a", Presence.UP, tuple(held))


def test_a_save_stays_while_another_runs_version_that_it_replaced_is_there() -> None:
    """While another run's replaced version is on the node, the save that replaced it stays. If that version is
    published on another node, this does not apply.
    """
    _, saves, view = overwritten(ours=True, theirs=True)
    plan = plan_retention(by_save(saves), [view], [KEEP_TWO])
    assert plan.removals == ()
    assert OTHER_STAYS in {verdict.rule for verdict in plan.verdicts}
    named = NodeView("b", Presence.UP, (replace((view.holdings or ())[-1], node_id="b", is_replaced=False),))
    without = replace(view, holdings=(view.holdings or ())[:-1])
    assert plan_retention(by_save(saves), [without, named], [KEEP_TWO]).retired == {saves[0].save_id}


def test_another_runs_checkpoint_stays_if_its_replacement_is_incomplete() -> None:
    """An incomplete save that was to replace another run's is retired, and the other run's complete checkpoint stays."""
    _, saves, view = overwritten(ours=False, theirs=True)
    assert plan_retention(by_save(saves), [view], [KEEP_TWO]).retired == {saves[0].save_id}


@pytest.mark.parametrize("is_replaced", [True, False])
def test_an_overwritten_part_is_removed_with_its_replacement(is_replaced: bool) -> None:
    """An incomplete replaced part of another run is removed before the save that replaced it. A published one stays."""
    old, saves, view = overwritten(ours=False, theirs=False, is_replaced=is_replaced)
    plan = plan_retention(by_save(saves), [view], [KEEP_TWO])
    expected = [old.save_id] * is_replaced + [saves[0].save_id]
    assert [removal.save_id for removal in plan.of_node("a")] == expected
    assert find_retired(by_save(saves), [replace(view, node_report=NodeReport((KEEP_TWO,)))]) == set(expected)
    own = [KEEP_TWO, replace(KEEP_TWO, lineage=OTHER)]
    assert plan_retention(by_save(saves), [view], own).retired == {saves[0].save_id}, (
        "the other run's own policy decides about it"
    )


def test_a_renamed_or_unread_version_is_not_complete() -> None:
    """A renamed version, or one without a read manifest, does not replace an older version."""
    one, two = of_run(OURS, 1, 2)
    views = [NodeView("a", Presence.UP, (holding("a", one), holding("a", two, renamed="best")))]
    assert find_whole_versions(by_save([one, two]), views) == {"step-1": (one.version,)}
    assert find_whole_versions(by_save([two]), views) == {}
    silent = [replace(views[0], presence=Presence.ASSUMED)]
    assert find_whole_versions(by_save([one]), silent) == {}


def test_a_checkpoint_without_metadata_does_not_count() -> None:
    """A checkpoint without metadata on any node does not count, so the two older ones stay."""
    saves = of_run(OURS, 1, 2, 3)
    held = tuple(replace(holding("a", one, NAMES), has_metadata=one.sequence < 3) for one in saves)
    plan = plan_retention(by_save(saves), [NodeView("a", Presence.UP, held)], [KEEP_TWO])
    assert plan.removals == ()
    other = tuple(holding("b", one) for one in saves)
    views = [NodeView("a", Presence.UP, held), NodeView("b", Presence.UP, other)]
    assert plan_retention(by_save(saves), views, [KEEP_TWO]).retired == {save_id(1)}, "one node has the metadata"


def test_retired_saves_are_left_out() -> None:
    """`without_retired` leaves out exactly the retired saves."""
    known = by_save(of_run(OURS, 1, 2))
    assert without_retired(known, {save_id(1)}) == {save_id(2): known[save_id(2)]}


def test_a_truncated_shard_is_no_copy_and_another_file_is_ignored() -> None:
    """A newest checkpoint with a truncated shard does not count. A file that is no shard of it is ignored."""
    saves = of_run(OURS, 1, 2, 3)
    whole = tuple(holding("a", one) for one in saves)
    cut = replace(whole[2], sizes={**whole[2].sizes, NAMES[0]: 99})
    stray = replace(whole[2], sizes={**whole[2].sizes, "__9_0.distcp": 100})
    for newest, retired in ((cut, set()), (stray, {save_id(1)})):
        views = [NodeView("a", Presence.UP, (*whole[:2], newest))]
        assert plan_retention(by_save(saves), views, [KEEP_TWO]).retired == retired


def test_a_plan_of_some_saves_removes_no_other() -> None:
    """`only` restricts the removals to some saves, and keeps all verdicts."""
    plan = plan_of(of_run(OURS, 1, 2, 3, 4))
    some = plan.only({save_id(1)})
    assert [removal.save_id for removal in some.removals] == [save_id(1)]
    assert some.verdicts == plan.verdicts
    assert [str(verdict).split(": ")[0] for verdict in plan.verdicts[1:3]] == [
        f"step-3 (save {save_id(3)}) stays",
        f"step-2 (save {save_id(2)}) goes",
    ]


@pytest.mark.parametrize(
    ("checkpoint_id", "better"),
    [
        ("run/step_10/model", "run-model/step_10"),
        ("a/b/checkpoint-500/optimizer", "a/b-optimizer/checkpoint-500"),
        ("iter_0000010/ema", "ema/iter_0000010"),
        ("step-10", None),
        ("final", None),
        ("run/best", None),
        ("run-3/step-10", None),
        ("llama-7b/base", None),
    ],
)
def test_an_id_whose_directory_is_a_step_has_a_better_name(checkpoint_id: str, better: str | None) -> None:
    """For an id with a directory for each step, a name with one directory for each series is proposed."""
    assert find_series_name(checkpoint_id) == better
