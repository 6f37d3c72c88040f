"""The oracle knows what was acknowledged, where each part was seen, what the schedule destroyed, and what must load.

It relies on the disks and on the steps of the schedule, never on the package. A part that was seen on a disk counts as
present until the schedule destroys it. If the package removes it, a check fails.
"""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import torch

from tests.fault.torture.attempt import Attempt
from tests.fault.torture.contents import State, contents
from tests.fault.torture.disks import MANIFEST, METADATA, SHARD, Disks, FoundVersion, holds_tensor_of

MARK_BYTES = 256  # Bytes at the end of the bucket's `.metadata` that contain the mark, which names the save.
FOREIGN = "another run"
MAIN = "the run"


class Violation(AssertionError):
    """A promise of the package was broken."""


class Oracle:
    """Holds all attempts by number, in the order in which they began. `keep_last`: the retention policy of the run.

    `has_true_clocks`: False if the nodes' clocks cannot show which of two saves is newer.
    """

    def __init__(self, disks: Disks, keep_last: int | None, bucket: Path, *, has_true_clocks: bool = True) -> None:
        self._disks = disks
        self._has_true_clocks = has_true_clocks
        self._bucket = bucket
        self._keep_last, self._has_new_policy = keep_last, False
        self._time = 0
        self.attempts: list[Attempt] = []
        self.has_lost_manifests = False

    # Reported by the schedule -------------------------------------------------------------------------------------

    def began(
        self, checkpoint_id: str, ranks: int, run: str = MAIN, *, nodes: Collection[int] = (), is_stock: bool = False
    ) -> Attempt:
        """Records that these nodes begin a save."""
        self._time += 1
        met = self.met_by(checkpoint_id, nodes)
        is_blind = not any(found.run == run and found.readable_on & set(nodes) for found in self.attempts)
        began = len(self.attempts) + 1, checkpoint_id, ranks, run, self._time, is_stock
        attempt = Attempt(*began, met=met, saw=self._seen_with(met), is_blind=is_blind)
        self.attempts.append(attempt)
        return attempt

    def met_by(self, checkpoint_id: str, nodes: Collection[int]) -> frozenset[int]:
        """The attempts of a checkpoint that lie on these nodes."""
        self.look()
        return frozenset(found.number for found in self.of_id(checkpoint_id) if found.readable_on & set(nodes))

    def go_on(self, attempt: Attempt, nodes: Collection[int]) -> None:
        """Records that a save that was paused before its opening continues, and which attempts lie on its nodes now."""
        attempt.met &= self.met_by(attempt.checkpoint_id, nodes)
        attempt.saw = self._seen_with(attempt.met)

    def _seen_with(self, met: Collection[int]) -> frozenset[int]:
        """These attempts, and the attempts that they saw."""
        return frozenset(seen for number in met for seen in (number, *self.attempts[number - 1].saw))

    def end(self, attempt: Attempt, *, is_acknowledged: bool) -> None:
        """Records that a save has returned or raised."""
        self._time += 1
        attempt.ended = self._time
        self.look()
        attempt.is_acknowledged = is_acknowledged
        if is_acknowledged and not attempt.was_whole:
            raise Violation(f"{attempt.checkpoint_id}: attempt {attempt.number} was acknowledged and is not published")

    def lost_disk(self, node: int) -> None:
        """Records that a node's disk is lost."""
        for attempt in self.attempts:
            attempt.removed_on.discard(node)
            self._forget_on(attempt, node)

    def _forget_on(self, attempt: Attempt, node: int) -> None:
        attempt.readable_on.discard(node)
        for nodes in (*attempt.nodes_by_part.values(), *attempt.published_by_part.values()):
            nodes.discard(node)

    def removed(self, save_ids: Collection[str], node: int, *, is_done: bool = True) -> None:
        """Records that an operator has removed these saves from a node, now or in a later step. They need not load any
        more.
        """
        for attempt in self.attempts:
            if attempt.save_id not in save_ids:
                continue
            attempt.was_removed = True
            self._forget_on(attempt, node)
            if is_done:
                attempt.removed_on.add(node)

    def parts_on(self, node: int) -> set[tuple[int, str, bool]]:
        """The parts on a node now: number of the attempt, part, and whether it is published."""
        here = [
            version for version in self._disks.find_versions() if version.node == node and not self._is_alias(version)
        ]
        return {
            (attempt.number, name, version.is_published)
            for version in here
            if (attempt := self.attempt_of(version)) is not None
            for name, content in attempt.parts.items()
            if content and version.files.get(name) == content
        }

    def gone(self, parts: Collection[tuple[int, str, bool]], node: int) -> None:
        """Records that an operator has removed these parts from a node. A part with a second file on the node stays
        present.
        """
        there = {(number, name) for number, name, _ in self.parts_on(node)}
        for number, name, is_published in parts:
            attempt = self.attempts[number - 1]
            self.has_lost_manifests |= name == MANIFEST
            if is_published:
                attempt.published_by_part[name].discard(node)
            if (number, name) not in there:
                attempt.nodes_by_part[name].discard(node)

    def damaged(
        self, version: FoundVersion, attempt: Attempt | None, names: Collection[str], *, is_data_intact: bool
    ) -> None:
        """Records that these files are bad. `is_data_intact`: only a shard's footer is damaged."""
        self.has_lost_manifests |= MANIFEST in names
        for known in self.of_id(version.checkpoint_id) if attempt is None else [attempt]:
            known.is_spoilt |= known.is_stock and not known.save_id and not is_data_intact
            for name in set(names) & set(known.parts):
                known.published_by_part[name].discard(version.node)
                if not is_data_intact:
                    known.nodes_by_part[name].discard(version.node)

    def change_policy(self, keep_last: int | None) -> None:
        """Records that the run continues with another retention policy. Checkpoints that any policy drops may be gone."""
        said = [number for number in (self._keep_last, keep_last) if number is not None]
        self._keep_last, self._has_new_policy = min(said, default=None), True

    # Read from the disks -----------------------------------------------------------------------------------------

    def look(self) -> None:
        """Reads all disks. Must be called before anything is destroyed: otherwise parts that were never read stay
        unknown.
        """
        for attempt in self.attempts:
            attempt.readable_on.clear()
        for version in sorted(self._disks.find_versions(), key=lambda found: found.manifest is None):
            seen = self.attempt_of(version)
            if seen is not None and not self._is_alias(version):
                self._see(seen, version)
        for attempt in self.attempts:
            attempt.was_whole = attempt.was_whole or (
                bool(attempt.parts) and all(attempt.published_by_part[part] for part in attempt.parts)
            )
            mark = self._bucket / attempt.checkpoint_id / METADATA
            if attempt.save_id and mark.is_file() and bytes.fromhex(attempt.save_id) in mark.read_bytes()[-MARK_BYTES:]:
                attempt.is_in_bucket = True

    def attempt_of(self, version: FoundVersion) -> Attempt | None:
        """The attempt that these files belong to. None: that cannot be determined."""
        known = [attempt for attempt in self.attempts if attempt.save_id and attempt.save_id == version.save_id]
        shard = next((name for name in version.files if name not in (MANIFEST, METADATA)), None)
        if known or shard is None or not version.checkpoint_id:
            return known[0] if known else None
        raw = version.paths[shard].read_bytes()
        for attempt in self.of_id(version.checkpoint_id):
            is_possible = version.manifest is None or attempt.is_stock or not attempt.save_id
            if is_possible and holds_tensor_of(raw, attempt.number, attempt.ranks):
                return attempt
        return None

    def alias_ids(self) -> set[str]:
        """Ids of checkpoints that operators have copied to another name. If only some nodes have them, parts may be
        missing.
        """
        return {version.checkpoint_id for version in self._disks.find_versions() if self._is_alias(version)}

    def _is_alias(self, version: FoundVersion) -> bool:
        """Whether an operator has copied the checkpoint to another name. From then on it is a checkpoint of its own."""
        return version.manifest is not None and version.manifest["checkpoint_id"] != version.checkpoint_id

    def _see(self, attempt: Attempt, version: FoundVersion) -> None:
        if attempt.is_stock:
            self._see_stock(attempt, version)
        elif version.manifest is not None and not attempt.parts:
            attempt.save_id, attempt.lineage = version.save_id, version.manifest["lineage"]
            attempt.sequence = version.manifest["sequence"]
            attempt.copies = version.manifest["copies"]
            names = (*version.manifest["shards"], METADATA, MANIFEST)
            attempt.parts = dict.fromkeys(names, "")
            attempt.nodes_by_part = {name: set() for name in names}
            attempt.published_by_part = {name: set() for name in names}
        for name in (
            attempt.parts if not attempt.is_stock or version.manifest is not None or not attempt.save_id else ()
        ):
            if name in version.files:
                attempt.parts[name] = attempt.parts[name] or version.files[name]
        if attempt.parts.get(MANIFEST, "") == version.files.get(MANIFEST):
            attempt.readable_on.add(version.node)
        for name, content in attempt.parts.items():
            if content and version.files.get(name) == content:
                attempt.nodes_by_part[name].add(version.node)
                if version.is_published:
                    attempt.published_by_part[name].add(version.node)

    def _see_stock(self, attempt: Attempt, version: FoundVersion) -> None:
        """Records where files of stock torch lie. They have no checksum, so nothing else can be checked."""
        for name in version.files if version.is_published else ():
            attempt.parts.setdefault(name, "")
        for name in attempt.parts:
            attempt.nodes_by_part.setdefault(name, set())
            attempt.published_by_part.setdefault(name, set())

    # Checks ----------------------------------------------------------------------------------------------

    def of_id(self, checkpoint_id: str) -> Iterator[Attempt]:
        return (attempt for attempt in self.attempts if attempt.checkpoint_id == checkpoint_id)

    def ids(self) -> list[str]:
        """Ids of checkpoints that were acknowledged at any time."""
        return sorted({attempt.checkpoint_id for attempt in self.attempts if attempt.is_acknowledged})

    def is_superseded(self, attempt: Attempt) -> bool:
        """Whether an acknowledged save of the same checkpoint began after this one was over."""
        later = self.of_id(attempt.checkpoint_id)
        return any(one.is_acknowledged and self._gives_way(attempt, one) for one in later)

    def is_replaced(self, attempt: Attempt) -> bool:
        """Whether a later save of the same checkpoint was complete, acknowledged or not. It may have replaced this one."""
        later = (one for one in self.of_id(attempt.checkpoint_id) if self._gives_way(attempt, one))
        return any(one.is_acknowledged or one.was_whole for one in later)

    def _gives_way(self, attempt: Attempt, later: Attempt) -> bool:
        """Whether the later save counts as newer. Nodes behind a partition may have given the earlier one a higher
        number. If neither save saw the other and the numbers do not decide, the clocks do.
        """
        if not is_before(attempt, later):
            return False
        is_identified = self._has_true_clocks or (
            attempt.lineage == later.lineage and attempt.sequence < later.sequence
        )
        return attempt.number in later.saw or (is_identified and not attempt.is_ahead_of(later))

    def has_one_order(self) -> bool:
        """Whether sequence numbers alone order all saves: there is one run, and each number occurs once.

        Checkpoints of stock torch are ordered by their files' times only.
        """
        saved = [(found.lineage, found.sequence) for found in self.attempts if found.parts and not found.is_stock]
        has_stocks_order = sum(found.is_stock for found in self.attempts) > 1
        return len(set(saved)) == len(saved) and len({lineage for lineage, _ in saved}) < 2 and not has_stocks_order

    def conflicting_ids(self) -> set[str]:
        """Ids under which saves of several lineages lie on disks. Each of them keeps its nodes."""
        named = [found for found in self.attempts if found.published_by_part.get(MANIFEST)]
        return {one.checkpoint_id for one in named if self.has_conflicting_run(one)}

    def has_conflicting_run(self, attempt: Attempt) -> bool:
        """Whether a save of another lineage has the same name. Such saves have no order."""
        return any(
            other.published_by_part.get(MANIFEST) and other.lineage != attempt.lineage
            for other in self.of_id(attempt.checkpoint_id)
        )

    def has_nameless(self) -> bool:
        """Whether a checkpoint lies anywhere without a readable manifest."""
        return any(version.is_named and not self._is_identified(version) for version in self._disks.find_versions())

    def forgotten_ids(self) -> set[str]:
        """Ids whose older or retired saves lie only on disks where their manifest was destroyed.

        Without the manifest, nobody can tell that such a save is older, or of this run. So it stays.
        """
        all_versions = list(self._disks.find_versions())
        told = {version.save_id for version in all_versions if self._is_identified(version)}
        nameless = [
            self.attempt_of(version)
            for version in all_versions
            if version.is_named and not self._is_identified(version)
        ]
        found = [attempt for attempt in nameless if attempt is not None and attempt.save_id not in told]
        ids = {attempt.checkpoint_id for attempt in found if self.is_replaced(attempt)}
        return ids | {one.checkpoint_id for one in found if not self.is_kept(one.checkpoint_id)}

    def unidentified_manifests(self) -> set[Path]:
        """The paths of damaged manifests, which do not identify their version."""
        return {version.manifest_path for version in self._disks.find_versions() if not self._is_identified(version)}

    def _is_identified(self, version: FoundVersion) -> bool:
        """Whether its manifest exists as it was written. A manifest with a flipped bit may still be parsed."""
        attempt = self.attempt_of(version)
        if version.manifest is None or attempt is None:
            return False
        return attempt.parts.get(MANIFEST, "") in ("", version.files.get(MANIFEST))

    def current(self, checkpoint_id: str) -> list[Attempt]:
        """The attempts that a load of this id may return: the last acknowledged one, later ones, and concurrent ones."""
        return [attempt for attempt in self.of_id(checkpoint_id) if not self.is_superseded(attempt)]

    def surviving(self, checkpoint_id: str) -> list[Attempt]:
        """Those current attempts of which a load must return one: acknowledged, or published so far that they took its
        place.
        """
        return [found for found in self.current(checkpoint_id) if found.is_acknowledged or found.was_whole]

    def is_kept(self, checkpoint_id: str) -> bool:
        """Whether the policy keeps a checkpoint, even if it counted all later saves that failed."""
        acknowledged = [found for found in self.surviving(checkpoint_id) if found.is_acknowledged]
        if self._keep_last is None or not acknowledged:
            return bool(acknowledged)
        last = acknowledged[-1]
        over = [found for found in self.surviving(checkpoint_id) if found.run == MAIN and last.number in found.saw]
        if last.run != MAIN and over:  # It was overwritten, and is kept or dropped with its replacement.
            last = over[-1]
        ours = [attempt for attempt in self.attempts if attempt.run == MAIN and attempt.parts]
        may_be = [one for one in self.attempts if one.run == MAIN and one.is_blind and not one.parts]
        if last.run != MAIN and not any(attempt.lineage == last.lineage for attempt in ours) and not may_be:
            return True  # No job of the run has continued the other run's checkpoints.
        counted = ours if last.run == MAIN else [one for one in self.attempts if one.lineage == last.lineage]
        later = {one.checkpoint_id for one in counted if not is_before(one, last) or one.is_ahead_of(last)}
        return len(later - {checkpoint_id}) < self._keep_last and not last.is_stock

    def find_removed_by_operators(self) -> set[str]:
        """Ids of checkpoints that no node repairs any more. An operator removed them, or the checkpoint for which
        retention dropped them, or changed the policy without ranks on all nodes.
        """
        removed = {found.checkpoint_id for found in self.attempts if found.was_removed}
        if not (removed or self._has_new_policy):
            return set()
        return removed | {one.checkpoint_id for one in self.attempts if not self.is_kept(one.checkpoint_id)}

    def must_load(self, checkpoint_id: str, nodes: Collection[int] | None = None, *, with_bucket: bool = False) -> bool:
        """Whether a load by these nodes must find the checkpoint now. None: at the end, with every disk back and all
        work done.
        """
        surviving = self.surviving(checkpoint_id)
        if not self.is_kept(checkpoint_id) or any(attempt.ended is None for attempt in self.of_id(checkpoint_id)):
            return False
        conflicting_runs = self._find_conflicting_runs(checkpoint_id, {attempt.lineage for attempt in surviving})
        if (
            conflicting_runs and self.find_removed_by_operators()
        ):  # The node may have lost everything about its run, and started a new one.
            return False
        found = (*surviving, *conflicting_runs)
        if any(attempt.is_spoilt or attempt.was_removed for attempt in found):
            return False
        return all(attempt.has_all_parts(nodes) or (with_bucket and attempt.is_in_bucket) for attempt in found)

    def _find_conflicting_runs(self, checkpoint_id: str, lineages: Collection[str]) -> list[Attempt]:
        """Saves of other lineages that have the name on a node, complete or not. A load takes the newest lineage."""
        named = [found for found in self.current(checkpoint_id) if found.published_by_part.get(MANIFEST)]
        return [found for found in named if found.lineage not in lineages]

    def newest(self, nodes: Collection[int] | None = None, *, with_bucket: bool = False) -> Attempt | None:
        """The newest acknowledged save that must load. A load of "latest" must return it, or a newer one.

        None if that is undecided: the newest one is unreachable and several runs have a newest one, or nodes behind a
        partition have saved an older one under a higher number.
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
        """Whether a load may first try a later save, and find it damaged."""
        return any(later.parts for later in self.attempts if later.began > attempt.began)

    def check_copies(self, attempt: Attempt, nodes: int) -> None:
        """Raises Violation: the save reported all copies of a shard as made, but fewer disks have it."""
        shards, wanted = (
            [name for name in attempt.parts if name not in (MANIFEST, METADATA)],
            min(attempt.copies, nodes),
        )
        short = {name: sorted(found) for name in shards if len(found := attempt.nodes_by_part[name]) < wanted}
        if short:
            raise Violation(f"{attempt.checkpoint_id}: {wanted} copies of each shard are said to be made: {short}")

    def check_goes_on(self, attempt: Attempt) -> None:
        """Raises Violation: an undisturbed save starts a new run, although its nodes had one."""
        earlier = {found.lineage for found in self.attempts[: attempt.number - 1]}
        if not attempt.is_blind and attempt.lineage not in earlier:
            raise Violation(
                f"{attempt.checkpoint_id}: attempt {attempt.number} goes on with no run that its nodes knew"
            )

    def check_stays_removed(self) -> None:
        """Raises Violation: a checkpoint that an operator removed from a node lies there again."""
        for version in self._disks.find_versions():
            attempt = self.attempt_of(version)
            if attempt is not None and version.node in attempt.removed_on:
                raise Violation(
                    f"attempt {attempt.number} was removed from node {version.node}, and is in {version.place}"
                )

    def check_files(self, kept_for_loads: Collection[int]) -> None:
        """Raises Violation: a file differs from the saved one, although everything was reported as repaired.

        Checkpoints that are kept only for running loads are not repaired. Damage in stock torch's files cannot be
        detected, as they have no checksum.
        """
        left = self.find_removed_by_operators()
        for version in self._disks.find_versions():
            attempt = self.attempt_of(version) if version.is_named and version.checkpoint_id not in left else None
            if attempt is None or attempt.number in kept_for_loads or (attempt.is_stock and not attempt.save_id):
                continue
            parts = attempt.parts
            bad = [name for name, content in version.files.items() if content != (parts.get(name) or content)]
            if bad and not self._passes_for_stocks(version, parts):
                raise Violation(f"{bad} of {version.checkpoint_id} are damaged on node {version.node}, and stay so")

    def _passes_for_stocks(self, version: FoundVersion, parts: Mapping[str, str]) -> bool:
        """Whether nothing identifies the owner of these files: no manifest and no footer here, and no manifest on
        another node.
        """
        is_identified = any(
            parts.get(name) == content for name, content in version.files.items() if name.endswith(SHARD)
        )
        told = {found.files.get(MANIFEST) for found in self._disks.find_versions() if self._is_identified(found)}
        return MANIFEST not in version.files and not is_identified and parts.get(MANIFEST) not in told

    def check_found(self, checkpoint_id: str, number: int, state: State) -> None:
        """Raises Violation: the loaded state is not bit for bit the state of one attempt."""
        if not 0 < number <= len(self.attempts):
            raise Violation(f"{checkpoint_id}: loaded attempt {number}, which never was")
        wanted = contents(number, self.attempts[number - 1].ranks)
        if state.keys() != wanted.keys() or not all(torch.equal(state[name], wanted[name]) for name in wanted):
            raise Violation(f"{checkpoint_id}: wrong bytes of attempt {number}")


def is_before(attempt: Attempt, other: Attempt) -> bool:
    """Whether one attempt was over when the other began. Of two concurrent attempts, either may be newer."""
    return attempt.ended is not None and attempt.ended < other.began
