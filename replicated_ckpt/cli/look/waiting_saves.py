"""Saves in doubt, as the command line shows them, with the next step if nodes never come back."""

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from replicated_ckpt.cli.look.nodes import NodesSeen, ask_own_status
from replicated_ckpt.core.inventory import Holding, saves_found
from replicated_ckpt.core.protocol.settlement import may_publish
from replicated_ckpt.errors import ReplicatedCkptError
from replicated_ckpt.node.peers.address_book import PeerBook
from replicated_ckpt.stores.local.directories.intent import Intent
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.local.versions.publish import read_decision
from replicated_ckpt.wording import describe_bytes

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StagedSave:
    """A save that is staged on this node, and on which no process works. It is settled once all its nodes answer."""

    save_id: str
    checkpoint_id: str
    size_bytes: int
    nodes: tuple[str, ...]
    """The other nodes of the save."""
    blocked_by: str = ""
    """If this save is decided: the other save that has its name here. Then it waits for no node."""

    def __str__(self) -> str:
        nodes = ", ".join(self.nodes) or "none"
        return (
            f"save {self.save_id} of {self.checkpoint_id} is staged here ({describe_bytes(self.size_bytes)}) and not "
            f"committed; the other nodes of the save are {nodes}"
        )


def list_staged_saves(store: LocalStore) -> list[StagedSave]:
    """The saves that are staged on this disk, and on which no rank works."""
    own = store.read_node_id()
    return [
        StagedSave(
            intent.save_id,
            intent.checkpoint_id,
            _sum_staged_bytes(store, intent),
            tuple(node for node in intent.nodes if node != own),
            _find_blocking(store, intent.save_id, intent.checkpoint_id),
        )
        for intent in store.list_staged()
        if not store.is_locked(intent.save_id)  # a rank works on a locked save, which is not in doubt
    ]


@dataclass(frozen=True)
class WaitingSave:
    """A save in doubt. `nodes`: those whose answers it waits for. `failure`: the error that prevented its settlement."""

    save_id: str
    checkpoint_id: str
    nodes: tuple[str, ...]
    failure: str = ""
    blocked_by: str = ""

    def describe(self, seen: NodesSeen) -> str:
        why = f"could not be recovered, and is tried again: {self.failure}" if self.failure else ""
        return f"save {self.save_id} of {self.checkpoint_id}: {why or describe_wait(self, seen)}"


def list_waiting(store: LocalStore, told: Sequence[Mapping[str, Any]] | None) -> list[WaitingSave]:
    """The saves in doubt from this node's agent, or from the disk if no agent returned them (None)."""
    if told is None:
        staged = list_staged_saves(store)
        return [WaitingSave(one.save_id, one.checkpoint_id, one.nodes, blocked_by=one.blocked_by) for one in staged]
    return [
        WaitingSave(
            one["save_id"],
            one["checkpoint_id"],
            tuple(one["waits_for"]),
            one["failure"],
            _find_blocking(store, one["save_id"], one["checkpoint_id"]),
        )
        for one in told
    ]


def _find_blocking(store: LocalStore, save_id: str, checkpoint_id: str) -> str:
    """The other save that has the name of a decided one. "": not decided, not blocked, or the disk cannot be read."""
    with contextlib.suppress(ReplicatedCkptError, OSError):
        named, intent = store.catalog.find_manifest(checkpoint_id), store.intent_of(save_id)
        decided = None if named is None else read_decision(store.staging(save_id), save_id)
        if named is not None and decided is not None:
            takes = may_publish(decided.version, named.version, intent.replaces)
            return "" if takes else named.save_id
    return ""


def has_save_in_doubt(store: LocalStore) -> bool:
    """Whether `status` shows a save in doubt here. A save that waits for no node does not count: an agent settles it."""
    agent = None
    try:
        agent = ask_own_status(store)
    except ReplicatedCkptError as exc:
        log.info("this node's agent did not return the saves in doubt: %s", exc)
    return bool(list_waiting(store, None if agent is None else agent["in_doubt"]))


def describe_wait(save: StagedSave | WaitingSave, seen: NodesSeen) -> str:
    """The phrase that names the nodes, or the other save, for which a save in doubt waits."""
    if save.blocked_by:
        return (
            f"it is decided, but save {save.blocked_by} has its name on this node. It is deleted once a newer save of "
            f"its run is complete. To publish it, rename the directory {save.checkpoint_id} here"
        )
    missing = _find_missing(save.nodes, seen)
    if not missing:
        return "all its nodes answer: the next save, load or round of re-protection completes or aborts it"
    how = {node: "not reached" if node in seen.unreached else "never met" for node in missing}
    return "waits for " + ", ".join(f"{seen.label(node)}, {how[node]}" for node in missing)


def advise_on_in_doubt(save: StagedSave | WaitingSave, seen: NodesSeen, root: Path) -> list[str]:
    """The next step for a save in doubt that waits for nodes that did not answer."""
    missing = [] if save.blocked_by else _find_missing(save.nodes, seen)
    lost = " ".join(f"--lost {node}" for node in missing)
    step = (
        f"next step for the save of {save.checkpoint_id} in doubt: bring back {seen.list_names(missing)}. If that "
        f"is impossible, `replicated-ckpt repair --root {quote(str(root))} {lost} --dry-run` shows what would be "
        "lost; without --dry-run it aborts the save"
    )
    return [step] if missing else []


def _find_missing(nodes: Sequence[str], seen: NodesSeen) -> list[str]:
    return sorted(node for node in nodes if node not in seen.holdings_by_node)


def _sum_staged_bytes(store: LocalStore, intent: Intent) -> int:
    staging = store.staging(intent.save_id)
    return sum(path.stat().st_size for path in staging.iterdir()) if store.is_staged(intent.save_id) else 0


def label_nodes(store: LocalStore, saves: Sequence[StagedSave]) -> Mapping[str, str]:
    """The last known address of each node that these saves wait for."""
    known = {peer.node_id: peer.label for peer in PeerBook(store.root_agent_directory()).read_all()}
    return {node: known.get(node, f"node {node}, never met") for save in saves for node in save.nodes}


def describe_loss(save: StagedSave, lost: Sequence[str], holdings: Sequence[Holding]) -> str:
    """The line, before a save is aborted, that names the possible loss and the remaining versions of its checkpoint."""
    versions = [found for found in saves_found(holdings) if found.checkpoint_id == save.checkpoint_id]
    left = ", ".join(f"save {found.save_id} (sequence {found.sequence})" for found in versions) or "no other version"
    return (
        f"abort save {save.save_id} of {save.checkpoint_id} ({describe_bytes(save.size_bytes)} on this node). Even if node "
        f"{', '.join(lost)} published it, it can then never be completed. Left of {save.checkpoint_id}: {left}"
    )
