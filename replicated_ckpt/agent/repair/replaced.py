"""Replaced versions whose manifest is damaged: their shards may be the only ones that are left of a save."""

import logging
from collections.abc import Mapping, Sequence

from replicated_ckpt.agent.peers.fetch import fetch_manifest
from replicated_ckpt.agent.saves.service import NodeService
from replicated_ckpt.core.layout import MANIFEST_NAME, parse_marked
from replicated_ckpt.core.manifest import Manifest
from replicated_ckpt.core.upkeep.repair import NodeView, Presence
from replicated_ckpt.core.upkeep.retention import Removal
from replicated_ckpt.errors import ReplicatedCkptError
from replicated_ckpt.stores.local.directories.committed import open_directory

log = logging.getLogger(__name__)


def find_damaged(service: NodeService) -> tuple[Removal, ...]:
    """The replaced versions here whose manifest cannot be believed, with the save id in its name.

    Raises:
        StoreError: the node's own store cannot be read.
    """
    catalog = service.store.catalog
    return tuple(
        Removal(
            service.node_id, looked.checkpoint_id, marked[1], "its manifest is damaged, and all else has its copies"
        )
        for looked in catalog.look_at_all()
        for name in catalog.list_unbelieved(looked)
        if (marked := parse_marked(name)) is not None
    )


def restore_replaced(
    service: NodeService, damaged: Sequence[Removal], manifests: Mapping[str, Manifest], others: Sequence[NodeView]
) -> bool:
    """Gives each the manifest that another node has; whether one got any."""
    is_any = False
    for one in damaged:
        manifest = manifests.get(one.save_id)
        if manifest is None:
            continue
        try:
            _restore(service, one.checkpoint_id, manifest, others)
            is_any = True
        except ReplicatedCkptError as exc:
            log.warning("the replaced save %s is not restored for now: %s", manifest.save_id, exc)
    return is_any


def _restore(service: NodeService, checkpoint_id: str, manifest: Manifest, others: Sequence[NodeView]) -> None:
    up = [view for view in others if view.presence is Presence.UP]
    holders = {held.node_id for view in up for held in view.holdings or () if held.save_id == manifest.save_id}
    sources = [peer for peer in service.peers.read_all() if peer.node_id in holders]
    _, raw = fetch_manifest(manifest.checkpoint_id, manifest.save_id, sources)
    with open_directory(service.store.root, checkpoint_id) as directory:
        directory.of_save(manifest.save_id, is_replaced=True).put_small(MANIFEST_NAME, raw)
    log.warning("%s: the manifest of the replaced save %s is restored", checkpoint_id, manifest.save_id)
