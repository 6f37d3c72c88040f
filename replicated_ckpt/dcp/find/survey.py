"""The survey before a load: the present content of all reachable stores, and the save that the requested id means."""

import contextlib
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any
from urllib.parse import urlencode

from replicated_ckpt.config import NEWEST_LINEAGE
from replicated_ckpt.core.inventory import Holding, LineageFound, SaveFound, saves_found
from replicated_ckpt.core.layout import MANIFEST_NAME, METADATA_NAME, OBJECT_NODE
from replicated_ckpt.core.manifest import Manifest, decode_manifest
from replicated_ckpt.core.reading.newest import Newest
from replicated_ckpt.core.reading.unmanaged_files import UnmanagedCheckpoint, UnmanagedSave
from replicated_ckpt.core.upkeep.marks import NO_MARKS, Marks, merge_marks
from replicated_ckpt.core.upkeep.policy import scope_of
from replicated_ckpt.core.upkeep.unclaimed_files import UnclaimedFiles, note_lost_manifests, with_unclaimed_files
from replicated_ckpt.dcp.agreement.node_post import SeenStore
from replicated_ckpt.dcp.find import absence
from replicated_ckpt.dcp.find.absence import SkippedSave, describe_silent, describe_skipped, find_unread
from replicated_ckpt.dcp.find.bucket_look import LOOK_WITHIN_S, BucketLook, InBucket
from replicated_ckpt.dcp.find.choice import Guard, choose_lineage, describe_rejected, note_newest_run
from replicated_ckpt.errors import (
    CheckpointNotCommitted,
    CheckpointNotFound,
    CheckpointRejected,
    ManifestVersionUnknown,
    ObjectMissing,
    ReplicatedCkptError,
    ShardLost,
    StoreUnavailable,
)
from replicated_ckpt.node.peers.unmanaged_audit import UnmanagedLook
from replicated_ckpt.node.peers.watch import NodeHoldings, parse_node_holdings
from replicated_ckpt.node.state.damage import DamageBook
from replicated_ckpt.node.state.mark_book import MarkBook
from replicated_ckpt.stores.bucket.bucket import OF_NEWER_FORMAT, Bucket, BucketSave, manifest_in
from replicated_ckpt.stores.files.durable import raise_shortage
from replicated_ckpt.stores.files.existence import read_plain
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.local.unclaimed import UnclaimedFilesReader
from replicated_ckpt.stores.peer.answer import file_path
from replicated_ckpt.stores.peer.client import AgentAddress, AgentClient
from replicated_ckpt.stores.peer.reach import is_time_out
from replicated_ckpt.stores.threads import FanOut

log = logging.getLogger(__name__)

_HINT = (
    "Bring back the nodes that were not reached: only rank 0's node has .metadata. If all answered, the save "
    "never ended."
)


def unmanaged_save(
    look: UnmanagedLook,
    asked: Newest | str,
    ours: Collection[str],
    searched: Sequence[str],
    because: ReplicatedCkptError,
) -> UnmanagedSave:
    """The stock checkpoint that `asked` means, an id or "latest". `because`: why no checkpoint of this package is loaded.

    An explicit id gives all files that are left, because a load may need only these. "latest" gives the newest
    checkpoint with every shard, by the time of its `.metadata`.

    Raises:
        CheckpointAmbiguous: nodes contradict each other. CheckpointNotCommitted: there are shards and no metadata.
            ShardLost: "latest", and no checkpoint is whole. `because`: there is no such checkpoint. LatestAmbiguous
    """
    newest = asked if isinstance(asked, Newest) else None
    wanted = asked if isinstance(asked, str) else None
    found = look.checkpoints(wanted, ours)
    if newest is not None:
        newest = newest.choose_directory(checkpoint.checkpoint_id for checkpoint in found)
        found = tuple(checkpoint for checkpoint in found if newest.fits(checkpoint.checkpoint_id))
    lost: ShardLost | None = None
    for checkpoint in found:
        # Without .metadata the items in the shards have no names: the save never ended, or the file is lost.
        if not checkpoint.nodes_with_metadata:
            continue
        save = look.examine(checkpoint).save
        if wanted is not None or not save.missing:
            return save
        owners = {shard: save.manifest.owner_of(shard) for shard in save.missing}
        lost = lost or ShardLost(save.checkpoint_id, owners, [*searched, *save.refused], is_latest=True)
    if lost is None and found and isinstance(because, CheckpointNotFound):
        raise CheckpointNotCommitted(_without_metadata(found[0], searched), _HINT)
    raise lost or because


