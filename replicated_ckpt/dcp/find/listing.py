"""Lists the checkpoints on this node, on the nodes in its address book and in the bucket, and whether each is complete."""

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from replicated_ckpt.config import NEWEST_LINEAGE
from replicated_ckpt.core.inventory import Holding, SaveFound, saves_found
from replicated_ckpt.core.manifest import Manifest, decode_manifest
from replicated_ckpt.core.reading.newest import Newest
from replicated_ckpt.core.upkeep.unclaimed_files import with_unclaimed_files
from replicated_ckpt.dcp.c10d.world import World
from replicated_ckpt.dcp.find.absence import THERE_ARE_OTHERS
from replicated_ckpt.dcp.find.bucket_look import BucketLook
from replicated_ckpt.dcp.find.choice import choose_lineage
from replicated_ckpt.dcp.find.rendezvous import AgreedError, meet
from replicated_ckpt.dcp.find.survey import Surveyor
from replicated_ckpt.errors import CheckpointNotFound, StoreUnavailable
from replicated_ckpt.node.peers.address_book import PeerBook
from replicated_ckpt.stores.bucket.bucket import Bucket
from replicated_ckpt.stores.local.store import LocalStore

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Listed:
    """One save of the run. `is_whole`: every shard and the metadata have a copy in a place that was reached.

    `sequence` is its place in its lineage. `is_rejected`: "latest" skips it.
    """

    checkpoint_id: str
    created_unix_s: float
    is_whole: bool
    notes: Mapping[str, Any]
    lineage: str = ""
    sequence: int = 0
    is_rejected: bool = False


class _Lister(Surveyor):
    def name(self, checkpoint_id: str) -> tuple[Mapping[str, Manifest | None], str]:
        """All saves under one id, readable or not, in the lineage that a load would choose. And that lineage."""
        choice = choose_lineage(checkpoint_id, saves_found(self._look(checkpoint_id)), self._lineage)
        lineage = choice.saves[0].version.lineage if choice.saves else ""
        return {save.save_id: self._read_manifest(save) for save in choice.saves}, lineage

    def _read_manifest(self, save: SaveFound) -> Manifest | None:
        """The manifest; None if no holder has a copy that passes its checks."""
        raw = self._manifest_raw(save)
        return None if raw is None else decode_manifest(raw.encode(), "a holder")

    def _look(self, checkpoint_id: str | None) -> Sequence[Holding]:
        holdings = self._holdings(checkpoint_id)
        if self._bucket is not None:
            holdings += self._holdings_in_bucket(BucketLook(self._bucket, checkpoint_id))
        return holdings

    def list(self, asked: str) -> tuple[Listed, ...]:
        found, saves, newest = [], saves_found(self._look(None)), Newest.parse(asked)
        assert newest is not None, asked
        newest = newest.choose_directory(save.checkpoint_id for save in saves)
        for save in choose_lineage(asked, saves, self._lineage, newest).saves:
            forms = self._find_forms(save)
            if forms:
                manifest, place = forms[0][2], (save.version.lineage, save.sequence)
                is_whole = any(self._is_whole(form, manifest) for form, _, manifest in forms)
                of_manifest = manifest.created_unix_s, is_whole, manifest.notes
                is_rejected = self._marks.is_rejected(save.save_id)
                found.append(Listed(manifest.checkpoint_id, *of_manifest, *place, is_rejected=is_rejected))
        return tuple(found)

    def _is_whole(self, save: SaveFound, manifest: Manifest) -> bool:
        seen = with_unclaimed_files(save, manifest, self.unclaimed)
        return seen.is_whole(manifest.shard_sizes, seen.damaged_copies)


def list_checkpoints(asked: str, store: LocalStore, bucket: Bucket | None, lineage: str) -> tuple[Listed, ...]:
    """The saves among which a load would choose, newest first. `asked`: "latest", or as "run-a/latest".

    The list lacks the saves of a node or bucket that does not answer.

    Raises:
        LineagesMet, LatestAmbiguous: as for a load.
    """
    return _make_lister(store, bucket, lineage).list(asked)


def name_saves(
    checkpoint_id: str, store: LocalStore, bucket: Bucket | None, lineage: str
) -> tuple[Mapping[str, Manifest | None], str]:
    """All saves under one id in the lineage of the newest, even if incomplete or replaced. And that lineage.

    Each save has its manifest, or None if no place has one that passes its checks.

    Raises:
        LineagesMet: as for a load.
    """
    return _make_lister(store, bucket, lineage).name(checkpoint_id)


def _make_lister(store: LocalStore, bucket: Bucket | None, lineage: str) -> _Lister:
    peers = PeerBook(store.root_agent_directory()).read_all()
    return _Lister(store, store.read_node_id(), peers, bucket, (), lineage)


_told: deque[str] = deque(maxlen=16)
"""The last warnings about checkpoints that are not loaded. Each is logged once, although a restore searches repeatedly."""


def look_up(
    store: LocalStore,
    world: World,
    checkpoint_id: str,
    opened_bucket: Callable[[], Bucket | None],
    lineage: str = NEWEST_LINEAGE,
) -> SaveFound | None:
    """The committed checkpoint that a load of `checkpoint_id`, or "latest", would find now; None if there is none.

    An incomplete checkpoint counts as found. Otherwise a job that finds none would treat a loss as a first start, and
    begin anew.

    Raises as ReplicatedReader.exists and latest; ConfigInvalid, CheckpointIdMismatch: the ranks' arguments are invalid
    or differ.
    """
    try:
        # A look must not pin: no load follows that would end the pin.
        look = replace(world, is_load=False, is_restore=False)
        survey = meet(store, look, checkpoint_id, opened_bucket, lineage=lineage)
    except (AgreedError, CheckpointNotFound) as exc:
        error = exc.error if isinstance(exc, AgreedError) else exc
    else:
        _warn_once(world, survey.skipped)
        return survey.found
    if not isinstance(error, CheckpointNotFound):
        raise error
    newest = Newest.parse(checkpoint_id)
    # Unreached is not absent: `None` would have the job start anew next to its own checkpoint.
    if error.unreached:
        key = checkpoint_id if newest is None else "the newest checkpoint"
        hint = "Bring the node back, as it may have the checkpoint. For a bucket, check its name and the credentials."
        raise StoreUnavailable("; ".join(error.unreached), "look for", key, "no other store has it", hint)
    # A misspelled id would silently start the job anew: this is worth a warning.
    if newest is not None and newest.form and THERE_ARE_OTHERS in error.message:
        _warn_once(world, f"{error.message} A job that restores now would start from the beginning.")
    return None


def _warn_once(world: World, told: str) -> None:
    # One rank logs for all; each of them came to the same result.
    if told and told not in _told and world.is_coordinator:
        log.warning("%s", told)
        _told.append(told)
