"""The list of checkpoints: what this node and the nodes that it has met hold, and the bucket, and which of it is whole."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from replicated_ckpt.agent.peers.address_book import PeerBook
from replicated_ckpt.core.inventory import saves_found
from replicated_ckpt.core.layout import LATEST
from replicated_ckpt.core.manifest import decode_manifest
from replicated_ckpt.core.upkeep.remains import with_remains
from replicated_ckpt.dcp.find.bucket_look import BucketLook
from replicated_ckpt.dcp.find.lineage_choice import choose_lineage
from replicated_ckpt.dcp.find.survey import Surveyor
from replicated_ckpt.stores.bucket.bucket import Bucket
from replicated_ckpt.stores.local.store import LocalStore


@dataclass(frozen=True)
class Listed:
    """One save of the run. `is_whole`: every shard, and the metadata, has a copy where it was looked."""

    checkpoint_id: str
    save_id: str
    created_unix_s: float
    is_whole: bool
    notes: Mapping[str, Any]


class _Lister(Surveyor):
    def list(self) -> tuple[Listed, ...]:
        holdings = self._holdings(None)
        if self._bucket is not None:
            look = BucketLook(self._bucket, None)
            look.is_over_within(None)
            holdings += self._holdings_in_bucket(look)
        found = []
        for save in choose_lineage(LATEST, saves_found(holdings), self._lineage).saves:
            raw = self._manifest_raw(save)
            if raw is not None:
                manifest = decode_manifest(raw.encode(), "a holder")
                seen = with_remains(save, manifest, self._remains)
                sizes = {name: entry.size_bytes for name, entry in manifest.shards.items()}
                is_whole = not seen.lacking(sizes) and any(holding.has_metadata for holding in seen.holdings)
                found.append(
                    Listed(manifest.checkpoint_id, save.save_id, manifest.created_unix_s, is_whole, manifest.notes)
                )
        return tuple(found)


def list_checkpoints(store: LocalStore, bucket: Bucket | None, lineage: str) -> tuple[Listed, ...]:
    """The saves of the run that "latest" would choose from, newest first. A node or bucket that does not answer adds none.

    Raises:
        LineagesMet: as for a load.
    """
    peers = PeerBook(store.root_agent_directory()).read_all()
    return _Lister(store, store.read_node_id(), peers, bucket, (), lineage).list()
