"""Manifests and metadata from other nodes. Manifests are cached for as long as a node holds the save."""

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from replicated_ckpt.core.integrity.checksum import crc32c
from replicated_ckpt.core.layout import MANIFEST_NAME, METADATA_NAME
from replicated_ckpt.core.manifest import Manifest, decode_manifest
from replicated_ckpt.core.upkeep.repair import NodeView, Presence
from replicated_ckpt.errors import ManifestInvalid, ObjectCorrupt, ObjectMissing, ReplicatedCkptError
from replicated_ckpt.node.peers.address_book import PeerBook
from replicated_ckpt.node.peers.watch import HOLDINGS_DEADLINE_S
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.peer.answer import file_path
from replicated_ckpt.stores.peer.client import AgentAddress, AgentClient

log = logging.getLogger(__name__)

UNPROVEN_BYTES_MAX = 16 << 20
"""Limit for the manifests of one peer, of saves that this node does not hold. A single manifest may be larger."""
MANIFEST_COST_BYTES = 1 << 10
"""Counted for each manifest, in addition to its bytes."""
MISSES_MAX = 64
"""A peer that lists this many manifests, but does not return them, is not asked again in this round."""


class ManifestBook:
    """Manifests by save id. One thread.

    With `is_bounded`, manifests of one peer beyond the bound are ignored, and `over_bound` names that peer. Manifests of
    saves that lie on this node do not count towards the bound, so a new node gets one save after another.
    """

    def __init__(self, store: LocalStore, node_id: str, peers: PeerBook, *, is_bounded: bool = True) -> None:
        self._store = store
        self._node_id = node_id
        self._peers = peers
        self._is_bounded = is_bounded
        self._known: dict[str, Manifest] = {}
        self._cost_by_save: dict[str, tuple[str, int]] = {}
        self._full_at: dict[str, int] = {}
        self._warned = set[str]()

    @property
    def known(self) -> frozenset[str]:
        """The saves whose manifests `of` returned last."""
        return frozenset(self._known)

    @property
    def over_bound(self) -> list[str]:
        """The nodes that list more saves than the bound allows."""
        return sorted(self._full_at)

    def of(self, views: Sequence[NodeView]) -> Mapping[str, Manifest]:
        """The manifest of every save on the nodes that answer, if one of those nodes returns a valid one.

        If any node that is not gone has dropped the optimizer, the manifest is that of the weights alone: no node
        copies the rest.
        """
        holders: dict[str, list[tuple[str, str]]] = {}
        slim = set[str]()
        for view in views:
            for holding in view.holdings or ():
                if view.presence is Presence.UP:
                    holders.setdefault(holding.save_id, []).append((view.node_id, holding.checkpoint_id))
                if view.presence is not Presence.GONE and holding.is_slim:
                    slim.add(holding.save_id)
        # Manifests of saves that no node holds any more are dropped: the book stays as small as the stores.
        known = {
            save_id: manifest
            for save_id, manifest in self._known.items()
            # A slim manifest is read again, in full, once no node is slim any more.
            if save_id in holders and (save_id in slim or not manifest.is_slim)
        }
        self._cost_by_save = {
            save_id: cost
            for save_id, cost in self._cost_by_save.items()
            if save_id in known and self._node_id not in dict(holders[save_id])
        }
        look = _Round(self._cost_by_save.values())
        self._full_at = {node: full for node, full in self._full_at.items() if look.spent[node] >= full}
        for save_id, places in holders.items():
            if save_id not in known and (manifest := self._look_up(save_id, places, look)) is not None:
                known[save_id] = manifest
        self._known = known
        return {save_id: one.slimmed() if save_id in slim and one.weights else one for save_id, one in known.items()}

    def _look_up(self, save_id: str, places: Sequence[tuple[str, str]], look: "_Round") -> Manifest | None:
        # This node's own copy first: it costs no request, and counts against no bound.
        for node_id, checkpoint_id in sorted(places, key=lambda place: place[0] != self._node_id):
            if self._is_bounded and node_id != self._node_id and not self._may_ask(node_id, look):
                continue
            began = time.monotonic()
            try:
                manifest, size = self._at(node_id, checkpoint_id, save_id)
            except ManifestInvalid as exc:
                log.warning("manifest of save %s on node %s: %s", save_id, node_id, exc)
                look.misses[node_id] += 1
            except ReplicatedCkptError as exc:  # or the save was removed meanwhile
                log.info("manifest of save %s on node %s: %s", save_id, node_id, exc)
                look.misses[node_id] += 1
            else:
                # A peer could list one save and return another one's manifest, again and again.
                if manifest.save_id != save_id:
                    look.misses[node_id] += 1
                elif self._fits(node_id, save_id, size, look):
                    return manifest
            finally:
                if node_id != self._node_id:
                    look.seconds[node_id] += time.monotonic() - began
        return None

    def _may_ask(self, node_id: str, look: "_Round") -> bool:
        is_tired = look.misses[node_id] >= MISSES_MAX or look.seconds[node_id] >= HOLDINGS_DEADLINE_S
        return node_id not in self._full_at and not is_tired

    def _fits(self, node_id: str, save_id: str, size: int, look: "_Round") -> bool:
        if not self._is_bounded or node_id == self._node_id:
            return True
        cost = size + MANIFEST_COST_BYTES
        # One manifest always fits: else a save larger than the bound could never be repaired.
        if look.spent[node_id] > 0 and look.spent[node_id] + cost > UNPROVEN_BYTES_MAX:
            if node_id not in self._warned:
                self._warned.add(node_id)
                log.warning(
                    "node %s lists too many saves: manifests of saves that this node lacks are not read beyond %d MiB",
                    node_id,
                    UNPROVEN_BYTES_MAX >> 20,
                )
            self._full_at[node_id] = look.spent[node_id]
            return False
        look.spent[node_id] += cost
        self._cost_by_save[save_id] = node_id, cost
        return True

    def _at(self, node_id: str, checkpoint_id: str, save_id: str) -> tuple[Manifest, int]:
        """The manifest, and its size if it came from a peer, else 0."""
        if node_id == self._node_id:
            return self._store.catalog.manifest_of(checkpoint_id, save_id), 0
        with AgentClient(self._peers.address_of(node_id)) as client, client.within(HOLDINGS_DEADLINE_S):
            raw = client.fetch("GET", file_path(checkpoint_id, save_id, MANIFEST_NAME))
            return decode_manifest(raw, client.address.label), len(raw)


