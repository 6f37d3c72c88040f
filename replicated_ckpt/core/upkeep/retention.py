"""Retention: the checkpoints that a tier keeps and removes under a run's policy, each with a reason."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite

from replicated_ckpt.config import Retention
from replicated_ckpt.core.inventory import Holding
from replicated_ckpt.core.layout import find_step
from replicated_ckpt.core.lineage import Version
from replicated_ckpt.core.manifest import Manifest, metrics_of
from replicated_ckpt.core.upkeep.marks import merge_marks
from replicated_ckpt.core.upkeep.policy import NODES, Policy, agree, pending, scope_of
from replicated_ckpt.core.upkeep.repair import NodeView, Presence
from replicated_ckpt.wording import plural


@dataclass(frozen=True)
class Candidate:
    """One committed save of a tier, for retention.

    `is_whole`: every shard has an intact copy there. `is_protected`: every shard has all its copies. `held_back`: the
    reason why it must not be removed now, whatever the policy; "" if it may. `metrics`: the metrics saved with it.
    `is_full`: its optimizer is in separate files, and no holder has dropped them. `can_slim`: some holder still has
    them. `is_rejected`: a user has rejected it, so "latest" skips it, and it takes no good checkpoint's place.
    """

    checkpoint_id: str
    save_id: str
    sequence: int
    is_whole: bool = True
    is_protected: bool = True
    held_back: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    is_full: bool = False
    can_slim: bool = False
    is_rejected: bool = False


@dataclass(frozen=True)
class Verdict:
    """The decision on one save, and the rule behind it. `drops_optimizer`: the rule by which only its weights are kept."""

    checkpoint_id: str
    save_id: str
    sequence: int
    is_kept: bool
    rule: str
    drops_optimizer: str = ""

    def __str__(self) -> str:
        how = "stays" if self.is_kept else "goes"
        return f"{self.checkpoint_id} (save {self.save_id}) {how}: {self.drops_optimizer or self.rule}"


def judge(candidates: Sequence[Candidate], retention: Retention) -> tuple[Verdict, ...]:
    """The verdict on each save of one run in one tier, newest first.

    Kept are: the newest `keep_last` whole checkpoints and all saves with a sequence not below theirs; at any age, multiples
    of `keep_every` by sequence and of `keep_period` by step, the best by `keep_best`, the newest with all its copies, and
    saves that are held back. With fewer whole checkpoints than `keep_last`, everything is kept. A whole save is also kept
    while an older version of its checkpoint is, since its removal would publish that version again.

    With `full_last`, a kept checkpoint loses its optimizer if it is whole, not held back, and older than the newest
    `full_last` whole full ones. The newest full one with all its copies keeps its optimizer.

    A rejected save takes a good one's place in no rule, but is kept wherever it would be kept without the mark. A mark may
    come from a peer, and so must not remove anything.
    """
    newest_whole: dict[str, int] = {}
    good = [candidate for candidate in candidates if not candidate.is_rejected]
    for candidate in good:
        if candidate.is_whole:
            known = newest_whole.get(candidate.checkpoint_id, -1)
            newest_whole[candidate.checkpoint_id] = max(known, candidate.sequence)
    last = sorted(newest_whole.values(), reverse=True)[: retention.keep_last]
    oldest = last[-1] if len(last) == retention.keep_last else None
    # The newest with all copies stays: newer whole ones may have a single copy each.
    protected = _find_protected(candidates) | _find_protected(good)
    ordered = sorted(candidates, key=lambda candidate: (-candidate.sequence, candidate.save_id))
    best = {
        one.save_id: one for one in (find_best(candidates, retention), find_best(good, retention)) if one is not None
    }
    drops = _find_dropping(candidates, good, retention)
    named: set[str] = set()
    verdicts = []
    # Oldest first: if an older version stays, the newer one of its name stays, too.
    for candidate in reversed(ordered):
        # A step keeps only the newest version of a name: older ones have the same step, and would stay forever.
        is_newest = candidate.sequence >= newest_whole.get(candidate.checkpoint_id, -1)
        period = _find_period(candidate, retention) if is_newest else None
        verdict = _judge_one(candidate, retention, oldest, protected, best, period)
        if candidate.is_whole and not verdict.is_kept and candidate.checkpoint_id in named:
            verdict = replace(verdict, is_kept=True, rule="an older version would get its name back")
        if verdict.is_kept:
            named.add(candidate.checkpoint_id)
            verdict = replace(verdict, drops_optimizer=drops.get(candidate.save_id, ""))
        verdicts.append(verdict)
    return tuple(reversed(verdicts))


def _find_dropping(
    candidates: Sequence[Candidate], good: Sequence[Candidate], retention: Retention
) -> Mapping[str, str]:
    """By save that loses its optimizer if it is kept: the rule. `good`: the candidates that are not rejected."""
    if retention.full_last is None:
        return {}
    full = {one.sequence for one in good if one.is_full and one.is_whole}
    newest = sorted(full, reverse=True)[: retention.full_last]
    if len(newest) < retention.full_last:
        return {}
    # Newer ones may have a single copy each.
    protected = _find_protected(one for one in candidates if one.is_full)
    protected |= _find_protected(one for one in good if one.is_full)
    full_ones = plural(retention.full_last, "full checkpoint")
    rule = f"it keeps only its weights: its sequence is below {newest[-1]}, the lowest of the newest {full_ones}"
    return {
        one.save_id: rule
        for one in candidates
        if one.can_slim
        and one.is_whole
        and not one.held_back
        and one.sequence < newest[-1]
        and one.sequence not in protected
    }


def _find_protected(candidates: Iterable[Candidate]) -> set[int]:
    """The sequence of the newest candidate with all its copies; empty if there is none."""
    return {max(found)} if (found := [one.sequence for one in candidates if one.is_protected]) else set()


def find_best(candidates: Iterable[Candidate], retention: Retention) -> Candidate | None:
    """The best whole save by the policy's metric, the newest of equal ones. None: no metric is set, or no save has it."""
    sign = 1.0 if retention.best_is == "max" else -1.0
    ranked = [
        (sign * value, candidate.sequence, candidate.save_id, candidate)
        for candidate in candidates
        if candidate.is_whole
        and (value := candidate.metrics.get(retention.keep_best or "")) is not None
        and isfinite(value)
    ]
    return max(ranked, key=lambda entry: entry[:3])[3] if ranked else None


