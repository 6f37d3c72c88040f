"""The collector removes from this node the versions, saves and checkpoints that are no longer needed.

`core.upkeep` decides which, from the views of all nodes: superseded versions, saves in doubt that a newer save has
ended, checkpoints that a policy retires, and those that the user has removed.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from replicated_ckpt.core.manifest import Manifest
from replicated_ckpt.core.upkeep.collection import (
    WholeVersions,
    find_blocking,
    find_end_of_in_doubt,
    find_replaced,
    find_whole_versions,
    has_several_versions,
)
from replicated_ckpt.core.upkeep.policy import NODES, Policy, agree, confirm
from replicated_ckpt.core.upkeep.repair import NodeView
from replicated_ckpt.core.upkeep.retention import Removal, RetentionPlan, find_removed, plan_retention
from replicated_ckpt.errors import ManifestInvalid, ObjectCorrupt, ReplicatedCkptError, StoreError
from replicated_ckpt.node.saves.service import NodeService
from replicated_ckpt.stores.files.durable import translate_errors
from replicated_ckpt.stores.local.directories.intent import Intent
from replicated_ckpt.stores.local.directories.journal import End
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.local.versions.full_disk import lacks_room_to_start
from replicated_ckpt.stores.local.versions.publish import read_decision
from replicated_ckpt.stores.local.versions.recycled import RecycledFiles
from replicated_ckpt.stores.local.versions.remove import recycle, retire, slim
from replicated_ckpt.stores.threads import start_worker

log = logging.getLogger(__name__)

BY_HAND = "this node's user has removed it"


class Collector:
    """Carries out removals. Each removal reads the disk again first, so an outdated plan does no harm. One thread.

    `removed`: the number of removals so far, by policy or by hand. `slimmed`: the number of saves that have lost their
    optimizer by policy. `failed`: the removals that failed in the last round, with reasons.
    """

    def __init__(self, service: NodeService, stopping: threading.Event) -> None:
        self._service = service
        self._store = service.store
        self._stopping = stopping
        self._held_back: frozenset[str] = frozenset()
        self.removed = self.slimmed = 0
        self.failed: list[str] = []

    def status(self) -> Mapping[str, int]:
        return {"removed": self.removed, "slimmed": self.slimmed, "held_back": len(self._held_back)}

    def retire(
        self,
        manifests: Mapping[str, Manifest],
        views: Sequence[NodeView],
        policies_then: Sequence[Policy],
        *,
        in_doubt: bool,
    ) -> tuple[frozenset[str], bool]:
        """Removes and slims saves by the policies of this node's ranks. Returns the saves that go from any node,
        and whether this changed any here.

        Other nodes' policies can prevent a removal here, and stop copies of saves that they retire. They cause a
        removal only of saves in which this node had no rank: re-protection copied them here. `in_doubt`: a node is silent,
        so less is removed. `policies_then`: this node's policies before the survey of the nodes. A later policy is applied
        after the next survey.
        """
        own, before = self._service.policies.read_all(), (self.removed, self.slimmed)
        self.failed = []
        agreed = agree([*own, *(policy for view in views for policy in view.node_report.policies)])
        plan = plan_retention(manifests, views, agreed)
        # Nodes that answered the look may be silent by now: a policy that came later waits for the next look.
        if set(own) == set(policies_then):
            # A silent node may have the only copies of the saves that stay: less is removed until it answers.
            careful = plan_retention(manifests, views, agreed, in_doubt=True) if in_doubt else plan
            confirmed, copied = plan_retention(manifests, views, confirm(agreed, own)), self._find_copied(manifests)
            # Other nodes' policies can hold a removal back, never cause one: a peer's token must delete nothing here.
            going = plan.retired & (confirmed.retired | copied) | plan.slimmed & (confirmed.slimmed | copied)
            self.carry_out(careful.only(going))
        if not any(policy.tier == NODES and policy.retention for policy in own):
            self._drop_recycled()  # without a policy no removal brings new ones, and they only take room
        self._finish_removals()
        return plan.retired | find_removed(views), (self.removed, self.slimmed) != before

    def _drop_recycled(self) -> None:
        try:
            RecycledFiles(self._store.root).drop()
        except OSError as exc:
            log.warning("recycled files are not removed: %s", exc)

    def _find_copied(self, manifests: Mapping[str, Manifest]) -> frozenset[str]:
        """The saves in which this node had no rank: re-protection copied them here."""
        own = self._service.node_id
        return frozenset(
            save_id for save_id, manifest in manifests.items() if own not in {node.node_id for node in manifest.nodes}
        )

    def carry_out(self, plan: RetentionPlan) -> None:
        """Does this node's part of a plan. A removal that fails is logged, and planned again in the next round."""
        self._log_held_back(plan)
        self._service.pins.release_old()
        kept: set[str] = set()
        for removal in plan.of_node(self._service.node_id):
            if self._stopping.is_set():
                return
            if removal.is_slimming:
                self.slimmed += self._try_unpinned(removal, partial(slim, self._store.root, recycles=True))
                continue
            if removal.checkpoint_id in kept or not self._try_unpinned(removal, partial(recycle, self._store.root)):
                kept.add(removal.checkpoint_id)  # newer versions stay, too: else this one would get the name back
                continue
            # for nodes that were away, and may have it staged: this node answers them that it has ended
            self._store.note_end(removal.save_id, End.RETIRED, removal.rule)
            self.removed += 1

    def _try_unpinned(self, removal: Removal, remove: Callable[[str, str], bool]) -> bool:
        """As `_try`, unless a load reads the save."""
        if self._service.pins.is_pinned(removal.save_id):
            log.info("kept while a load reads it: %s", removal)
            return False
        return self._try(removal, remove)

    def _try(self, removal: Removal, remove: Callable[[str, str], bool]) -> bool:
        """Calls `remove` with checkpoint id and save id. Returns whether the version was removed; a locked one stays."""
        try:
            is_removed = remove(removal.checkpoint_id, removal.save_id)
        except ReplicatedCkptError as exc:
            log.warning("not removed: %s: %s", removal, exc)
            self.failed.append(f"{removal}: {exc}")
            return False
        if is_removed:
            what = "the optimizer of " if removal.is_slimming else ""
            log.info("removed %s%s (save %s): %s", what, removal.checkpoint_id, removal.save_id, removal.rule)
        return is_removed

    def _log_held_back(self, plan: RetentionPlan) -> None:
        for verdict in plan.held_back:
            if verdict.save_id not in self._held_back:
                log.info("kept beyond the policy: %s", verdict)
        self._held_back = frozenset(verdict.save_id for verdict in plan.held_back)

    def _finish_removals(self) -> None:
        """Completes removals by hand that were interrupted by a crash, or by a load that read the save.

        A removal ends once nothing of the save is here, staged or not. If the save is here again after that, the user
        has restored it, and it is protected from then on.
        """
        # Both before `_find_here`: a save that is removed meanwhile must not look restored, nor a published one removed.
        removing, removed = self._store.journal.read_removals()
        staged = set(filter(self._store.is_staged, removing))
        here = self._find_here() if removed | removing else {}
        # A staged save may still be published here: its removal is not over before that.
        for save_id in sorted(removing - (staged - here.keys())):
            if self._stopping.is_set():
                return
            if (place := here.get(save_id)) is not None:
                by_hand = Removal(self._service.node_id, place, save_id, BY_HAND)
                if not self._try_unpinned(by_hand, partial(retire, self._store.root)):
                    continue
                self.removed += 1
            self._note(save_id, End.REMOVED, after=End.REMOVING)
        for save_id in sorted(removed & here.keys()):
            if self._note(save_id, End.RESTORED, after=End.REMOVED):
                log.info("%s (save %s) was restored by hand; it is managed again", here[save_id], save_id)

    def _note(self, save_id: str, end: End, *, after: End) -> bool:
        try:
            self._store.journal.append_end(save_id, end, BY_HAND, after=after)
        except StoreError as exc:
            log.warning("the removal of save %s is not recorded yet: %s", save_id, exc)
            return False
        return True

    def _find_here(self) -> Mapping[str, str]:
        """The checkpoint id of each save under its own name here. Renamed directories are left out."""
        found = self._store.catalog.versions()
        return {manifest.save_id: name for name, manifest in found if name == manifest.checkpoint_id}

    def drop_superseded(
        self,
        manifests: Mapping[str, Manifest],
        views: Sequence[NodeView],
        damaged: Sequence[Removal] = (),
        *,
        is_stuck: bool = False,
    ) -> None:
        """Removes versions and staged saves from this node that were kept until a newer one was seen whole.

        `damaged`: replaced versions with a damaged manifest; every checkpoint has its copies without them. `is_stuck`:
        the missing copies cannot be made now, perhaps because these versions take the room.

        Raises:
            StoreError: the node's own store cannot be read.
        """
        self._service.pins.release_old()
        own = [held for view in views if view.node_id == self._service.node_id for held in view.holdings or ()]
        in_doubt = self._service.in_doubt.read_all()
        # Usually there is neither: `find_whole_versions` takes time for each save.
        if in_doubt or has_several_versions(own, views):
            whole = find_whole_versions(manifests, views, may_be_short=is_stuck)
            for removal in find_replaced(own, whole):
                self._try(removal, self._store.drop_replaced)
            for removal in find_blocking(own, manifests, whole):
                self._try(removal, partial(recycle, self._store.root))
            for save in in_doubt:
                self._end_in_doubt(save.intent, whole, views)
        for removal in damaged:
            self._try(removal, self._store.drop_replaced)

    def _end_in_doubt(self, intent: Intent, whole: WholeVersions, views: Sequence[NodeView]) -> None:
        """Removes a staged save in doubt, if it has ended."""
        service, is_own = self._service, intent.coordinator == self._service.node_id
        decided = self._read_decided(intent.save_id)
        members = set[str]()
        # Only the coordinator's node can find out that no node publishes it, and not while a rank works on it.
        if is_own and decided is not None and not service.is_locked(intent.save_id):
            members = {*intent.nodes, *(node.node_id for node in decided.nodes)}
        published = self._store.catalog.find_manifest(intent.checkpoint_id)
        why = find_end_of_in_doubt(
            intent.checkpoint_id,
            intent.place if decided is None else decided.version,
            whole,
            views,
            published=None if published is None else published.version,
            replaces=intent.replaces,
            members=members,
        )
        if not why:
            return
        try:
            if is_own:  # other nodes may have the decision: they ask this one how the save ended
                self._store.note_end(intent.save_id, End.ABORTED, why)
            service.abort(intent.save_id, why)
        except StoreError as exc:
            log.warning("save %s has ended, but its files stay for now: %s", intent.save_id, exc)
            return
        log.info("removed save %s of %s, which was in doubt: %s", intent.save_id, intent.checkpoint_id, why)

    def _read_decided(self, save_id: str) -> Manifest | None:
        """The manifest of a decided save; None if it is not decided.

        Raises:
            StoreError: it cannot be read now.
        """
        with translate_errors(str(self._store.root), "read the decision of", save_id):
            try:
                return read_decision(self._store.staging(save_id), save_id)
            except (FileNotFoundError, NotADirectoryError, ManifestInvalid, ObjectCorrupt):
                return None


def finish_removals(store: LocalStore) -> None:
    """Completes removals that a crash interrupted, for an agent that starts. In a thread, because terabytes take long.

    If the disk lacks room for the small files of an agent, the removals are done before this returns.
    """
    if lacks_room_to_start(store.root):
        _tidy(store)
    else:
        start_worker(_tidy, store, name="rckpt-removals")


def _tidy(store: LocalStore) -> None:
    try:
        store.tidy(is_alone=False)
        store.compact_journal()
    except StoreError as exc:
        log.error("files left by a crash stay for now: %s", exc)  # noqa: TRY400 - it explains itself
