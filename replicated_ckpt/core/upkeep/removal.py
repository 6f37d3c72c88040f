"""Removal by hand: whether a user may remove saves, and the saves that `prune` would remove, on this node only."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from replicated_ckpt.config import Retention
from replicated_ckpt.core.lineage import Version
from replicated_ckpt.core.upkeep.policy import scope_of
from replicated_ckpt.core.upkeep.repair import NodeView, Presence
from replicated_ckpt.core.upkeep.retention import Candidate, Verdict, judge


def find_removed(nodes: Iterable[NodeView]) -> frozenset[str]:
    """The saves that users have removed by hand on nodes that answer. No node repairs them any more.

    Older versions of such a checkpoint are included while any node has the version that replaced them. A node removes its
    own copies only on its own user's command.
    """
    nodes = tuple(nodes)
    said = frozenset[str]().union(*(node.node_report.removed for node in nodes if node.presence is Presence.UP))
    held = [holding for node in nodes for holding in node.holdings or ()]
    removed: dict[str, set[Version]] = {}
    for one in held:
        # By version: after the removal an older one would get the name, and be repaired, again.
        if one.save_id in said:
            removed.setdefault(one.checkpoint_id, set()).add(one.version)
    here = ((one, removed.get(one.checkpoint_id, ())) for one in held)
    return said.union(one.save_id for one, newer in here if any(each.is_newer_than(one.version) for each in newer))


@dataclass(frozen=True)
class Removable:
    """One save for a removal by hand. `is_lost`: some file of it cannot be on any node."""

    candidate: Candidate
    lineage: str
    is_lost: bool = False

    @property
    def run(self) -> tuple[str, str]:
        """The save's run: only checkpoints of the same run can replace it."""
        return scope_of(self.candidate.checkpoint_id), self.lineage


def find_last_good(saves: Sequence[Removable], chosen: Collection[str]) -> tuple[str, ...]:
    """The chosen checkpoints without which their run would have no whole checkpoint that was seen.

    A checkpoint with lost files cannot be loaded, so it may be removed. One on silent nodes may be whole.
    """
    kept = {save.run for save in saves if save.candidate.is_whole and save.candidate.save_id not in chosen}
    going = (save for save in saves if save.candidate.save_id in chosen)
    return tuple(sorted({s.candidate.checkpoint_id for s in going if s.run not in kept and not s.is_lost}))


def plan_prune(
    saves: Sequence[Removable],
    retention: Retention,
    wanted_by: Callable[[tuple[str, str]], Retention | None] = lambda _: None,
) -> tuple[Verdict, ...]:
    """The verdict on each save of each run under `retention`, newest first.

    `wanted_by`: the retention that the ranks of a run have set. Its rules besides `keep_last` apply, too.
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
