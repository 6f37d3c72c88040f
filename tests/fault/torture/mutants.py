"""Mutants: defects that the package had or might have, each reintroduced alone to prove that the torture detects it.

Commit adcd94a lost checkpoints by D1 to D5 and D12 although every disk was intact. The torture cannot run on that tree,
whose layout is different, so each mutant changes today's code at the one place that keeps the promise. D4, a commit
that compares nothing, is missing: several guards prevent it today, and only the search of small worlds has found it.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from replicated_ckpt.agent.repair.mender import Mender
from replicated_ckpt.agent.state import rights
from replicated_ckpt.cli.nodes import drain
from replicated_ckpt.core.inventory import saves_found
from replicated_ckpt.core.lineage import Version
from replicated_ckpt.core.manifest import Manifest
from replicated_ckpt.core.protocol.seen_save import SeenSave, see_save
from replicated_ckpt.core.protocol.settlement import Answer, Fate, Settlement
from replicated_ckpt.core.upkeep import repair, retention
from replicated_ckpt.core.upkeep.policy import Policy, scope_of
from replicated_ckpt.core.upkeep.repair import NodeView, Presence
from replicated_ckpt.dcp.load.shard_reader import ShardReader
from replicated_ckpt.dcp.save import submission
from replicated_ckpt.node.saves import collector, settle
from replicated_ckpt.node.saves.finish import Finisher
from replicated_ckpt.stores import verified
from replicated_ckpt.stores.files.locks import DescriptorLock
from replicated_ckpt.stores.local.directories.journal import End, Journal
from replicated_ckpt.stores.peer.copy import PeerSink
from tests.fault.torture.course import Course
from tests.fault.torture.runs import Outcome, odd_clocks_outcome, outcome_of
from tests.fault.torture.scripts import (
    SEED,
    a_copy_is_assumed,
    a_surplus_copy_is_damaged,
    manifest_here_and_metadata_there,
    one_pair_comes_back_first,
)
from tests.fault.torture.simulated import by_hand
from tests.fault.torture.simulated.operators import remove_and_drain_often


@contextmanager
def checksums_are_not_compared() -> Iterator[None]:
    with mock.patch.object(verified, "first_bad_block", return_value=None):
        yield


@contextmanager
def copies_are_reported_and_not_made() -> Iterator[None]:
    with mock.patch.object(PeerSink, "write"), mock.patch.object(PeerSink, "finish"):
        yield


@contextmanager
def only_the_first_source_is_asked() -> Iterator[None]:
    def first_only(*arguments: object) -> dict[str, tuple[str, ...]]:
        return {shard: nodes[:1] for shard, nodes in real(*arguments).items()}  # type: ignore[arg-type]

    real = ShardReader._order
    with mock.patch.object(ShardReader, "_order", first_only):
        yield


@contextmanager
def re_protection_only_says_so() -> Iterator[None]:
    with mock.patch.object(Mender, "_copy"), mock.patch.object(repair._Planning, "_add_copies"):
        yield


@contextmanager
def a_prepared_node_decides_alone() -> Iterator[None]:
    """D1: a node that does not answer counts as a node that has not published."""

    def settled(*, is_worked_on: bool, answers: Mapping[str, Answer], **_: object) -> Settlement:
        published = tuple(node for node, answer in answers.items() if answer is Answer.PUBLISHED)
        fate = Fate.COMPLETE if published else Fate.WORKED_ON if is_worked_on else Fate.DROP
        return Settlement(fate, sources=published)

    with mock.patch.object(settle, "settle_staged", settled):
        yield


@contextmanager
def an_assumption_makes_others_give_way() -> Iterator[None]:
    """D2: a version counts as complete if silent nodes are assumed to hold what they were meant to hold."""

    def assumed_whole(
        manifests: Mapping[str, Manifest],
        nodes: Sequence[NodeView],
        *,
        may_be_short: bool,
    ) -> Mapping[str, tuple[Version, ...]]:
        there = [node for node in nodes if node.presence is not Presence.GONE]
        up = {node.node_id for node in there if node.presence is Presence.UP}
        unsure = {node.node_id for node in there if node.holdings is None}
        whole: dict[str, tuple[Version, ...]] = {}
        for save in saves_found(holding for node in there for holding in node.holdings or ()):
            manifest = manifests.get(save.save_id)
            if manifest is not None and see_save(save, manifest, up, unsure, unclaimed=()).may_be_whole:
                whole[save.checkpoint_id] = (*whole.get(save.checkpoint_id, ()), manifest.version)
        return whole

    with (
        mock.patch.object(SeenSave, "is_whole", SeenSave.may_be_whole),
        mock.patch.object(collector, "find_whole_versions", assumed_whole),
    ):
        yield


@contextmanager
def retention_counts_other_runs() -> Iterator[None]:
    """D3: a policy counts all checkpoints in a directory, also those of other lineages."""

    def is_under(manifest: Manifest, policy: Policy) -> bool:
        return scope_of(manifest.checkpoint_id) == policy.scope

    with mock.patch.object(retention, "_is_under", is_under):
        yield


@contextmanager
def files_without_manifest_heal_nothing() -> Iterator[None]:
    """D5: re-protection ignores intact shards in a directory whose manifest is bad."""
    with mock.patch.object(repair, "recognize", return_value=None):
        yield


@contextmanager
def a_surplus_damaged_copy_is_left() -> Iterator[None]:
    """D12: damaged copies are not removed if there are enough intact ones."""

    def add_copies(self: Any, save: SeenSave, shard: str, takers: set[str], **how: bool) -> None:
        if len(save.intact[shard]) < save.manifest.copies:
            real(self, save, shard, takers, **how)

    real = repair._Planning._add_copies
    with mock.patch.object(repair._Planning, "_add_copies", add_copies):
        yield


@contextmanager
def an_agent_finishes_without_holding_the_save() -> Iterator[None]:
    """The coordinator's agent has the outline, but does not report to other nodes that it works on the save."""

    def begin(self: Finisher, outline: Any) -> Any:
        with mock.patch.object(self._store, "lock_save", side_effect=open_nothing):
            return real(self, outline)

    def open_nothing(_: str) -> DescriptorLock:
        return DescriptorLock(os.open(os.devnull, os.O_RDONLY))

    real = Finisher.begin_finish
    with mock.patch.object(Finisher, "begin_finish", begin):
        yield


