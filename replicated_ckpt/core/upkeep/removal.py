"""Removal by hand: whether a user may have saves removed, and which ones `prune` would; what others hold is for them."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from replicated_ckpt.config import Retention
from replicated_ckpt.core.lineage import Version
from replicated_ckpt.core.upkeep.policy import scope_of
from replicated_ckpt.core.upkeep.repair import NodeView, Presence
from replicated_ckpt.core.upkeep.retention import Candidate, Verdict, judge


def find_removed(nodes: Iterable[NodeView]) -> frozenset[str]:
    """The saves that the user of a node that answers has removed there: no node looks after them any more.

    Nor after an older version of such a checkpoint, as long as a node has the one that took its place. Each node removes
    its own copies by its own user's word alone.
    """
    nodes = tuple(nodes)
    said = frozenset[str]().union(*(node.node_report.removed for node in nodes if node.presence is Presence.UP))
    held = [holding for node in nodes for holding in node.holdings or ()]
    removed: dict[str, set[Version]] = {}
    for one in held:
        if one.save_id in said:
            removed.setdefault(one.checkpoint_id, set()).add(one.version)
    here = ((one, removed.get(one.checkpoint_id, ())) for one in held)
    return said.union(one.save_id for one, newer in here if any(each.is_newer_than(one.version) for each in newer))


@dataclass(frozen=True)
class Removable:
    """One save as a user's removal sees it. `is_whole`: every file was seen intact. `is_lost`: no node can hold some."""

    candidate: Candidate
    lineage: str
    is_lost: bool = False

    @property
    def run(self) -> tuple[str, str]:
        """The run that it is of: only checkpoints of the same one can take its place."""
        return scope_of(self.candidate.checkpoint_id), self.lineage


def find_last_good(saves: Sequence[Removable], chosen: Collection[str]) -> tuple[str, ...]:
    """The checkpoints among the chosen saves without which their run has no whole one that was seen.

    One with lost files cannot be loaded whole: it may go. One whose nodes are silent may be whole.
    """
    kept = {save.run for save in saves if save.candidate.is_whole and save.candidate.save_id not in chosen}
    going = (save for save in saves if save.candidate.save_id in chosen)
    return tuple(sorted({s.candidate.checkpoint_id for s in going if s.run not in kept and not s.is_lost}))


def plan_prune(
    saves: Sequence[Removable],
    retention: Retention,
    wanted_by: Callable[[tuple[str, str]], Retention | None] = lambda _: None,
) -> tuple[Verdict, ...]:
    """What becomes of each save of each run, as a policy of retention would have it, newest first.

    `wanted_by`: what the ranks of a run want kept of it; all of that but the newest ones stays, too.
    """
    by_run: dict[tuple[str, str], list[Candidate]] = {}
    for save in saves:
        by_run.setdefault(save.run, []).append(save.candidate)
    verdicts: list[Verdict] = []
    for run, candidates in sorted(by_run.items()):
        besides = replace(wanted_by(run) or retention, keep_last=retention.keep_last)
        both = zip(judge(candidates, retention), judge(candidates, besides), strict=True)
        verdicts += [asked if asked.is_kept else also for asked, also in both]
    return tuple(verdicts)