def _without_metadata(checkpoint: UnmanagedCheckpoint, searched: Sequence[str]) -> str:
    nodes = ", ".join(holding.node_id for holding in checkpoint.holdings)
    return (
        f"Shards of {checkpoint.checkpoint_id!r} lie on node {nodes} without a manifest, and no node that was reached "
        f"has its .metadata. Searched: {'; '.join(searched)}."
    )


def unmanaged_warning(save: UnmanagedSave, because: ReplicatedCkptError | None) -> str:
    """The warning of a load of a stock checkpoint. `because`: for "latest", why no checkpoint of this package is loaded;
    otherwise None.
    """
    newer = f" It is loaded although newer ones exist: {because.message}" if isinstance(because, ShardLost) else ""
    later = ", ".join(save.written_later)
    return (
        f"{save.checkpoint_id} has no manifest: stock torch wrote it, or every node that was reached has lost it. "
        "A shard with this package's checksums at its end is checked with them. In any other shard, only the CRC32s that "
        "torch.save has written are checked. "
        f"{'There are no copies' if save.copies < 2 else f'Each shard was found {save.copies} times'}. "
        + (f"Written later than .metadata, so perhaps by another save: {later}. " if later else "")
        + f"To get checksums and copies, save the loaded state under a new id.{newer}"
    )


SURVEY_TIMEOUT_S = 3.0


@dataclass(frozen=True)
class Survey:
    """The save to load, and where it lies. Every rank of a load uses the same survey."""

    manifest_raw: str
    holdings: tuple[Holding, ...]
    addresses: tuple[AgentAddress, ...]
    """The peers that answered."""
    searched: tuple[str, ...]
    """Each place that was searched."""
    in_bucket: InBucket | None = None
    """None: the save is not in the bucket."""
    unmanaged_warning: str = ""
    """The warning if stock torch wrote the save on the nodes' disks: the manifest then has no checksums."""
    lineages: tuple[LineageFound, ...] = ()
    """The lineages in the directory of the save's id, the chosen one first."""
    sequence_max: int = 0
    """The largest sequence of the chosen lineage."""
    load_id: str = ""
    """The same on all ranks of one load, and another for each load."""
    silent: tuple[str, ...] = ()
    """Nodes that answered at first, and then timed out."""
    skipped: str = ""
    """The warning if a newer save is not whole, or silent nodes may have one."""
    newest_full: str = ""
    """If the save has lost its optimizer: the newest checkpoint of its run that was found with one."""
    restores: int = 0
    """How often the save was restored since the run's newest save, including this load. 0: this load is not counted."""
    guard: str = ""
    """The warning about repeated restores, and about rejected checkpoints."""

    @cached_property
    def manifest(self) -> Manifest:
        return decode_manifest(self.manifest_raw.encode(), "the survey")

    @cached_property
    def found(self) -> SaveFound:
        return saves_found(self.holdings)[0]

    @property
    def is_whole(self) -> bool:
        """Whether every shard and the metadata have a copy."""
        return self.found.is_whole(self.manifest.shard_sizes)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "holdings": [holding.to_json() for holding in self.holdings]}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> "Survey":
        """A coordinator of another release may send unknown fields, which are ignored. Fields that it omits stay empty."""
        values = {each.name: told[each.name] for each in fields(cls) if each.name in told} | {
            "holdings": tuple(Holding.from_json(holding) for holding in told["holdings"]),
            "addresses": tuple(AgentAddress.from_json(address) for address in told["addresses"]),
            "in_bucket": None if told["in_bucket"] is None else InBucket(**told["in_bucket"]),
            "lineages": tuple(LineageFound(**{**one, "nodes": tuple(one["nodes"])}) for one in told["lineages"]),
            **{name: tuple(told.get(name, ())) for name in ("searched", "silent")},
        }
        return cls(**values)


