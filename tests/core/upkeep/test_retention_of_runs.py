"""Retention next to other runs' checkpoints: they are neither counted nor removed, but for parts that were overwritten."""

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
    """One node holds all of them, whole."""
    held = tuple(replace(holding("a", one), lineage=one.lineage) for one in saves)
    return plan_retention(by_save(saves), [NodeView("a", Presence.UP, held)], policies)


def test_another_runs_checkpoints_are_neither_counted_nor_removed() -> None:
    """With higher sequences and with lower ones; and its own policy does not reach this run's."""
    ours, other = of_run(OURS, 4, 5, 6), of_run(OTHER, 1, 2, 3, 7, 8, 9)
    assert plan_of([*ours, *other]).retired == {save_id(4)}
    assert plan_of([*ours, *other], [replace(KEEP_TWO, lineage=OTHER)]).retired == {save_id(n) for n in (1, 2, 3, 7)}
    assert plan_of([*ours, *other], [replace(KEEP_TWO, lineage="")]).retired == frozenset()


def overwritten(*, ours: bool, theirs: bool, is_replaced: bool = True) -> tuple[Manifest, list[Manifest], NodeView]:
    """A node with two newer saves of this run, and one that was overwritten another run's: is either whole."""
    (old,) = of_run(OTHER, 9)
    over = replace(of_run(OURS, 1)[0], checkpoint_id=old.checkpoint_id)
    saves = [over, *of_run(OURS, 2, 3), old]
    held = [replace(holding("a", one), lineage=one.lineage) for one in saves]
    held[0] = held[0] if ours else replace(held[0], sizes=dict(list(held[0].sizes.items())[:1]))
    sizes = held[-1].sizes if theirs else dict(list(held[-1].sizes.items())[:1])
    held[-1] = replace(held[-1], sizes=sizes, is_replaced=is_replaced)
    return old, saves, NodeView("a", Presence.UP, tuple(held))


def test_what_has_replaced_another_runs_version_stays_while_that_is_there() -> None:
    """A load reads it. Else it would have the name once more. Where it has the name, it says nothing of this one."""
    _, saves, view = overwritten(ours=True, theirs=True)
    plan = plan_retention(by_save(saves), [view], [KEEP_TWO])
    assert plan.removals == ()
    assert OTHER_STAYS in {verdict.rule for verdict in plan.verdicts}
    named = NodeView("b", Presence.UP, (replace((view.holdings or ())[-1], node_id="b", is_replaced=False),))
    without = replace(view, holdings=(view.holdings or ())[:-1])
    assert plan_retention(by_save(saves), [without, named], [KEEP_TWO]).retired == {saves[0].save_id}


def test_what_a_save_was_to_replace_that_is_not_whole_stays() -> None:
    """That other run's checkpoint has not given way: it is whole, and the only one of its name that is."""
    _, saves, view = overwritten(ours=False, theirs=True)
    assert plan_retention(by_save(saves), [view], [KEEP_TWO]).retired == {saves[0].save_id}


@pytest.mark.parametrize("is_replaced", [True, False])
def test_a_part_that_was_saved_over_here_goes_with_what_replaced_it(is_replaced: bool) -> None:
    """Before that. The newer one is not whole any more, as others have retired it. What has its name elsewhere stays."""
    old, saves, view = overwritten(ours=False, theirs=False, is_replaced=is_replaced)
    plan = plan_retention(by_save(saves), [view], [KEEP_TWO])
    expected = [old.save_id] * is_replaced + [saves[0].save_id]
    assert [removal.save_id for removal in plan.of_node("a")] == expected
    assert find_retired(by_save(saves), [replace(view, node_report=NodeReport((KEEP_TWO,)))]) == set(expected)
    own = [KEEP_TWO, replace(KEEP_TWO, lineage=OTHER)]
    assert plan_retention(by_save(saves), [view], own).retired == {saves[0].save_id}, "its own run's policy judges it"


def test_only_what_lies_under_its_own_name_and_has_a_manifest_is_a_whole_version() -> None:
    """Renamed by a user, or unknown to this look: neither makes an older version give way."""
    one, two = of_run(OURS, 1, 2)
    views = [NodeView("a", Presence.UP, (holding("a", one), holding("a", two, renamed="best")))]
    assert find_whole_versions(by_save([one, two]), views) == {"step-1": (one.version,)}
    assert find_whole_versions(by_save([two]), views) == {}
    silent = [replace(views[0], presence=Presence.ASSUMED)]
    assert find_whole_versions(by_save([one]), silent) == {}


def test_without_metadata_on_any_node_nothing_counts_as_whole() -> None:
    """Every shard is there, and the checkpoint cannot be read: two older ones stay, which can."""
    saves = of_run(OURS, 1, 2, 3)
    held = tuple(replace(holding("a", one, NAMES), has_metadata=one.sequence < 3) for one in saves)
    plan = plan_retention(by_save(saves), [NodeView("a", Presence.UP, held)], [KEEP_TWO])
    assert plan.removals == ()
    other = tuple(holding("b", one) for one in saves)
    views = [NodeView("a", Presence.UP, held), NodeView("b", Presence.UP, other)]
    assert plan_retention(by_save(saves), views, [KEEP_TWO]).retired == {save_id(1)}, "one node has it"


def test_what_is_retired_is_left_out_of_what_stays() -> None:
    """That alone: an overtaken save would keep its place else, or a kept one lose it."""
    known = by_save(of_run(OURS, 1, 2))
    assert without_retired(known, {save_id(1)}) == {save_id(2): known[save_id(2)]}


def test_a_file_of_another_size_is_no_copy_and_one_of_no_shard_is_passed_over() -> None:
    """A newest checkpoint whose shard is cut off takes no older one's place."""
    saves = of_run(OURS, 1, 2, 3)
    whole = tuple(holding("a", one) for one in saves)
    cut = replace(whole[2], sizes={**whole[2].sizes, NAMES[0]: 99})
    stray = replace(whole[2], sizes={**whole[2].sizes, "__9_0.distcp": 100})
    for newest, retired in ((cut, set()), (stray, {save_id(1)})):
        views = [NodeView("a", Presence.UP, (*whole[:2], newest))]
        assert plan_retention(by_save(saves), views, [KEEP_TWO]).retired == retired


def test_a_plan_of_some_saves_removes_no_other() -> None:
    """What only part of the nodes agree on is left out; the verdicts stay, to be told."""
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
    """In one directory for each series a policy counts them."""
    assert find_series_name(checkpoint_id) == better
