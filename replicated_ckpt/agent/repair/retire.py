"""Retiring on this node: carries out its part of a retention plan, and says which rule each checkpoint went by."""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence

from replicated_ckpt.agent.saves.service import NodeService
from replicated_ckpt.core.manifest import Manifest
from replicated_ckpt.core.upkeep.policy import NODES, Policy, agree, confirm
from replicated_ckpt.core.upkeep.removal import find_removed
from replicated_ckpt.core.upkeep.repair import NodeView
from replicated_ckpt.core.upkeep.retention import Removal, RetentionPlan, plan_retention
from replicated_ckpt.errors import ReplicatedCkptError
from replicated_ckpt.stores.local.versions.recycled import RecycledFiles
from replicated_ckpt.stores.local.versions.remove import recycle, retire

log = logging.getLogger(__name__)

BY_HAND = "this node's user has removed it"


class Retirer:
    """Each removal looks at the disk again before it changes it, so a plan that is out of date does no harm. One thread.

    `removed`: so many so far. `failed`: what could not be removed at the last look, and why.
    """

    def __init__(self, service: NodeService, stopping: threading.Event) -> None:
        self._service = service
        self._stopping = stopping
        self._held_back: frozenset[str] = frozenset()
        self.removed = 0
        self.failed: list[str] = []

    def status(self) -> Mapping[str, int]:
        return {"removed": self.removed, "held_back": len(self._held_back)}

    def retire(
        self, manifests: Mapping[str, Manifest], views: Sequence[NodeView], told: Sequence[Policy], *, in_doubt: bool
    ) -> tuple[frozenset[str], bool]:
        """Removes what the policies of this node's ranks keep no longer; the saves that go, and whether any went from here.

        What the other nodes say of their policies can keep this one from removing, and from bringing back what they gave
        up. It has nothing removed here but what re-protection brought, of saves in which this node had no rank. `in_doubt`:
        a node is silent; then less is removed. A policy that was not among those `told` before the look waits for the next
        one: nodes that answered this one may be silent by now.
        """
        own, removed_before = self._service.policies.read_all(), self.removed
        self.failed = []
        agreed = agree([*own, *(policy for view in views for policy in view.standing.policies)])
        plan = plan_retention(manifests, views, agreed)
        if set(own) == set(told):
            careful = plan_retention(manifests, views, agreed, in_doubt=True) if in_doubt else plan
            by_own_word = plan_retention(manifests, views, confirm(agreed, own)).retired
            self.carry_out(careful.only(plan.retired & (by_own_word | self._find_brought(manifests))))
        if not any(policy.tier == NODES and policy.retention for policy in own):
            self._drop_recycled()  # no checkpoint goes that would bring new ones
        self._finish_removals()
        return plan.retired | find_removed(views), self.removed > removed_before

    def _drop_recycled(self) -> None:
        try:
            RecycledFiles(self._service.store.root).drop()
        except OSError as exc:
            log.warning("recycled files are not removed: %s", exc)

    def _finish_removals(self) -> None:
        """Removes what this node's own user has removed and a crash, or a load that was reading it, has kept here.

        A removal ends once nothing of it lies here, staged or not. What lies here again after that was put back by the
        user, and is protected from then on.
        """
        book = self._service.removals
        pending, done = book.read_pending_and_done()  # before the look: what is removed meanwhile is not put back
        staged = set(filter(self._service.store.is_staged, pending))  # before it, too: they may be published meanwhile
        here = self._find_here() if done | pending else {}
        for save_id in sorted(pending - (staged - here.keys())):
            if self._stopping.is_set():
                return
            place = here.get(save_id)
            if place is None or self._try(Removal(self._service.node_id, place, save_id, BY_HAND)):
                self._note(book.finish, save_id)
        for save_id in sorted(done & here.keys()):
            if self._note(book.forget, save_id):
                log.info("%s (save %s) was put back; it is looked after again", here[save_id], save_id)

    def _find_here(self) -> Mapping[str, str]:
        """The checkpoint id of each save that lies here under its own name; a renamed directory is not touched."""
        catalog = self._service.store.catalog
        named = {found.save_id: name for name, found in catalog.committed() if name == found.checkpoint_id}
        return {found.save_id: name for name, found in catalog.read_replaced() if name == found.checkpoint_id} | named

    def _note(self, note: Callable[[str], None], save_id: str) -> bool:
        try:
            note(save_id)
        except ReplicatedCkptError as exc:
            log.warning("the note of the removal of save %s stays as it is: %s", save_id, exc)
            return False
        return True

    def _find_brought(self, manifests: Mapping[str, Manifest]) -> frozenset[str]:
        """The saves in which this node had no rank: what lies here of them, other nodes' word has brought."""
        own = self._service.node_id
        return frozenset(
            save_id for save_id, manifest in manifests.items() if own not in {node.node_id for node in manifest.nodes}
        )

    def carry_out(self, plan: RetentionPlan) -> None:
        """Does this node's part of a plan; what cannot be removed is logged, and is in the next plan again."""
        self._say_held_back(plan)
        self._service.pins.release_old()
        kept: set[str] = set()
        for removal in plan.of_node(self._service.node_id):
            if self._stopping.is_set():
                return
            if removal.checkpoint_id in kept or not self._try(removal):
                kept.add(removal.checkpoint_id)  # with the newer versions: it would have the name again

    def _try(self, removal: Removal) -> bool:
        try:
            return self._remove(removal)
        except ReplicatedCkptError as exc:
            log.warning("not removed: %s: %s", removal, exc)
            self.failed.append(f"{removal}: {exc}")
            return False

    def _remove(self, removal: Removal) -> bool:
        if self._service.pins.is_pinned(removal.save_id):
            log.info("kept while it is loaded: %s", removal)
            return False
        remove = retire if removal.rule == BY_HAND else recycle
        if not remove(self._service.store.root, removal.checkpoint_id, removal.save_id):
            return False
        if removal.rule != BY_HAND:  # a node that was away meanwhile may have it staged, or a part of it
            self._service.store.note_given_up(removal.save_id)
        self.removed += 1
        log.info("removed %s (save %s): %s", removal.checkpoint_id, removal.save_id, removal.rule)
        return True

    def _say_held_back(self, plan: RetentionPlan) -> None:
        for verdict in plan.held_back:
            if verdict.save_id not in self._held_back:
                log.info("kept beyond the policy: %s", verdict)
        self._held_back = frozenset(verdict.save_id for verdict in plan.held_back)
