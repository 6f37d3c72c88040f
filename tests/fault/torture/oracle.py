"""The oracle: what was acknowledged, where its parts were seen, what the schedule itself destroyed, and what must load.

It goes by the disks and by what the schedule did, never by what the package says. A part of a save that was seen on a disk
counts as being there until the schedule destroys it: if the package removes it, that is the package's affair.
"""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import torch

from tests.fault.torture.attempt import Attempt
from tests.fault.torture.contents import State, contents
from tests.fault.torture.disks import MANIFEST, METADATA, SHARD, Disks, Lying, holds_tensor_of

MARK_BYTES = 256  # the mark lies in the last so many of the bucket's `.metadata`, and names the save
FOREIGN = "another run"
MAIN = "the run"


class Violation(AssertionError):
    """A promise of the package was broken."""


class Oracle:
    """Knows the attempts by number, in the order in which they began. `keep_last`: the policy of the run.

    `has_true_clocks`: else no clock tells which of two saves is the newer one, where nothing but clocks can.
    """

    def __init__(self, disks: Disks, keep_last: int | None, bucket: Path, *, has_true_clocks: bool = True) -> None:
        self._disks = disks
        self._has_true_clocks = has_true_clocks
        self._bucket = bucket
        self._keep_last, self._has_new_policy = keep_last, False
        self._time = 0
        self.attempts: list[Attempt] = []
        self.has_lost_manifests = False

    # What the schedule tells -------------------------------------------------------------------------------------

    def began(
        self, checkpoint_id: str, ranks: int, run: str = MAIN, *, nodes: Collection[int] = (), is_stock: bool = False
    ) -> Attempt:
        """A save by these nodes begins."""
        self._time += 1
        met = self.met_by(checkpoint_id, nodes)
        is_blind = not any(found.run == run and found.readable_on & set(nodes) for found in self.attempts)
        began = len(self.attempts) + 1, checkpoint_id, ranks, run, self._time, is_stock
        attempt = Attempt(*began, met=met, saw=self._seen_with(met), is_blind=is_blind)
        self.attempts.append(attempt)
        return attempt

    def met_by(self, checkpoint_id: str, nodes: Collection[int]) -> frozenset[int]:
        """The saves of a checkpoint that lie on these nodes."""
        self.look()
        return frozenset(found.number for found in self.of_id(checkpoint_id) if found.readable_on & set(nodes))

    def go_on(self, attempt: Attempt, nodes: Collection[int]) -> None:
        """A save that had paused before it was opened goes on, and meets what lies there still."""
        attempt.met &= self.met_by(attempt.checkpoint_id, nodes)
        attempt.saw = self._seen_with(attempt.met)

    def _seen_with(self, met: Collection[int]) -> frozenset[int]:
        """These saves, and those that they saw."""
        return frozenset(seen for number in met for seen in (number, *self.attempts[number - 1].saw))

    def end(self, attempt: Attempt, *, is_acknowledged: bool) -> None:
        """A save returned, or raised."""
        self._time += 1
        attempt.ended = self._time
        self.look()
        attempt.is_acknowledged = is_acknowledged
        if is_acknowledged and not attempt.was_whole:
            raise Violation(f"{attempt.checkpoint_id}: attempt {attempt.number} was acknowledged and is not published")

    def lost_disk(self, node: int) -> None:
        """A node's disk is gone."""
        for attempt in self.attempts:
            attempt.removed_on.discard(node)
            self._forget_on(attempt, node)

    def _forget_on(self, attempt: Attempt, node: int) -> None:
        attempt.readable_on.discard(node)
        for nodes in (*attempt.nodes_by_part.values(), *attempt.published_by_part.values()):
            nodes.discard(node)

    def removed(self, save_ids: Collection[str], node: int, *, is_done: bool = True) -> None:
        """A person has removed these saves from a node, or has them removed there later: no promise says that they load."""
        for attempt in self.attempts:
            if attempt.save_id not in save_ids:
                continue
            attempt.was_removed = True
            self._forget_on(attempt, node)
            if is_done:
                attempt.removed_on.add(node)

    def parts_on(self, node: int) -> set[tuple[int, str, bool]]:
        """What lies on a node now: number of the attempt, part, and whether that is published."""
        here = [lying for lying in self._disks.lying() if lying.node == node and not self._is_alias(lying)]
        return {
            (attempt.number, name, lying.is_published)
            for lying in here
            if (attempt := self.attempt_of(lying)) is not None
            for name, content in attempt.parts.items()
            if content and lying.files.get(name) == content
        }

    def gone(self, parts: Collection[tuple[int, str, bool]], node: int) -> None:
        """A person has taken these parts of saves from a node. What lies there twice is there as long as once."""
        there = {(number, name) for number, name, _ in self.parts_on(node)}
        for number, name, is_published in parts:
            attempt = self.attempts[number - 1]
            self.has_lost_manifests |= name == MANIFEST
            if is_published:
                attempt.published_by_part[name].discard(node)
            if (number, name) not in there:
                attempt.nodes_by_part[name].discard(node)

    def damaged(self, lying: Lying, attempt: Attempt | None, names: Collection[str], *, is_data_intact: bool) -> None:
        """These files are bad now. `is_data_intact`: only what the package put behind the data of a shard is bad."""
        self.has_lost_manifests |= MANIFEST in names
        for known in self.of_id(lying.checkpoint_id) if attempt is None else [attempt]:
            known.is_spoilt |= known.is_stock and not known.save_id and not is_data_intact
            for name in set(names) & set(known.parts):
                known.published_by_part[name].discard(lying.node)
                if not is_data_intact:
                    known.nodes_by_part[name].discard(lying.node)

    def change_policy(self, keep_last: int | None) -> None:
        """The run goes on with another policy: what any of them gives up may be gone."""
        said = [number for number in (self._keep_last, keep_last) if number is not None]
        self._keep_last, self._has_new_policy = min(said, default=None), True

    # What the disks tell -----------------------------------------------------------------------------------------

    def look(self) -> None:
        """Reads all disks. To be called before anything is destroyed, else what was there is not known."""
        for attempt in self.attempts:
            attempt.readable_on.clear()
        for lying in sorted(self._disks.lying(), key=lambda found: found.manifest is None):
            seen = self.attempt_of(lying)
            if seen is not None and not self._is_alias(lying):
                self._see(seen, lying)
        for attempt in self.attempts:
            attempt.was_whole = attempt.was_whole or (
                bool(attempt.parts) and all(attempt.published_by_part[part] for part in attempt.parts)
            )
            mark = self._bucket / attempt.checkpoint_id / METADATA
            if attempt.save_id and mark.is_file() and bytes.fromhex(attempt.save_id) in mark.read_bytes()[-MARK_BYTES:]:
                attempt.is_in_bucket = True

    def attempt_of(self, lying: Lying) -> Attempt | None:
        """Of which attempt these files are; None if that cannot be seen."""
        known = [attempt for attempt in self.attempts if attempt.save_id and attempt.save_id == lying.save_id]
        shard = next((name for name in lying.files if name not in (MANIFEST, METADATA)), None)
        if known or shard is None or not lying.checkpoint_id:
            return known[0] if known else None
        raw = lying.paths[shard].read_bytes()
        for attempt in self.of_id(lying.checkpoint_id):
            is_possible = lying.manifest is None or attempt.is_stock or not attempt.save_id
            if is_possible and holds_tensor_of(raw, attempt.number, attempt.ranks):
                return attempt
        return None

    def alias_ids(self) -> set[str]:
        """Checkpoints that are people's copies of others. Of those that lie on some nodes only, parts may be missing."""
        return {lying.checkpoint_id for lying in self._disks.lying() if self._is_alias(lying)}

    def _is_alias(self, lying: Lying) -> bool:
        """Whether a person has given a copy of a checkpoint another name: it is another checkpoint from then on."""
        return lying.manifest is not None and lying.manifest["checkpoint_id"] != lying.checkpoint_id

    def _see(self, attempt: Attempt, lying: Lying) -> None:
        if attempt.is_stock:
            self._see_stock(attempt, lying)
        elif lying.manifest is not None and not attempt.parts:
            attempt.save_id, attempt.lineage = lying.save_id, lying.manifest["lineage"]
            attempt.sequence = lying.manifest["sequence"]
            attempt.copies = lying.manifest["copies"]
            names = (*lying.manifest["shards"], METADATA, MANIFEST)
            attempt.parts = dict.fromkeys(names, "")
            attempt.nodes_by_part = {name: set() for name in names}
            attempt.published_by_part = {name: set() for name in names}
        for name in attempt.parts if not attempt.is_stock or lying.manifest is not None or not attempt.save_id else ():
            if name in lying.files:
                attempt.parts[name] = attempt.parts[name] or lying.files[name]
        if attempt.parts.get(MANIFEST, "") == lying.files.get(MANIFEST):
            attempt.readable_on.add(lying.node)
        for name, content in attempt.parts.items():
            if content and lying.files.get(name) == content:
                attempt.nodes_by_part[name].add(lying.node)
                if lying.is_published:
                    attempt.published_by_part[name].add(lying.node)

    def _see_stock(self, attempt: Attempt, lying: Lying) -> None:
        """Files of stock torch have no checksum: which of them lie where is all that can be seen."""
        for name in lying.files if lying.is_published else ():
            attempt.parts.setdefault(name, "")
        for name in attempt.parts:
            attempt.nodes_by_part.setdefault(name, set())
            attempt.published_by_part.setdefault(name, set())

    # What must hold ----------------------------------------------------------------------------------------------

    def of_id(self, checkpoint_id: str) -> Iterator[Attempt]:
        return (attempt for attempt in self.attempts if attempt.checkpoint_id == checkpoint_id)

    def ids(self) -> list[str]:
        """Checkpoints that were acknowledged at any time."""
        return sorted({attempt.checkpoint_id for attempt in self.attempts if attempt.is_acknowledged})

    def is_superseded(self, attempt: Attempt) -> bool:
        """Whether a save of the same checkpoint was acknowledged that began when this one was over."""
        later = self.of_id(attempt.checkpoint_id)
        return any(one.is_acknowledged and self._gives_way(attempt, one) for one in later)

    def is_replaced(self, attempt: Attempt) -> bool:
        """Whether a save of the same checkpoint that began later was whole, acknowledged or not: it may have its place."""
        later = (one for one in self.of_id(attempt.checkpoint_id) if self._gives_way(attempt, one))
        return any(one.is_acknowledged or one.was_whole for one in later)

    def _gives_way(self, attempt: Attempt, later: Attempt) -> bool:
        """Whether a later save is the newer one. Nodes that were cut off may have saved the other one under a higher
        number; and where neither saw the other, nor numbers tell, clocks do."""
        if not is_before(attempt, later):
            return False
        is_told = self._has_true_clocks or (attempt.lineage == later.lineage and attempt.sequence < later.sequence)
        return attempt.number in later.saw or (is_told and not attempt.is_ahead_of(later))

    def has_one_order(self) -> bool:
        """Whether numbers tell the order of all saves, and nothing goes by clocks: one run, and no number twice.

        Checkpoints of stock torch have their files' times, and no other order.
        """
        saved = [(found.lineage, found.sequence) for found in self.attempts if found.parts and not found.is_stock]
        has_stocks_order = sum(found.is_stock for found in self.attempts) > 1
        return len(set(saved)) == len(saved) and len({lineage for lineage, _ in saved}) < 2 and not has_stocks_order

    def conflicting_ids(self) -> set[str]:
        """Checkpoints of which saves of several lineages have the name on disks: each keeps its nodes."""
        named = [found for found in self.attempts if found.published_by_part.get(MANIFEST)]
        return {one.checkpoint_id for one in named if self.has_conflicting_run(one)}

    def has_conflicting_run(self, attempt: Attempt) -> bool:
        """Whether a save of another lineage has the name: they have no order."""
        return any(
            other.published_by_part.get(MANIFEST) and other.lineage != attempt.lineage
            for other in self.of_id(attempt.checkpoint_id)
        )

    def has_nameless(self) -> bool:
        """Whether a checkpoint lies anywhere whose manifest is not there, or cannot be read."""
        return any(lying.is_named and not self._is_told(lying) for lying in self._disks.lying())

    def forgotten_ids(self) -> set[str]:
        """Checkpoints of which an older or retired save lies on a disk whose manifest was destroyed, and nowhere else.

        What it is cannot be known without that: not that it is the older one, nor that it is of this run. It stays.
        """
        all_lying = list(self._disks.lying())
        told = {lying.save_id for lying in all_lying if self._is_told(lying)}
        nameless = [self.attempt_of(lying) for lying in all_lying if lying.is_named and not self._is_told(lying)]
        found = [attempt for attempt in nameless if attempt is not None and attempt.save_id not in told]
        ids = {attempt.checkpoint_id for attempt in found if self.is_replaced(attempt)}
        return ids | {one.checkpoint_id for one in found if not self.is_kept(one.checkpoint_id)}

    def untold_manifests(self) -> set[Path]:
        """The manifests of versions of which they do not tell what they are."""
        return {lying.manifest_path for lying in self._disks.lying() if not self._is_told(lying)}

    def _is_told(self, lying: Lying) -> bool:
        """Whether its manifest is there as it was written: a flipped bit may leave one that can be parsed."""
        attempt = self.attempt_of(lying)
        if lying.manifest is None or attempt is None:
            return False
        return attempt.parts.get(MANIFEST, "") in ("", lying.files.get(MANIFEST))

    def current(self, checkpoint_id: str) -> list[Attempt]:
        """What may be found under an id: acknowledged last, or later, or at the same time."""
        return [attempt for attempt in self.of_id(checkpoint_id) if not self.is_superseded(attempt)]

    def surviving(self, checkpoint_id: str) -> list[Attempt]:
        """Those of them of which one must be found: acknowledged, or published so far that they took its place."""
        return [found for found in self.current(checkpoint_id) if found.is_acknowledged or found.was_whole]

    def is_kept(self, checkpoint_id: str) -> bool:
        """Whether the policy keeps a checkpoint, however many of the later saves that failed it may have counted."""
        acknowledged = [found for found in self.surviving(checkpoint_id) if found.is_acknowledged]
        if self._keep_last is None or not acknowledged:
            return bool(acknowledged)
        last = acknowledged[-1]
        over = [found for found in self.surviving(checkpoint_id) if found.run == MAIN and last.number in found.saw]
        if last.run != MAIN and over:  # it was overwritten, and goes with what took its place
            last = over[-1]
        ours = [attempt for attempt in self.attempts if attempt.run == MAIN and attempt.parts]
        may_be = [one for one in self.attempts if one.run == MAIN and one.is_blind and not one.parts]
        if last.run != MAIN and not any(attempt.lineage == last.lineage for attempt in ours) and not may_be:
            return True  # no job of the run has gone on with the other one's checkpoints, nor begun to
        counted = ours if last.run == MAIN else [one for one in self.attempts if one.lineage == last.lineage]
        later = {one.checkpoint_id for one in counted if not is_before(one, last) or one.is_ahead_of(last)}
        return len(later - {checkpoint_id}) < self._keep_last and not last.is_stock

    def find_left_by_people(self) -> set[str]:
        """Checkpoints that no node makes whole any more: a person has removed them, or what retention gave them up for, or
        has changed the policy, which nodes without ranks have not heard from their own."""
        removed = {found.checkpoint_id for found in self.attempts if found.was_removed}
        if not (removed or self._has_new_policy):
            return set()
        return removed | {one.checkpoint_id for one in self.attempts if not self.is_kept(one.checkpoint_id)}

    def must_load(self, checkpoint_id: str, nodes: Collection[int] | None = None, *, with_bucket: bool = False) -> bool:
        """Whether a load by these nodes must find it now. None: in the end, when every disk is back and all had time."""
        surviving = self.surviving(checkpoint_id)
        if not self.is_kept(checkpoint_id) or any(attempt.ended is None for attempt in self.of_id(checkpoint_id)):
            return False
        conflicting_runs = self._find_conflicting_runs(checkpoint_id, {attempt.lineage for attempt in surviving})
        if (
            conflicting_runs and self.find_left_by_people()
        ):  # all that a node knew of its run may have been removed: it began anew
            return False
        found = (*surviving, *conflicting_runs)
        if any(attempt.is_spoilt or attempt.was_removed for attempt in found):
            return False
        return all(attempt.has_all_parts(nodes) or (with_bucket and attempt.is_in_bucket) for attempt in found)

    def _find_conflicting_runs(self, checkpoint_id: str, lineages: Collection[str]) -> list[Attempt]:
        """Saves of other lineages that have the name on a node, whole or not: a load takes the newest lineage."""
        named = [found for found in self.current(checkpoint_id) if found.published_by_part.get(MANIFEST)]
        return [found for found in named if found.lineage not in lineages]

    def newest(self, nodes: Collection[int] | None = None, *, with_bucket: bool = False) -> Attempt | None:
        """The newest acknowledged save that must load: "latest" has to give it, or one that is not older.

        None where that cannot be said: the newest of all is out of reach, and several runs have a newest; or nodes that
        were cut off have saved an older one under a higher number.
        """
        acknowledged = [attempt for attempt in self.attempts if attempt.is_acknowledged and not attempt.is_stock]
        surviving = [attempt for attempt in acknowledged if not self.is_superseded(attempt)]
        newest_first = sorted(surviving, key=lambda found: found.began, reverse=True)
        if not self._has_true_clocks and not self.has_one_order():
            return None
        for attempt in newest_first:
            if attempt.lineage != newest_first[0].lineage:
                return None
            if any(one.is_ahead_of(attempt) and one.began < attempt.began for one in surviving):
                return None
            if self.must_load(attempt.checkpoint_id, nodes, with_bucket=with_bucket):
                return attempt
            if len({other.run for other in self.attempts}) > 1:
                return None
        return None

    def has_newer(self, attempt: Attempt) -> bool:
        """Whether any later save came so far that a load may take it first, and find that it is damaged."""
        return any(later.parts for later in self.attempts if later.began > attempt.began)

    def check_copies(self, attempt: Attempt, nodes: int) -> None:
        """Raises Violation: of so many nodes, too few disks have a shard of which all copies were said to be made."""
        shards, wanted = (
            [name for name in attempt.parts if name not in (MANIFEST, METADATA)],
            min(attempt.copies, nodes),
        )
        short = {name: sorted(found) for name in shards if len(found := attempt.nodes_by_part[name]) < wanted}
        if short:
            raise Violation(f"{attempt.checkpoint_id}: {wanted} copies of each shard are said to be made: {short}")

    def check_goes_on(self, attempt: Attempt) -> None:
        """Raises Violation: a save that nothing disturbed begins a run, although its nodes had one."""
        earlier = {found.lineage for found in self.attempts[: attempt.number - 1]}
        if not attempt.is_blind and attempt.lineage not in earlier:
            raise Violation(
                f"{attempt.checkpoint_id}: attempt {attempt.number} goes on with no run that its nodes knew"
            )

    def check_stays_removed(self) -> None:
        """Raises Violation: what a person removed from a node lies there again."""
        for lying in self._disks.lying():
            attempt = self.attempt_of(lying)
            if attempt is not None and lying.node in attempt.removed_on:
                raise Violation(f"attempt {attempt.number} was removed from node {lying.node}, and is in {lying.place}")

    def check_files(self, kept_for_loads: Collection[int]) -> None:
        """Raises Violation: a file of a checkpoint is not as it was saved, where all were said to be mended.

        What goes once the loads are over that were told to read it is not mended any more. Stock torch's files have no
        checksum: what is bad in them no one can know.
        """
        left = self.find_left_by_people()
        for lying in self._disks.lying():
            attempt = self.attempt_of(lying) if lying.is_named and lying.checkpoint_id not in left else None
            if attempt is None or attempt.number in kept_for_loads or (attempt.is_stock and not attempt.save_id):
                continue
            parts = attempt.parts
            bad = [name for name, content in lying.files.items() if content != (parts.get(name) or content)]
            if bad and not self._passes_for_stocks(lying, parts):
                raise Violation(f"{bad} of {lying.checkpoint_id} are damaged on node {lying.node}, and stay so")

    def _passes_for_stocks(self, lying: Lying, parts: Mapping[str, str]) -> bool:
        """Whether nothing tells whose it is: no manifest and no shard's footer here, and its manifest on no other node."""
        is_told = any(parts.get(name) == content for name, content in lying.files.items() if name.endswith(SHARD))
        told = {found.files.get(MANIFEST) for found in self._disks.lying() if self._is_told(found)}
        return MANIFEST not in lying.files and not is_told and parts.get(MANIFEST) not in told

    def check_found(self, checkpoint_id: str, number: int, state: State) -> None:
        """Raises Violation: what was loaded is not bit for bit what one attempt saved."""
        if not 0 < number <= len(self.attempts):
            raise Violation(f"{checkpoint_id}: loaded attempt {number}, which never was")
        wanted = contents(number, self.attempts[number - 1].ranks)
        if state.keys() != wanted.keys() or not all(torch.equal(state[name], wanted[name]) for name in wanted):
            raise Violation(f"{checkpoint_id}: wrong bytes of attempt {number}")


def is_before(attempt: Attempt, other: Attempt) -> bool:
    """Whether an attempt was over when the other began. Of two that overlap either may be the newer one."""
    return attempt.ended is not None and attempt.ended < other.began
