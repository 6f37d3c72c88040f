"""The numbers of a save, which the coordinator chooses last: its sequence in a lineage, and those of its files. The
sequence decides whether the save goes to the bucket.
"""

import itertools
import secrets
import uuid
from collections.abc import Set as AbstractSet
from dataclasses import replace

from replicated_ckpt.core.layout import SHARD_INDEX_MAX
from replicated_ckpt.core.lineage import Histories, History, merge_histories, newest_lineage
from replicated_ckpt.core.parts import NUMBERS_PER_SAVE
from replicated_ckpt.core.upkeep.policy import scope_of
from replicated_ckpt.dcp.agreement.decision import SaveDecision
from replicated_ckpt.dcp.agreement.nodes import Opened
from replicated_ckpt.dcp.save.agent_tasks import ObjectTier
from replicated_ckpt.errors import StoreUnavailable
from replicated_ckpt.node.state.sequence_floor import SequenceFloor
from replicated_ckpt.stores.local.store import LocalStore

Seen = tuple[str, int] | None
"""The lineage that this process continues, and the largest sequence that it has seen in it."""
_warned: set[tuple[str, frozenset[str]]] = set()
"""Warnings of this process: a directory of ids, and the foreign lineages in it."""
_DRAWN_FROM = 1_000_000  # far above any number that nodes count up to
_replaced_runs: set[str] = set()
"""Foreign lineages of which this process has overwritten a checkpoint, with a warning."""


def assign_sequence(
    decision: SaveDecision, opened: Opened, object_tier: ObjectTier, seen: Seen
) -> tuple[SaveDecision, list[str]]:
    """The decision with its lineage, and a sequence larger than any on the nodes, in the bucket, or seen before.

    Also returns descriptions of what is weaker than wanted. The lineage is the one that this process has loaded or
    saved; else the one that was saved last on the nodes or in the bucket; else a new one.

    Raises:
        CheckpointExists: the bucket has the checkpoint, and the save may not overwrite it.
    """
    unreached = [
        f"node {node} did not answer when the save began, and takes no copies of other nodes' shards: {why}"
        for node, why in opened.error_by_node.items()
    ]
    decision = replace(decision, unreached=tuple(opened.error_by_node))
    decision, problems = _place_in_lineage(decision, opened.histories, seen)
    if not object_tier.takes(decision.sequence):
        return decision, [*unreached, *problems, *_describe_replaced(decision, opened.named, seen)]
    found = object_tier.probe(decision.checkpoint_id, is_on_nodes=bool(opened.named), overwrite=decision.overwrite)
    # Again: the bucket may have a newer save of this run, and the sequence must exceed that save's, too.
    decision, problems = _place_in_lineage(decision, merge_histories([opened.histories, found.histories]), seen)
    if found.problem:
        problems = [*problems, f"{found.problem} The copies on the nodes are made"]
    if found.weakness:
        problems = [*problems, found.weakness]
    problems += _describe_replaced(decision, opened.named | found.named, seen)
    return replace(decision, upload=found.plan), [*unreached, *problems]


def choose_file_number(opened: Opened) -> int:
    """The first of the numbers in the names of a save's shards. The parts get consecutive numbers: the smallest free ones.

    A number is free if no file of the checkpoint on the save's nodes has it. If a node did not answer, or has another
    save of the checkpoint open, the used numbers are unknown, and the first number is a large random one.
    """
    if opened.error_by_node or opened.taken_numbers is None:
        drawn = _DRAWN_FROM + secrets.randbelow(SHARD_INDEX_MAX - _DRAWN_FROM - NUMBERS_PER_SAVE)
        return drawn - drawn % NUMBERS_PER_SAVE
    taken = {number // NUMBERS_PER_SAVE for number in opened.taken_numbers}
    return next(number for number in itertools.count() if number not in taken) * NUMBERS_PER_SAVE


def open_unreached(store: LocalStore, decision: SaveDecision, host: str) -> None:
    """Opens a save in the store of a node whose agent did not answer when the save began. The save was numbered without
    this node's saves.

    Raises:
        StoreUnavailable: this node has a save with this number or a larger one, which loads would prefer. Nothing was
            opened.
    """
    seen = SequenceFloor(store.agent_directory()).read_all().get(decision.lineage, 0)
    here = store.catalog.histories(scope_of(decision.checkpoint_id)).get(decision.lineage, History(0)).sequence
    if decision.sequence <= max(seen, here):
        raise StoreUnavailable(
            f"the agent of node {store.read_node_id()} ({host})",
            "open",
            decision.checkpoint_id,
            "it did not answer when the save began, so the new save was numbered without this node's saves. It is number "
            f"{decision.sequence} of the run, but this node has seen number {max(seen, here)}, which a load would prefer",
            "Save again: this asks the agent once more. If it still does not answer, load the newest checkpoint, then "
            "save. The save is then numbered after that checkpoint.",
        )
    store.begin(decision.intent)


def _place_in_lineage(decision: SaveDecision, histories: Histories, seen: Seen) -> tuple[SaveDecision, list[str]]:
    lineage = seen[0] if seen is not None else newest_lineage(histories)
    # No lineage anywhere: this is the first save of a run. When numbered again, the save keeps its random lineage.
    if lineage is None:
        lineage = decision.lineage or uuid.uuid4().hex[:16]
    known = histories.get(lineage, History(0)).sequence
    sequence = max(known, seen[1] if seen is not None else 0) + 1
    return replace(decision, lineage=lineage, sequence=sequence), _find_conflicting_runs(
        decision.checkpoint_id, lineage, histories
    )


def _describe_replaced(decision: SaveDecision, named: AbstractSet[str], seen: Seen) -> list[str]:
    """A warning that the save replaces a checkpoint that this process neither loaded nor saved; once per run and
    process.

    Empty if the save may not overwrite: it then replaces only a checkpoint that is lost anyway.
    """
    others = named - {None if seen is None else seen[0]} - _replaced_runs
    if not others or not decision.overwrite:
        return []
    _replaced_runs.update(others)
    listed = " and ".join(f"run {name!r}" if name else "no run, without a readable manifest" for name in sorted(others))
    problem = (
        f"this save replaces the checkpoint {decision.checkpoint_id!r} of {listed}, which this process has "
        "neither loaded nor saved. To refuse such a save, pass overwrite=False. To continue that run, load its "
        "checkpoint first"
    )
    return [problem]


def _find_conflicting_runs(checkpoint_id: str, lineage: str, histories: Histories) -> list[str]:
    """A warning that checkpoints of another run lie in this run's directory; once in a process."""
    # Time 0: another node has only reported the lineage, and no checkpoint of it lies here.
    others = {name for name, history in histories.items() if history.created_unix_s > 0} - {lineage}
    scope = scope_of(checkpoint_id)
    if not others or (scope, frozenset(others)) in _warned:
        return []
    _warned.add((scope, frozenset(others)))
    listed = ", ".join(repr(name) for name in sorted(others))
    problem = (
        f"checkpoints of other runs (lineage {listed}) lie in this save's directory of ids (lineage {lineage!r}). "
        "This run neither counts nor removes them. Give each run its own directory"
    )
    return [problem]