class Surveyor:
    """Reads this node's store and the bucket directly, and the peers' stores through their agents.

    `saves`, `unclaimed` and `newer` are the findings. `listed` has pairs of node and save, and `moved` those of them whose
    manifest was gone when it was asked for. `unanswered` has the peers without an answer, with their errors.
    """

    def __init__(
        self,
        store: LocalStore,
        own_node: str,
        peers: Iterable[AgentAddress],
        bucket: Bucket | None = None,
        expected: Collection[str] = (),
        lineage: str = NEWEST_LINEAGE,
        seen: Mapping[str, SeenStore] = MappingProxyType({}),
        silent: Mapping[str, ReplicatedCkptError] = MappingProxyType({}),
        max_tries: int | None = None,
        *,
        is_restore: bool = False,
    ) -> None:
        """`silent`: the peers that did not answer a moment ago, with their errors; they are not asked.

        `max_tries`: "latest" skips checkpoints that were restored this many times without a later save. `is_restore`: this
        load counts as one restore.
        """
        self._max_tries, self._is_restore, self._marks = max_tries, is_restore, NO_MARKS
        self._silent = silent
        self._seen = {node: store for node, store in seen.items() if node != own_node}  # its own disk is read directly
        self._hung, self._ranks_on = seen.keys(), {*expected}
        self._lineage, self._sequence_max = lineage, 0
        self._lineages: tuple[LineageFound, ...] = ()
        self._expected = {*expected, OBJECT_NODE}  # not the nodes of earlier jobs: those may have been removed
        self.unreached: list[str] = []
        self.listed: set[tuple[str, str]] = set()
        self.moved: set[tuple[str, str]] = set()
        self.unanswered: dict[str, ReplicatedCkptError] = {}
        self._store, self._own_node, self._bucket = store, own_node, bucket
        self._by_node = {peer.node_id: peer for peer in peers}
        self._own_address = self._by_node.pop(own_node, None)
        self._searched: dict[str, str] = {}
        self._damaged, self._in_bucket = dict[str, str](), dict[str, BucketSave]()
        self.newer = absence.NewerSaves()
        self._problems, self._ids = list[str](), set[str]()
        self._newest: Newest | None = None
        self.saves, self.unclaimed = tuple[SaveFound, ...](), list[UnclaimedFiles]()
        self._beside = list[Holding]()

    def survey(self, checkpoint_id: str) -> Survey:
        """The newest save that `checkpoint_id` (or "latest") means.

        A save with a copy of every shard precedes a newer one that not all ranks can read. Such a save lacks a shard, has
        known damage in a shard's only copy, or has metadata that some ranks cannot read. If no save is whole, an
        explicit id still gives its newest save: a load may need only the remaining part. A checkpoint of stock torch
        counts as older than any of this package.

        Raises:
            CheckpointNotFound, CheckpointNotCommitted: there is no such save. ManifestVersionUnknown: only a newer
                version reads it.
            ShardLost: "latest", and no save is whole; or every manifest or mark that lists its parts is damaged.
            LatestAmbiguous: "latest", and several directories of ids have checkpoints.
            CheckpointAmbiguous: files of stock torch are from several runs.
        """
        try:
            return self._survey_once(checkpoint_id)
        except (CheckpointNotFound, ManifestVersionUnknown, ShardLost) as exc:
            return self._survey_unmanaged(checkpoint_id, exc)

    def _survey_unmanaged(self, checkpoint_id: str, because: ReplicatedCkptError) -> Survey:
        look = UnmanagedLook(self._store, self._own_node, self._by_node.values())
        save = unmanaged_save(look, self._newest or checkpoint_id, self._ids, self._places(), because)
        for node, error in look.unreached.items():
            self._searched[node] = f"{self._by_node.pop(node).label}: not reached ({error.message})"
        self._problems += save.refused
        survey = self._survey(save.holdings, save.manifest.encode().decode())
        return replace(survey, unmanaged_warning=unmanaged_warning(save, because if self._newest else None))

    def _survey_once(self, checkpoint_id: str) -> Survey:
        newest = Newest.parse(checkpoint_id)
        wanted = checkpoint_id if newest is None else None
        scope = None if newest is None else newest.directory
        look = None if self._bucket is None else BucketLook(self._bucket, wanted, scope)
        holdings = self._holdings(wanted)
        if look is None:
            return self._choose(checkpoint_id, holdings)
        # A bucket that hangs must not stop a load whose nodes have everything.
        if not look.is_over_within(LOOK_WITHIN_S):
            self._searched[OBJECT_NODE] = f"{look.url}: not reached (no answer within {LOOK_WITHIN_S:.0f} s)"
            with contextlib.suppress(CheckpointNotFound, CheckpointRejected, ManifestVersionUnknown, ShardLost):
                survey = self._choose(checkpoint_id, holdings)
                # If a node has reported a larger sequence, only the bucket may have that save.
                if survey.is_whole and survey.found.sequence >= self._sequence_max:
                    return survey
        return self._choose(checkpoint_id, [*holdings, *self._holdings_in_bucket(look)])

    def _choose(self, checkpoint_id: str, holdings: Sequence[Holding]) -> Survey:
        self.saves = saves_found(holdings)
        self.listed = {(held.node_id, held.save_id) for held in holdings}
        self._ids |= {save.checkpoint_id for save in self.saves}
        self._newest = self._find_directory(checkpoint_id)
        choice = choose_lineage(checkpoint_id, self.saves, self._lineage, self._newest)
        if self._newest is None:
            choice = note_newest_run(choice, checkpoint_id, saves_found(self._beside), self._lineage)
        self._lineages, self._sequence_max = choice.lineages, choice.sequence_max
        passed: list[SkippedSave] = []
        guard, whole = Guard(self._marks, self._sequence_max, self._max_tries), dict[str, Survey]()
        for save in choice.saves:
            forms = self._find_forms(save)
            survey = self._find_whole(forms, passed)
            if survey is None:
                passed.append(self._note_skipped(save, forms))
            elif self._newest is not None and guard.skips(save):
                whole[save.save_id] = survey
            else:
                return self._warn(survey, guard)
        if guard.tried:
            return self._warn(whole[guard.tried[0].save_id], guard)
        guard.raise_if_rejected()
        return self._survey_incomplete(checkpoint_id, passed)

    def _find_whole(
        self, forms: Sequence[tuple[SaveFound, str, Manifest]], passed: Sequence[SkippedSave]
    ) -> Survey | None:
        """The survey of a save by the first of its forms that is whole. None: no form is."""
        for form, raw, manifest in forms:
            bad, seen = form.damaged_copies, with_unclaimed_files(form, manifest, self.unclaimed)
            # Whole is not enough: a rank whose agent hangs reads only its own disk, and needs the metadata there.
            if seen.is_whole(manifest.shard_sizes, bad) and seen.is_described_to(self._ranks_on, self._hung):
                told = describe_skipped(seen, passed, self._places(), self._find_unread())
                if self._newest is not None:
                    told = told or describe_silent(seen, manifest, self._own_node, self._searched)
                survey = self._survey(seen.holdings, raw, seen.save_id)
                return replace(survey, skipped=told, newest_full=self._find_newest_full(manifest))
        return None

    def _note_skipped(self, save: SaveFound, forms: Sequence[tuple[SaveFound, str, Manifest]]) -> SkippedSave:
        if not forms:
            # A manifest was listed, but no copy passes its checks: the load must report that it skips this checkpoint.
            self._damaged.setdefault(save.checkpoint_id, MANIFEST_NAME)
            return SkippedSave(save)
        form, raw, manifest = forms[0]
        return SkippedSave(with_unclaimed_files(form, manifest, self.unclaimed), raw, manifest)

    def _warn(self, survey: Survey, guard: Guard) -> Survey:
        """The survey with the warnings about marks, and for "latest" with the number of this restore."""
        save = survey.found
        if self._newest is not None:
            count = guard.count(save) if self._is_restore else 0
            return replace(survey, restores=count, guard=guard.describe(save, is_restore=self._is_restore))
        return replace(survey, guard=describe_rejected(save)) if self._marks.is_rejected(save.save_id) else survey

    def _survey_incomplete(self, checkpoint_id: str, passed: Sequence[SkippedSave]) -> Survey:
        """The survey of an incomplete save, because no save is whole. Prefers one with any shard. Raises as `survey`."""
        lost = [(one.save, one.raw, one.manifest) for one in passed if one.manifest is not None]
        # The most precise reason first: a newer format, then a damaged manifest, then nothing at all.
        if not lost:
            self.newer.raise_first(self._places(), self._is_wanted)
            unclaimed = [one for one in self.unclaimed if self._is_wanted(one.checkpoint_id)]
            self._problems += note_lost_manifests(unclaimed, self._damaged)
            damaged = {name: file for name, file in self._damaged.items() if self._is_wanted(name)}
            if damaged:
                raise absence.describe_unreadable(damaged, self._places(), is_latest=self._newest is not None)
            raise absence.describe_absence(self._store, checkpoint_id, self._places(), self.unreached, self._ids)
        # A broken save with any shard is of more use than a newer one without.
        save, raw, manifest = min(lost, key=lambda found: not found[0].has_any(found[2].shards))
        if self._newest is not None and not save.has_any(manifest.shards):
            raise absence.describe_lost(manifest, save, self._places())
        return self._survey(save.holdings, raw, save.save_id)

    def _find_forms(self, save: SaveFound) -> list[tuple[SaveFound, str, Manifest]]:
        """The forms of a save, each with its manifest: first with its optimizer, then without, as the holders have them.

        In each form only its own holders' metadata counts. Empty: no holder's manifest passes its checks.
        """
        found: list[tuple[SaveFound, str, Manifest]] = []
        kinds = {holding.is_slim for holding in save.holdings}
        for is_slim in sorted(kinds):
            own = tuple(holding for holding in save.holdings if holding.is_slim is is_slim)
            raw = self._manifest_raw(replace(save, holdings=own))
            if raw is None:
                continue
            manifest = decode_manifest(raw.encode(), "a holder")
            holdings = tuple(
                holding if holding.is_slim is manifest.is_slim else replace(holding, has_metadata=False)
                for holding in save.holdings
            )
            found.append((replace(save, holdings=holdings), raw, manifest))
        return found

    def _find_newest_full(self, manifest: Manifest) -> str:
        """For a save that has lost its optimizer, the newest checkpoint of its run that was seen with one; else ""."""
        if not manifest.is_slim:
            return ""
        seen = [holding for save in self.saves for holding in save.holdings] + self._beside
        slim = {holding.save_id for holding in seen if holding.is_slim}
        full = [
            one for one in seen if one.lineage == manifest.lineage and one.save_id not in slim and not one.is_replaced
        ]
        newest = max(full, key=lambda holding: holding.sequence, default=None)
        return "" if newest is None else newest.checkpoint_id

    def _find_directory(self, checkpoint_id: str) -> Newest | None:
        """The directory that "latest" means, judged by all saves that were seen, readable or not. None: one
        checkpoint's id was asked for.

        Raises LatestAmbiguous.
        """
        newest = Newest.parse(checkpoint_id)
        unread = find_unread(self.unclaimed, ())
        return (
            None if newest is None else newest.choose_directory({*self._ids, *unread, *self._damaged, *self.newer.ids})
        )

    def _is_wanted(self, checkpoint_id: str) -> bool:
        return self._newest is None or self._newest.fits(checkpoint_id)

    def _find_unread(self) -> list[str]:
        """Checkpoints that "latest" may mean, but whose manifest fails its checks on every node that answered."""
        return [name for name in find_unread(self.unclaimed, self._ids) if self._is_wanted(name)]

    def _holdings(self, checkpoint_id: str | None) -> list[Holding]:
        # The scrub may have found damage that a listing by name and size cannot show.
        holdings = [*DamageBook.mark_recorded(self._store, self._store.catalog.holdings(self._own_node, checkpoint_id))]
        if checkpoint_id is not None:
            self._beside += self._store.catalog.newest_of_runs(self._own_node, scope_of(checkpoint_id))
        self.unclaimed += UnclaimedFilesReader(self._store, self._own_node).find_files(checkpoint_id)
        marks = [MarkBook(self._store.root_agent_directory()).read(), *(store.marks for store in self._seen.values())]
        self.newer.record_newer(str(self._store.root), *self._store.catalog.of_newer_format(checkpoint_id))
        self._searched |= absence.name_own_store(self._store, self._own_node)
        path = "/v1/holdings" + ("" if checkpoint_id is None else f"?{urlencode({'checkpoint_id': checkpoint_id})}")

        def ask(node: str) -> NodeHoldings:
            with AgentClient(self._by_node[node], SURVEY_TIMEOUT_S) as client:
                answer = client.call("GET", path)
            return parse_node_holdings(answer, self._by_node[node])

        outcome = FanOut.run([node for node in self._by_node if node not in self._silent], ask)
        outcome.errors.update({node: self._silent[node] for node in self._by_node if node in self._silent})
        holdings += [holding for store in self._seen.values() for holding in store.holdings]
        self.unclaimed += [unclaimed for store in self._seen.values() for unclaimed in store.unclaimed]
        self._searched |= {
            node: f"node {node} only by its own ranks ({store.why})" for node, store in self._seen.items()
        }
        for node, found in outcome.results.items():
            holdings += found.holdings
            self._beside += found.beside
            self.unclaimed += found.unclaimed
            marks.append(found.node_report.marks)
            self._searched[node] = self._by_node[node].label
            self.newer.record_newer(self._searched[node], *found.newer)
        self._marks = merge_marks(marks)
        self.unanswered = dict(outcome.errors)
        for node, error in outcome.errors.items():
            self._not_reached(node, f"{self._by_node[node].label}: not reached ({error.message})")
            # It is not asked again in this load: each request would cost a time-out.
            del self._by_node[node]
        return holdings

    def _holdings_in_bucket(self, look: BucketLook) -> list[Holding]:
        url = look.url
        try:
            found = look.result()
        except ReplicatedCkptError as exc:
            # A bucket that fails does not end the load: the nodes may have everything.
            log.warning("%s is not used: %s", url, exc)
            self._not_reached(OBJECT_NODE, f"{url}: not reached ({exc.message})")
            return []
        self._searched[OBJECT_NODE] = url
        self.newer.record_newer(url, *(save.checkpoint_id for save in found if save.problem == OF_NEWER_FORMAT))
        for save in found:
            # A damaged mark hides one checkpoint; the others in the bucket stay loadable.
            if save.problem:
                self._damaged[save.checkpoint_id] = METADATA_NAME
                self._problems.append(f"{url}/{save.checkpoint_id}/{METADATA_NAME}: {save.problem}")
                log.warning("%s", self._problems[-1])
        self._in_bucket = {save.save_id: save for save in found if not save.problem}
        self._marks = merge_marks([self._marks, Marks({one.save_id: 1 for one in found if one.is_rejected})])
        return [save.holding for save in self._in_bucket.values()]

    def _not_reached(self, node: str, place: str) -> None:
        self._searched[node] = place
        if node in self._expected:
            self.unreached.append(place)

    def _manifest_raw(self, save: SaveFound) -> str | None:
        """The manifest of a save, from the first holder whose copy passes its checks."""
        # A node with a hung agent is left out: no peer can fetch its manifest.
        for holding in sorted((one for one in save.holdings if one.node_id not in self._seen), key=self._distance):
            try:
                if holding.node_id == OBJECT_NODE and self._bucket is not None:
                    raw = manifest_in(self._bucket, self._in_bucket[save.save_id])
                elif holding.node_id == self._own_node:
                    raw = read_plain(self._store.path_of(holding.checkpoint_id, save.save_id, MANIFEST_NAME))
                else:
                    with AgentClient(self._by_node[holding.node_id]) as client:
                        raw = client.fetch("GET", file_path(holding.checkpoint_id, holding.save_id, MANIFEST_NAME))
                # Since the listing, the node may have published a newer save, or dropped the optimizer of this one.
                found = decode_manifest(raw, f"node {holding.node_id}")
                if (found.save_id, found.is_slim) == (save.save_id, holding.is_slim):
                    return raw.decode()
                self.moved.add((holding.node_id, save.save_id))
            except (ReplicatedCkptError, OSError) as exc:
                # A shortage of memory or descriptors is raised: an older save would meet it, too.
                raise_shortage(exc, self._store.root / holding.checkpoint_id / MANIFEST_NAME)
                if isinstance(exc, ObjectMissing | FileNotFoundError):
                    self.moved.add((holding.node_id, save.save_id))
                self.newer.note_refusal(exc, self._searched[holding.node_id], holding.checkpoint_id)
                if isinstance(exc, StoreUnavailable) and is_time_out(exc):
                    self.unanswered[holding.node_id] = exc
                log.warning("manifest of %s on node %s: %s", holding.checkpoint_id, holding.node_id, exc)
                self._problems.append(absence.describe_answer(holding.node_id, exc))
        return None

    def _distance(self, holding: Holding) -> tuple[bool, int]:
        # A silent peer last, as it costs a time-out; the own disk first, the bucket after the peers.
        return holding.node_id in self.unanswered, [self._own_node, holding.node_id, OBJECT_NODE].index(holding.node_id)

    def _survey(self, holdings: tuple[Holding, ...], manifest_raw: str, save_id: str = "") -> Survey:
        own = () if self._own_address is None else (self._own_address,)
        there = self._in_bucket.get(save_id)
        bucket = None if there is None else InBucket.of(there)
        found = manifest_raw, holdings, (*own, *self._by_node.values()), self._places(), bucket
        silent = tuple(self.unanswered)
        return Survey(*found, lineages=self._lineages, sequence_max=self._sequence_max, silent=silent)

    def _places(self) -> tuple[str, ...]:
        return (*self._searched.values(), *self._problems)
