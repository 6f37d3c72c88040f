"""The list of checkpoints: what this node and the nodes that it has met hold, and the bucket, and which of it is whole."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from replicated_ckpt.agent.peers.address_book import PeerBook
from replicated_ckpt.core.inventory import Holding, SaveFound, saves_found
from replicated_ckpt.core.manifest import Manifest, decode_manifest
from replicated_ckpt.core.reading.newest import Newest
from replicated_ckpt.core.upkeep.remains import with_remains
from replicated_ckpt.dcp.find.bucket_look import BucketLook
from replicated_ckpt.dcp.find.lineage_choice import choose_lineage
from replicated_ckpt.dcp.find.survey import Surveyor
from replicated_ckpt.stores.bucket.bucket import Bucket
from replicated_ckpt.stores.local.store import LocalStore


@dataclass(frozen=True)
class Listed:
    """One save of the run. `is_whole`: every shard, and the metadata, has a copy where it was looked.

    `sequence` is its place in its lineage.
    """

    checkpoint_id: str
    created_unix_s: float
    is_whole: bool
    notes: Mapping[str, Any]
    lineage: str = ""
    sequence: int = 0


class _Lister(Surveyor):
    def name(self, checkpoint_id: str) -> tuple[Mapping[str, Manifest | None], str]:
        """The saves under one id, readable or not, of the lineage that a load of this id would choose; and that lineage."""
        choice = choose_lineage(checkpoint_id, saves_found(self._look(checkpoint_id)), self._lineage)
        lineage = choice.saves[0].version.lineage if choice.saves else ""
        return {save.save_id: self._read_manifest(save) for save in choice.saves}, lineage

    def _read_manifest(self, save: SaveFound) -> Manifest | None:
        """None: no holder's copy is believed."""
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
            manifest = self._read_manifest(save)
            if manifest is not None:
                seen = with_remains(save, manifest, self.remains)
                place = save.version.lineage, save.sequence
                is_whole = seen.is_whole(manifest.shard_sizes, seen.damaged_copies)
                of_manifest = manifest.created_unix_s, is_whole, manifest.notes
                found.append(Listed(manifest.checkpoint_id, *of_manifest, *place))
        return tuple(found)


def list_checkpoints(asked: str, store: LocalStore, bucket: Bucket | None, lineage: str) -> tuple[Listed, ...]:
    """The saves of the run that "latest", as it was `asked` for, would choose from, newest first.

    A node or bucket that does not answer adds none.

    Raises:
        LineagesMet, LatestAmbiguous: as for a load.
    """
    return _lister(store, bucket, lineage).list(asked)


def name_saves(
    checkpoint_id: str, store: LocalStore, bucket: Bucket | None, lineage: str
) -> tuple[Mapping[str, Manifest | None], str]:
    """The saves under one id, whole or not, replaced ones too, and the lineage that they are of, whichever is the newest.

    Each with its manifest, None where no place has one that is believed.

    Raises:
        LineagesMet: as for a load.
    """
    return _lister(store, bucket, lineage).name(checkpoint_id)


def _lister(store: LocalStore, bucket: Bucket | None, lineage: str) -> _Lister:
    peers = PeerBook(store.root_agent_directory()).read_all()
    return _Lister(store, store.read_node_id(), peers, bucket, (), lineage)
