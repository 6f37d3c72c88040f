"""Versions of a checkpoint that have outlived their use: what a newer save has replaced or overtaken, once that is whole.

It goes by what was seen of nodes that answer, never by what a node is assumed to hold.
"""

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence

from replicated_ckpt.agent.saves.service import NodeService
from replicated_ckpt.core.lineage import Version
from replicated_ckpt.core.manifest import Manifest
from replicated_ckpt.core.protocol.settlement import is_without_a_name, may_be_dropped
from replicated_ckpt.core.upkeep.repair import NodeView, Presence
from replicated_ckpt.core.upkeep.whole_versions import find_whole_versions
from replicated_ckpt.errors import ManifestInvalid, ObjectCorrupt, StoreError
from replicated_ckpt.stores.files.durable import translate_errors
from replicated_ckpt.stores.local.directories.intent import Intent
from replicated_ckpt.stores.local.versions.replaced import lacks_kept_shards
from replicated_ckpt.stores.local.versions.staged_decision import read_decision

log = logging.getLogger(__name__)

_WholeById = Mapping[str, Sequence[Version]]


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
    goes, too, of which no manifest tells what it is: what took its place is among them. `is_stuck`: no copy that is short
    can be made now; it may be that what is kept here takes the room.

    Raises:
        StoreError: the node's own store cannot be read.
    """
    service.pins.release_old()
    names = service.store.catalog.list_replaced()
    doubts = [doubt.intent for doubt in service.doubts.read_all()]
    if not names and not doubts:
        return
    whole = find_whole_versions(manifests, views, may_be_short=is_stuck)
    _drop_replaced(service, names, whole, is_done=is_done)
    places = service.store.places.read_all()
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


def _drop_replaced(service: NodeService, names: Sequence[str], whole: _WholeById, *, is_done: bool) -> None:
    catalog = service.store.catalog
    replaced = {manifest.save_id: manifest for manifest in catalog.read_replaced()}
    whole_saves = {version.save_id for versions in whole.values() for version in versions}
    for name in names:
        manifest = replaced.get(name)
        if manifest is None:
            # Put back by hand; or not believed, and named after the save that replaced it, or, damaged since, after itself.
            is_over = name in whole_saves or (is_done and not catalog.is_newer_replaced(name))
            is_over = is_over and not lacks_kept_shards(catalog, name)
        else:
            published = catalog.find_manifest(manifest.checkpoint_id)
            version, versions = None if published is None else published.version, whole.get(manifest.checkpoint_id, ())
            is_over = may_be_dropped(manifest.version, whole=versions, published=version)
        with _keeping(f"what a newer save has replaced, save {name},"):
            if is_over and service.store.drop_replaced(name):
                log.info("removed what a newer save has replaced: save %s", name)
