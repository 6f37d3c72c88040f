"""Replaced versions that need mending: their shards may be the only ones that are left of a save.

One lost its manifest, or a user has put the save's directory back under its name by hand, with shards missing or cut off.
"""

import logging
from collections.abc import Mapping, Sequence

from replicated_ckpt.agent.peers.fetch import fetch_manifest
from replicated_ckpt.agent.saves.service import NodeService
from replicated_ckpt.core.layout import MANIFEST_NAME, METADATA_NAME
from replicated_ckpt.core.manifest import Manifest
from replicated_ckpt.core.upkeep.repair import NodeView, Presence
from replicated_ckpt.errors import ReplicatedCkptError
from replicated_ckpt.stores.local.directories.committed import open_replaced
from replicated_ckpt.stores.local.remains import read_remains, tell_crc

log = logging.getLogger(__name__)


def restore_replaced(service: NodeService, manifests: Mapping[str, Manifest], others: Sequence[NodeView]) -> bool:
    """Gives each the manifest that another node has, or its shards to where its save has its name; whether one got any.

    The directory has the name of its save, or of the one that replaced it: its files' own checksums tell which.

    Raises:
        StoreError: the node's own store cannot be read.
    """
    catalog, is_any = service.store.catalog, False
    for save_id in catalog.list_replaced():
        manifest = manifests.get(save_id)
        if manifest is None or catalog.is_newer_replaced(save_id):
            continue
        published = catalog.find_manifest(manifest.checkpoint_id)
        has_name = published is not None and published.save_id == save_id
        if catalog.is_replaced(save_id) and not has_name:
            continue
        try:
            is_any |= _give_back(service, manifest) if has_name else _restore(service, manifest, others)
        except ReplicatedCkptError as exc:
            log.warning("the replaced save %s is not restored for now: %s", save_id, exc)
    return is_any


def _give_back(service: NodeService, manifest: Manifest) -> bool:
    """As a rule what this save has replaced lies there, and none of it is of this save."""
    with open_replaced(service.store.root, manifest.checkpoint_id, manifest.save_id) as directory:
        found = read_remains(directory, service.node_id, tell_crc)
    own = frozenset[str]() if found is None else found.matching(manifest)
    if not own:
        return False
    named = [held for held in service.holdings(manifest.checkpoint_id) if held.save_id == manifest.save_id]
    bad = {name for held in named for name in (*held.damaged, *(() if held.has_metadata else (METADATA_NAME,)))}
    return service.store.take_back_missing(manifest, own, bad)


def _restore(service: NodeService, manifest: Manifest, others: Sequence[NodeView]) -> bool:
    with open_replaced(service.store.root, manifest.checkpoint_id, manifest.save_id) as directory:
        found = read_remains(directory, service.node_id, tell_crc)
        if found is None or found.foreign(manifest) or not found.matching(manifest) - {METADATA_NAME}:
            return False
        up = [view for view in others if view.presence is Presence.UP]
        holders = {held.node_id for view in up for held in view.holdings or () if held.save_id == manifest.save_id}
        sources = [peer for peer in service.peers.read_all() if peer.node_id in holders]
        _, raw = fetch_manifest(manifest.checkpoint_id, manifest.save_id, sources)
        directory.put_small(MANIFEST_NAME, raw)
    log.warning("%s: the manifest of the replaced save %s is restored", manifest.checkpoint_id, manifest.save_id)
    return True