def _find_period(candidate: Candidate, retention: Retention) -> str | None:
    """The rule by which the step in its id keeps a candidate; None if it does not."""
    step, period = find_step(candidate.checkpoint_id), retention.keep_period
    is_multiple = step is not None and period is not None and step % period == 0
    return f"its step {step} is a multiple of {period}" if is_multiple else None


def _judge_one(
    candidate: Candidate,
    retention: Retention,
    oldest: int | None,
    protected: Collection[int],
    best: Mapping[str, Candidate],
    period: str | None,
) -> Verdict:
    sequence, every = candidate.sequence, retention.keep_every
    is_kept = True
    if oldest is None:
        rule = f"there are fewer than {plural(retention.keep_last, 'complete checkpoint')}"
    elif sequence >= oldest:
        rule = f"it is one of the newest {plural(retention.keep_last, 'complete checkpoint')}, or newer"
    elif every is not None and sequence % every == 0:
        rule = f"its sequence {sequence} is a multiple of {every}"
    elif period is not None:
        rule = period
    elif candidate.save_id in best:
        rule = f"it has the best {retention.keep_best!r} ({candidate.metrics[retention.keep_best or '']:g})"
    elif sequence in protected:
        rule = "it is the newest that has all its copies"
    elif candidate.held_back:
        rule = candidate.held_back
    else:
        is_kept = False
        newest = plural(retention.keep_last, "complete checkpoint")
        rule = f"its sequence {sequence} is below {oldest}, the lowest of the newest {newest}"
        rule += "" if every is None else f", and not a multiple of {every}"
        rule += "" if retention.keep_period is None else f", and its step is not a multiple of {retention.keep_period}"
    return Verdict(candidate.checkpoint_id, candidate.save_id, sequence, is_kept, rule)


@dataclass(frozen=True)
class Removal:
    """One node removes its files of a save; with `is_slimming` only those of the optimizer."""

    node_id: str
    checkpoint_id: str
    save_id: str
    rule: str
    is_slimming: bool = False

    def __str__(self) -> str:
        what = "the optimizer of " if self.is_slimming else ""
        return f"node {self.node_id}: remove {what}{self.checkpoint_id} (save {self.save_id}): {self.rule}"


