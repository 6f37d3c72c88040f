"""The manifests of the saves that lie on any node, looked up where they are and kept while a node holds the save."""

import logging
from collections.abc import Mapping, Sequence

from replicated_ckpt.agent.peers.address_book import PeerBook
from replicated_ckpt.agent.peers.watch import HOLDINGS_DEADLINE_S
from replicated_ckpt.core.layout import MANIFEST_NAME
from replicated_ckpt.core.manifest import Manifest, decode_manifest
from replicated_ckpt.core.upkeep.repair import NodeView, Presence
from replicated_ckpt.errors import ManifestInvalid, ObjectMissing, ReplicatedCkptError
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.peer.client import AgentClient
from replicated_ckpt.stores.peer.paths import file_path

log = logging.getLogger(__name__)


class ManifestBook:
    """Manifests by save id. One thread."""

    def __init__(self, store: LocalStore, node_id: str, peers: PeerBook) -> None:
        self._store = store
        self._node_id = node_id
        self._peers = peers
        self._known: dict[str, Manifest] = {}

    @property
    def known(self) -> frozenset[str]:
        """The saves of which `of` told the manifest last."""
        return frozenset(self._known)

    def of(self, views: Sequence[NodeView]) -> Mapping[str, Manifest]:
        """The manifest of every save that a node which is up holds, as far as one of them is believed."""
        holders: dict[str, list[tuple[str, str]]] = {}
        for view in views:
            for holding in view.holdings or ():
                if view.presence is Presence.UP:
                    holders.setdefault(holding.save_id, []).append((view.node_id, holding.checkpoint_id))
        known = {save_id: manifest for save_id, manifest in self._known.items() if save_id in holders}
        for save_id, places in holders.items():
            if save_id not in known and (manifest := self._look_up(save_id, places)) is not None:
                known[save_id] = manifest
        self._known = known
        return known

    def _look_up(self, save_id: str, places: Sequence[tuple[str, str]]) -> Manifest | None:
        for node_id, checkpoint_id in sorted(places, key=lambda place: place[0] != self._node_id):
            try:
                manifest = self._at(node_id, checkpoint_id, save_id)
            except (ManifestInvalid, ObjectMissing) as exc:
                log.warning("manifest of save %s on node %s: %s", save_id, node_id, exc)
            except ReplicatedCkptError as exc:
                log.info("manifest of save %s on node %s: %s", save_id, node_id, exc)
            else:
                if manifest.save_id == save_id:
                    return manifest
        return None

    def _at(self, node_id: str, checkpoint_id: str, save_id: str) -> Manifest:
        if node_id == self._node_id:
            directory = self._store.catalog.directory_of(checkpoint_id, save_id)  # a replaced version has no name
            return self._store.catalog.manifest(directory or checkpoint_id)
        with AgentClient(self._peers.address_of(node_id)) as client, client.within(HOLDINGS_DEADLINE_S):
            raw = client.fetch("GET", file_path(checkpoint_id, save_id, MANIFEST_NAME))
            return decode_manifest(raw, client.address.label)