@contextmanager
def what_dead_ranks_submitted_is_dropped() -> Iterator[None]:
    """An agent whose ranks are dead removes its part of the save without asking other nodes."""

    def drop(service: Any, stale_saves: Sequence[Any], _: object) -> None:
        for stale_save in stale_saves:
            service.abort(stale_save.intent.save_id, stale_save.why, unless_decided=True)

    with mock.patch.object(settle, "settle", drop):
        yield


@contextmanager
def memory_is_submitted_once() -> Iterator[None]:
    """A rank does not submit its shard again after its agent died with it."""
    with mock.patch.object(submission, "_FOLLOW_TRIES", 1):
        yield


@contextmanager
def a_removal_by_hand_is_not_noted() -> Iterator[None]:
    """An agent removes a checkpoint for its user, and does not inform other nodes."""
    note = Journal.append_end

    def forget(self: Journal, save_id: str, end: End, why: str = "", **options: Any) -> None:
        if end not in (End.REMOVING, End.REMOVED):
            note(self, save_id, end, why, **options)

    with mock.patch.object(Journal, "append_end", forget):
        yield


@contextmanager
def a_drained_node_counts_on() -> Iterator[None]:
    """`drain` counts the copies on the drained node as copies that stay."""
    with mock.patch.object(drain, "replace", lambda view, **_: view):
        yield


@contextmanager
def the_clock_orders_saves() -> Iterator[None]:
    """The wall clock of the coordinator's node, and not the sequence number, orders the saves of a run."""

    def order(self: Version) -> tuple[float, int, str]:
        return self.created_unix_s, self.sequence, self.save_id

    with mock.patch.object(Version, "order", property(order)):
        yield


@contextmanager
def an_invitation_ends_by_the_hosts_clock_alone() -> Iterator[None]:
    """If the clock is set forward during a save, the invitation that a rank has posted expires."""
    # `create` would patch a name that is no longer used.
    assert "min" in rights.Tokens.right_of.__code__.co_names
    with mock.patch.object(rights, "min", lambda by_host, _: by_host, create=True):
        yield


@contextmanager
def a_coordinator_that_knows_nothing_has_given_up() -> Iterator[None]:
    """Nodes drop their staged files because a store that has lost its decision reports the save as unknown."""

    def ask(*arguments: Any) -> Answer:
        answer = real(*arguments)
        return Answer.ABORTED if answer is Answer.ABSENT else answer

    real = settle._ask
    with mock.patch.object(settle, "_ask", ask):
        yield


@dataclass(frozen=True)
class Mutant:
    """One defect, and the seed that detects it, with random steps or with a script.

    `was`: its name among the defects of commit adcd94a; "" for a defect that the package never had. `judge` runs
    schedules.
    """

    install: Callable[[], AbstractContextManager[None]]
    seed: int
    was: str = ""
    script: Callable[[Course], None] | None = None
    judge: Callable[[int, Callable[[Course], None] | None], Outcome] = outcome_of

    @property
    def name(self) -> str:
        return self.install.__name__.replace("_", " ")

    def problem_at(self, seed: int) -> str:
        """The failure at this seed while the defect is installed; "" if nothing fails."""
        return self.judge(seed, self.script)[1]


MUTANTS = [
    Mutant(checksums_are_not_compared, 1007),
    Mutant(copies_are_reported_and_not_made, 1000),
    Mutant(only_the_first_source_is_asked, 1007),
    Mutant(re_protection_only_says_so, 1016),
    Mutant(an_agent_finishes_without_holding_the_save, 1010),
    Mutant(what_dead_ranks_submitted_is_dropped, 1006),
    Mutant(memory_is_submitted_once, 1005),
    Mutant(a_prepared_node_decides_alone, SEED, "D1", one_pair_comes_back_first),
    Mutant(an_assumption_makes_others_give_way, SEED, "D2", a_copy_is_assumed),
    Mutant(retention_counts_other_runs, 1010, "D3"),
    Mutant(files_without_manifest_heal_nothing, SEED, "D5", manifest_here_and_metadata_there),
    Mutant(a_surplus_damaged_copy_is_left, SEED, "D12", a_surplus_copy_is_damaged),
    Mutant(a_removal_by_hand_is_not_noted, 1005, script=remove_and_drain_often),
    Mutant(a_drained_node_counts_on, 1116, script=remove_and_drain_often),
    Mutant(the_clock_orders_saves, 1001, judge=odd_clocks_outcome),
    Mutant(an_invitation_ends_by_the_hosts_clock_alone, 1001, judge=odd_clocks_outcome),
    Mutant(a_coordinator_that_knows_nothing_has_given_up, by_hand.SEED, script=by_hand.a_coordinator_goes_back),
]