@dataclass(frozen=True)
class RetentionPlan:
    """The verdicts, and the removals and slimmings on nodes that answer. Nodes that return later plan for themselves."""

    verdicts: tuple[Verdict, ...] = ()
    removals: tuple[Removal, ...] = ()
    slimmings: tuple[Removal, ...] = ()

    @property
    def retired(self) -> frozenset[str]:
        """The saves that no node should keep or get again."""
        return frozenset(verdict.save_id for verdict in self.verdicts if not verdict.is_kept)

    @property
    def slimmed(self) -> frozenset[str]:
        """The saves of which no node should keep the optimizer."""
        return frozenset(verdict.save_id for verdict in self.verdicts if verdict.drops_optimizer)

    @property
    def held_back(self) -> tuple[Verdict, ...]:
        """The saves that are kept only until an upload or a repair is done."""
        return tuple(verdict for verdict in self.verdicts if verdict.is_kept and verdict.rule in _HOLDING_BACK)

    def only(self, save_ids: Collection[str]) -> "RetentionPlan":
        """The plan with only the removals and slimmings of these saves."""
        removals, slimmings = (
            tuple(removal for removal in several if removal.save_id in save_ids)
            for several in (self.removals, self.slimmings)
        )
        return replace(self, removals=removals, slimmings=slimmings)

    def of_node(self, node_id: str) -> tuple[Removal, ...]:
        """The removals of one node, oldest checkpoint first; then its slimmings, in the same order."""
        both = (*reversed(self.removals), *reversed(self.slimmings))
        return tuple(removal for removal in both if removal.node_id == node_id)


NOT_UPLOADED = "it is not in the object store yet"
NO_MANIFEST = "a node must restore its manifest first"
NODE_SILENT = "a silent node may have the rest of it"
OTHER_STAYS = "a replaced version of another run would get its name back; a load still reads it"
_HOLDING_BACK = (NOT_UPLOADED, NO_MANIFEST)


def plan_retention(
    manifest_by_save: Mapping[str, Manifest],
    nodes: Sequence[NodeView],
    policies: Iterable[Policy],
    *,
    in_doubt: bool = False,
) -> RetentionPlan:
    """The removals under the policies of the runs. The same views and policies give the same plan.

    Only nodes that answer count. Saves with an invalid manifest are neither counted nor removed, nor are directories with
    another name than their manifest's, which a user has renamed.

    `in_doubt`: a silent node may return with files. Then a save counts as whole only with all its copies on nodes that
    answer. A save that lacks a shard there is kept, because the silent node may have the shard. If fewer nodes answer
    than copies are wanted, one copy on each counts as all: older saves there would be lost with the same nodes.
    """
    up = [node for node in nodes if node.presence is Presence.UP]
    holdings = _holdings_by_save(manifest_by_save, up)
    verdicts: list[Verdict] = []
    for policy in sorted(policies, key=lambda policy: policy.key):
        # The uploader applies the bucket's policies, by the bucket's own listing.
        if policy.tier == NODES and policy.retention is not None:
            mine = {save_id: found for save_id, found in manifest_by_save.items() if _is_under(found, policy)}
            verdicts += judge(list(_candidates(mine, up, holdings, in_doubt=in_doubt)), policy.retention)
    verdicts += list(_left_aside(verdicts, manifest_by_save, holdings))
    removals = tuple(
        Removal(node_id, going.checkpoint_id, going.save_id, going.rule)
        for going in verdicts
        if not going.is_kept
        for node_id in sorted(holding.node_id for holding in holdings[going.save_id])
    )
    slimmings = tuple(
        Removal(holding.node_id, kept.checkpoint_id, kept.save_id, kept.drops_optimizer, is_slimming=True)
        for kept in verdicts
        if kept.drops_optimizer
        for holding in sorted(holdings[kept.save_id], key=lambda holding: holding.node_id)
        if _has_optimizer(holding)
    )
    return RetentionPlan(tuple(verdicts), removals, slimmings)


def _has_optimizer(holding: Holding) -> bool:
    """Whether a node has published the full save. Replaced versions stay as they are."""
    return not (holding.is_slim or holding.is_replaced)


def find_retired(manifest_by_save: Mapping[str, Manifest], nodes: Sequence[NodeView]) -> frozenset[str]:
    """The saves that the policies of their runs, from these nodes' reports, no longer keep."""
    policies = agree(policy for node in nodes for policy in node.node_report.policies)
    return plan_retention(manifest_by_save, nodes, policies).retired


