"""Versions of a checkpoint that have outlived their use: what a newer save has replaced or overtaken, once that is whole.

It goes by what was seen of nodes that answer, never by what a node is assumed to hold.
"""

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence

from replicated_ckpt.agent.saves.service import NodeService
from replicated_ckpt.core.layout import parse_marked
from replicated_ckpt.core.lineage import Version
from replicated_ckpt.core.manifest import Manifest
from replicated_ckpt.core.protocol.settlement import is_without_a_name, may_be_dropped
from replicated_ckpt.core.upkeep.repair import NodeView, Presence
from replicated_ckpt.core.upkeep.whole_versions import find_whole_versions
from replicated_ckpt.errors import ManifestInvalid, ObjectCorrupt, StoreError
from replicated_ckpt.stores.files.durable import translate_errors
from replicated_ckpt.stores.local.directories.intent import Intent
from replicated_ckpt.stores.local.directories.looked import Looked
from replicated_ckpt.stores.local.versions.remove import recycle
from replicated_ckpt.stores.local.versions.staged_decision import read_decision

log = logging.getLogger(__name__)


def drop_outlived(
    service: NodeService,
    manifests: Mapping[str, Manifest],
    views: Sequence[NodeView],
    *,
    is_done: bool = False,
    is_stuck: bool = False,
) -> None:
    """Removes from this node the versions that it kept until the newer ones were seen whole.

    `is_done`: every checkpoint of these views has its copies, and no silent node is waited for. Then a replaced version
    goes, too, whose manifest is damaged: what took its place is among them. `is_stuck`: no copy that is short
    can be made now; it may be that what is kept here takes the room.

    Raises:
        StoreError: the node's own store cannot be read.
    """
    service.pins.release_old()
    doubts = [doubt.intent for doubt in service.doubts.read_all()]
    whole = find_whole_versions(manifests, views, may_be_short=is_stuck)
    for looked in service.store.catalog.look_at_all():
        if looked.replaced or looked.kept_metadata:
            _drop_replaced(service, looked, whole.get(looked.checkpoint_id, ()), is_done=is_done)
    _drop_in_the_way(service, manifests, whole)
    places = service.store.read_places()
    for intent in doubts:
        decided, versions = _read_decided(service, intent.save_id), whole.get(intent.checkpoint_id, ())
        place = places.get(intent.save_id) if decided is None else decided.version
        # of another lineage it is what this save is to replace, as far as this node knows: that lets nothing staged go
        if place is not None and may_be_dropped(place, whole=versions, published=None):
            why = "a newer save of the same checkpoint is whole"
        elif decided is not None and _is_without_a_name(service, intent, decided, versions, views):
            why = "no node has published it, and another save that is whole has its name"
        else:
            continue
        with _keeping(f"save {intent.save_id}, which is over,"):
            if intent.coordinator == service.node_id:  # its other nodes may have the decision, too: they ask
                service.store.note_given_up(intent.save_id)
            service.abort(intent.save_id, why)
            log.info("removed save %s of %s, which was in doubt: %s", intent.save_id, intent.checkpoint_id, why)


@contextlib.contextmanager
def _keeping(what: str) -> Iterator[None]:
    """What the disk does not remove stays, and is in the way of no other one, nor of any copy."""
    try:
        yield
    except StoreError as exc:
        log.warning("%s stays for now: %s", what, exc)


def _is_without_a_name(
    service: NodeService, intent: Intent, decided: Manifest, whole: Sequence[Version], views: Sequence[NodeView]
) -> bool:
    """Whether it goes, which its coordinator's node can tell once its rank is gone: no other node publishes it first."""
    if intent.coordinator != service.node_id or service.is_held(intent.save_id):
        return False
    nodes = {*intent.nodes, *(node.node_id for node in decided.nodes)}
    up = {view.node_id: view.holdings or () for view in views if view.presence is Presence.UP}
    is_published = any(holding.save_id == intent.save_id for holdings in up.values() for holding in holdings)
    published = service.store.catalog.find_manifest(intent.checkpoint_id)
    return is_without_a_name(
        decided.version,
        published=None if published is None else published.version,
        replaces=intent.replaces,
        whole=whole,
        is_seen_nowhere=nodes <= set(up) and not is_published,
    )


def _read_decided(service: NodeService, save_id: str) -> Manifest | None:
    """What a staged save was decided as; None while it is not. Before that its time is not known.

    Raises:
        StoreError: it cannot be read now.
    """
    store = service.store
    with translate_errors(str(store.root), "read the decision of", save_id):
        try:
            return read_decision(store.staging(save_id), save_id)
        except (FileNotFoundError, NotADirectoryError, ManifestInvalid, ObjectCorrupt):
            return None


def _drop_replaced(service: NodeService, looked: Looked, whole: Sequence[Version], *, is_done: bool) -> None:
    """Those in one directory of which a newer one is whole; and those whose manifest is damaged, once all is done."""
    catalog, checkpoint_id = service.store.catalog, looked.checkpoint_id
    published = catalog.find_manifest(checkpoint_id)
    if published is None:
        return
    over = [
        manifest.save_id
        for manifest in catalog.replaced_in(looked)
        if may_be_dropped(manifest.version, whole=whole, published=published.version)
    ]
    if is_done:
        over += [found[1] for name in catalog.list_unbelieved(looked) if (found := parse_marked(name)) is not None]
    for save_id in over:
        with _keeping(f"what a newer save has replaced, save {save_id},"):
            if service.store.drop_replaced(checkpoint_id, save_id):
                log.info("removed what a newer save has replaced: save %s", save_id)


def _drop_in_the_way(
    service: NodeService, manifests: Mapping[str, Manifest], whole: Mapping[str, Sequence[Version]]
) -> None:
    """Removes a version that has the name here, where a newer one of its run is whole whose files have the same names.

    As on a node that was away when the id was saved anew. The newer one comes to lie here then, like any copy.
    """
    for held in service.holdings():
        versions = () if held.is_replaced else whole.get(held.checkpoint_id, ())
        newer = (manifests[version.save_id] for version in versions if version.is_newer_than(held.version))
        if any(not manifest.shards.keys().isdisjoint(held.sizes) for manifest in newer):
            with _keeping(f"{held.checkpoint_id} (save {held.save_id}), which a newer save has replaced,"):
                if recycle(service.store.root, held.checkpoint_id, held.save_id):
                    log.info("removed %s (save %s): a newer save is whole", held.checkpoint_id, held.save_id)
