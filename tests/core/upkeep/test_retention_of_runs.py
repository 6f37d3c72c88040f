"""Retention next to other runs' checkpoints: they are neither counted nor removed, but for one that was saved over."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from replicated_ckpt import Retention
from replicated_ckpt.core.manifest import Manifest
from replicated_ckpt.core.upkeep.policy import NODES, Policy, Standing, find_series_name
from replicated_ckpt.core.upkeep.repair import NodeView, Presence
from replicated_ckpt.core.upkeep.retention import RetentionPlan, find_retired, plan_retention, without_retired
from replicated_ckpt.core.upkeep.whole_versions import find_whole_versions
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


def test_what_a_save_has_replaced_goes_with_it_and_before_it() -> None:
    """Else the other run's checkpoint would be that name's once more; while the save stays, so does what is told of it."""
    (old,) = of_run(OTHER, 9)
    over = replace(of_run(OURS, 1)[0], checkpoint_id=old.checkpoint_id, replaces=(old.save_id, save_id(77)))
    newer = of_run(OURS, 2, 3)
    plan = plan_of([over, *newer, old])
    assert plan.retired == {over.save_id, old.save_id}
    assert [removal.save_id for removal in plan.of_node("a")] == [old.save_id, over.save_id]
    assert plan_of([over, newer[0], old]).retired == frozenset()


def test_what_a_save_was_to_replace_that_is_not_whole_stays() -> None:
    """That other run's checkpoint has not given way: it is whole, and the only one of its name that is."""
    (old,) = of_run(OTHER, 9)
    over = replace(of_run(OURS, 1)[0], checkpoint_id=old.checkpoint_id, replaces=(old.save_id,))
    saves = [over, *of_run(OURS, 2, 3), old]
    held = [replace(holding("a", one), lineage=one.lineage) for one in saves]
    held[0] = replace(held[0], sizes=dict(list(held[0].sizes.items())[:1]))
    plan = plan_retention(by_save(saves), [NodeView("a", Presence.UP, tuple(held))], [KEEP_TWO])
    assert plan.retired == {over.save_id}


@pytest.mark.parametrize("is_saved_over", [False, True])
def test_what_a_node_brings_back_of_a_replaced_one_goes_if_others_saw_what_replaced_it(is_saved_over: bool) -> None:
    """The newer one is not whole any more, as the others have retired it. A removal by hand there says nothing of it."""
    (old,) = of_run(OTHER, 9)
    over = replace(of_run(OURS, 1)[0], checkpoint_id=old.checkpoint_id, replaces=(old.save_id,))
    saves = [over, *of_run(OURS, 2, 3), old]
    held = [replace(holding("a", one), lineage=one.lineage) for one in saves]
    held[0], part = (replace(one, sizes=dict(list(one.sizes.items())[:1])) for one in (held[0], held[-1]))
    gone = frozenset({old.save_id})
    said = Standing(saved_over=gone) if is_saved_over else Standing(removed=gone)
    there = NodeView("b", Presence.UP, (), standing=said)
    plan = plan_retention(by_save(saves), [NodeView("a", Presence.UP, (*held[:-1], part)), there], [KEEP_TWO])
    assert plan.retired == ({over.save_id, old.save_id} if is_saved_over else {over.save_id})
    assert plan.left == (gone if is_saved_over else frozenset())
    whole = plan_retention(by_save(saves), [NodeView("a", Presence.UP, tuple(held)), there], [KEEP_TWO])
    assert whole.retired == {over.save_id}, "a whole one gives way to a whole one alone"
    assert not whole.left
    aside = replace(held[-1], is_replaced=True)
    read = plan_retention(by_save(saves), [NodeView("a", Presence.UP, (*held[:-1], aside)), there], [KEEP_TWO])
    assert read.retired == plan.retired, "one that is aside, as a load has read it, was not put back"
    assert not read.left


def test_a_part_that_is_left_goes_by_its_nodes_own_word_alone() -> None:
    """That others know it to be saved over has none look after it. What removes it is the policy of the newer one."""
    (old,) = of_run(OTHER, 9)
    part = replace(holding("a", old, NAMES[:1]), lineage=OTHER)
    there = NodeView("b", Presence.UP, (), standing=Standing(saved_over=frozenset({old.save_id})))
    views = [NodeView("a", Presence.UP, (part,)), there]
    plan = plan_retention(by_save([old]), views, [KEEP_TWO])
    assert not plan.retired
    assert not plan.removals
    assert plan.left == {old.save_id}
    assert find_retired(by_save([old]), views) == {old.save_id}


def test_what_has_another_name_by_now_does_not_go_with_the_save_that_replaced_it() -> None:
    """A version that a user has copied under a name of its own stays, though a save has replaced it under its first one."""
    (old,) = of_run(OTHER, 9)
    over = replace(of_run(OURS, 1)[0], replaces=(old.save_id,))
    assert old.checkpoint_id != over.checkpoint_id
    assert plan_of([over, *of_run(OURS, 2, 3), old]).retired == {over.save_id}


def test_one_that_two_saves_have_replaced_is_removed_once() -> None:
    """And one that its own run's policy judges is not judged again."""
    (old,) = of_run(OTHER, 9)
    twice = [replace(one, checkpoint_id=old.checkpoint_id, replaces=(old.save_id,)) for one in of_run(OURS, 1, 2)]
    saves = [*twice, *of_run(OURS, 3, 4), old]
    assert [verdict.save_id for verdict in plan_of(saves).verdicts].count(old.save_id) == 1
    both = plan_of(saves, [KEEP_TWO, replace(KEEP_TWO, lineage=OTHER)])
    assert [(verdict.is_kept, verdict.save_id) for verdict in both.verdicts if verdict.save_id == old.save_id] == [
        (True, old.save_id)
    ]


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