def _left_aside(
    verdicts: Sequence[Verdict], manifests: Mapping[str, Manifest], holdings: Mapping[str, Sequence[Holding]]
) -> Iterator[Verdict]:
    """Incomplete versions of other runs that a removed save had replaced: its removal would publish them again.

    They are last here, so that a node removes them first. Complete versions stay, and so do versions that
    some node publishes.
    """
    going = {verdict.checkpoint_id for verdict in verdicts if not verdict.is_kept}
    judged = {verdict.save_id for verdict in verdicts}
    for save_id in sorted(manifests.keys() - judged):
        old, held = manifests[save_id], holdings[save_id]
        if old.checkpoint_id in going and all(one.is_replaced for one in held) and not _copies(old, held):
            rule = "the version that replaced it is removed, and this one is incomplete"
            yield Verdict(old.checkpoint_id, save_id, old.sequence, is_kept=False, rule=rule)


def _is_under(manifest: Manifest, policy: Policy) -> bool:
    return scope_of(manifest.checkpoint_id) == policy.scope and manifest.lineage == policy.lineage


def _holdings_by_save(manifests: Mapping[str, Manifest], up: Sequence[NodeView]) -> Mapping[str, list[Holding]]:
    found: dict[str, list[Holding]] = {save_id: [] for save_id in manifests}
    for node in up:
        for holding in node.holdings or ():
            if holding.save_id in found and holding.checkpoint_id == manifests[holding.save_id].checkpoint_id:
                found[holding.save_id].append(holding)
    return found


def _candidates(
    manifests: Mapping[str, Manifest],
    up: Sequence[NodeView],
    holdings: Mapping[str, list[Holding]],
    *,
    in_doubt: bool,
) -> Iterator[Candidate]:
    waiting, marks = pending(node.node_report for node in up), merge_marks(node.node_report.marks for node in up)
    unbelieved = {one.checkpoint_id for node in up for one in node.unclaimed if one.is_ours}
    aside = {(held.checkpoint_id, held.lineage) for node in up for held in node.holdings or () if held.is_replaced}
    for save_id, manifest in manifests.items():
        held_back = NOT_UPLOADED if save_id in waiting else ""
        if not held_back and manifest.checkpoint_id in unbelieved:
            held_back = NO_MANIFEST
        copies = _copies(manifest, holdings[save_id])
        wanted = max(1, min(manifest.copies, len(up)))
        # The silent node may have the missing shard: a save that is removed now could not be completed later.
        if in_doubt and not copies and not held_back:
            held_back = NODE_SILENT
        if copies and any(name == manifest.checkpoint_id and run != manifest.lineage for name, run in aside):
            held_back = held_back or OTHER_STAYS
        yield Candidate(
            manifest.checkpoint_id,
            save_id,
            manifest.sequence,
            is_whole=copies >= (wanted if in_doubt else 1),
            is_protected=copies >= wanted,
            held_back=held_back,
            metrics=metrics_of(manifest.notes),
            is_full=manifest.weights is not None,
            can_slim=manifest.weights is not None or (manifest.is_slim and any(map(_has_optimizer, holdings[save_id]))),
            is_rejected=marks.is_rejected(save_id),
        )


def _copies(manifest: Manifest, holdings: Sequence[Holding]) -> int:
    """The smallest number of intact copies of any shard; 0 without shards, or if no node has intact metadata."""
    if not any(holding.has_metadata for holding in holdings):
        return 0
    count_by_shard = dict.fromkeys(manifest.shards, 0)
    for holding in holdings:
        for name, size in holding.sizes.items():
            entry = manifest.shards.get(name)
            if entry is not None and size == entry.size_bytes and name not in holding.damaged:
                count_by_shard[name] += 1
    return min(count_by_shard.values(), default=0)


def without_retired(manifest_by_save: Mapping[str, Manifest], retired: Collection[str]) -> dict[str, Manifest]:
    return {save_id: manifest for save_id, manifest in manifest_by_save.items() if save_id not in retired}


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
        # Older versions are included: after the removal, one of them would get the name back, and be repaired.
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
    """The chosen checkpoints whose removal would leave their run without a whole checkpoint that was seen.

    A checkpoint with lost files cannot be loaded, so it may be removed. One on silent nodes may be whole. A rejected one
    replaces none.
    """
    whole = (save for save in saves if save.candidate.is_whole and not save.candidate.is_rejected)
    kept = {save.run for save in whole if save.candidate.save_id not in chosen}
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
        besides = replace(wanted_by(run) or retention, keep_last=retention.keep_last, full_last=None)
        both = zip(judge(candidates, retention), judge(candidates, besides), strict=True)
        verdicts += [asked if asked.is_kept else also for asked, also in both]
    return tuple(verdicts)