class _Round:
    """The cost of each peer in one look: bytes of counted manifests, seconds, and the number of manifests not returned."""

    def __init__(self, costs: Iterable[tuple[str, int]]) -> None:
        self.spent, self.misses = Counter[str](), Counter[str]()
        self.seconds: dict[str, float] = defaultdict(float)
        for node_id, cost in costs:
            self.spent[node_id] += cost


T = TypeVar("T")


def fetch_manifest(checkpoint_id: str, save_id: str, sources: Sequence[AgentAddress]) -> tuple[Manifest, bytes]:
    """The manifest of a save, parsed and raw, from the first source that has it intact.

    Raises:
        ReplicatedCkptError: no source has it; the error of the last source.
    """

    def fetch(client: AgentClient) -> tuple[Manifest, bytes] | None:
        raw = client.fetch("GET", file_path(checkpoint_id, save_id, MANIFEST_NAME))
        manifest = decode_manifest(raw, client.address.label)
        # The name may belong to a newer save there by now.
        return (manifest, raw) if manifest.save_id == save_id else None

    return fetch_first(sources, fetch, f"{checkpoint_id}/{MANIFEST_NAME}")


def fetch_metadata(checkpoint_id: str, manifest: Manifest, sources: Sequence[AgentAddress]) -> bytes:
    """The metadata of the manifest's save, from the first source that has it intact under `checkpoint_id`.

    The metadata of the weights alone is a part of the full one, so nodes with the optimizer are sources, too.
    """

    def fetch(client: AgentClient) -> bytes:
        path = file_path(checkpoint_id, manifest.save_id, METADATA_NAME)
        theirs = manifest
        if manifest.is_slim:
            raw = client.fetch("GET", file_path(checkpoint_id, manifest.save_id, MANIFEST_NAME))
            theirs = decode_manifest(raw, client.address.label)
        metadata = client.fetch_file(path, theirs.metadata_bytes)
        if theirs.weights is not None and manifest.is_slim:
            metadata = theirs.slim_metadata(metadata)
        # Stock torch unpickles this file unchecked: a damaged copy must not spread.
        if crc32c(metadata) != manifest.metadata_crc32c:
            raise ObjectCorrupt(client.address.label, "copy", METADATA_NAME, "it does not match the manifest")
        return metadata

    return fetch_first(sources, fetch, f"{checkpoint_id}/{METADATA_NAME}")


def fetch_first(sources: Sequence[AgentAddress], fetch: Callable[[AgentClient], T | None], what: str) -> T:
    """The first result of `fetch` that is not None, over the sources in order.

    Raises:
        ObjectMissing: there is no source, or all returned None. ReplicatedCkptError: the error of the last source
            that failed.
    """
    last: ReplicatedCkptError = ObjectMissing("the peers", "copy", what, "no source is known")
    for address in sources:
        try:
            with AgentClient(address) as client:
                found = fetch(client)
        except ReplicatedCkptError as exc:
            last = exc
            continue
        if found is not None:
            return found
    raise last
