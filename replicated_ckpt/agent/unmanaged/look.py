"""A look at all nodes for checkpoints that FileSystemWriter left on them. Changes nothing."""

import logging
import urllib.parse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from replicated_ckpt.core.layout import METADATA_NAME
from replicated_ckpt.core.reading.source_order import ByteRange
from replicated_ckpt.core.unmanaged.metadata_places import item_ranges, needed_bytes
from replicated_ckpt.core.unmanaged.survey import (
    UnmanagedCheckpoint,
    UnmanagedHolding,
    UnmanagedSave,
    unmanaged_checkpoints,
)
from replicated_ckpt.errors import ObjectMissing, ReplicatedCkptError
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.peer.answer import parsing
from replicated_ckpt.stores.peer.client import AgentAddress, AgentClient
from replicated_ckpt.stores.peer.fan_out import FanOut
from replicated_ckpt.stores.peer.paths import unmanaged_path
from replicated_ckpt.stores.unmanaged.directory import UnmanagedDirectory

log = logging.getLogger(__name__)

LOOK_TIMEOUT_S = 10.0
"""Longer than for other holdings: the first look reads the beginning and the end of every file."""


@dataclass(frozen=True)
class UnmanagedFound:
    """A checkpoint whose `.metadata` was read: what it is made of, and where its items lie."""

    save: UnmanagedSave
    metadata: bytes = field(repr=False)
    ranges: Mapping[str, tuple[ByteRange, ...]] = field(repr=False)


class UnmanagedLook:
    """Reads this node's store itself and the others' through their agents. `unreached` says who did not answer."""

    def __init__(self, store: LocalStore, own_node: str, peers: Iterable[AgentAddress]) -> None:
        self._unmanaged = UnmanagedDirectory(store.root)
        self._own_node = own_node
        self._by_node = {peer.node_id: peer for peer in peers if peer.node_id != own_node}
        self.unreached: dict[str, ReplicatedCkptError] = {}

    def checkpoints(
        self, checkpoint_id: str | None = None, without: Iterable[str] = ()
    ) -> tuple[UnmanagedCheckpoint, ...]:
        """One checkpoint or all of them, newest first; ids `without` are left out, as they have a manifest somewhere."""
        path = unmanaged_listing_path(checkpoint_id)

        def ask(node: str) -> list[UnmanagedHolding]:
            with AgentClient(self._by_node[node], LOOK_TIMEOUT_S) as client:
                answer = client.call("GET", path)
            with parsing(f"{self._by_node[node].label} listed its files wrongly"):
                found = [UnmanagedHolding.from_json(fields) for fields in answer["unmanaged"]]
            return [holding for holding in found if holding.node_id == node]

        outcome = FanOut.run(self._by_node, ask)
        self.unreached = dict(outcome.errors)
        own = list(self._unmanaged.holdings(self._own_node, checkpoint_id))
        there = [holding for node in sorted(outcome.results) for holding in outcome.results[node]]
        return unmanaged_checkpoints([*own, *there], without)

    def examine(self, checkpoint: UnmanagedCheckpoint) -> UnmanagedFound:
        """What a checkpoint that has a `.metadata` somewhere is made of.

        Raises:
            CheckpointAmbiguous: nodes contradict each other. MetadataUnsafe: `.metadata` is not as DCP writes it.
            ObjectMissing: no node could give it.
        """
        metadata = self.metadata(checkpoint)
        ranges = item_ranges(metadata)
        return UnmanagedFound(checkpoint.save(needed_bytes(ranges)), metadata, ranges)

    def metadata(self, checkpoint: UnmanagedCheckpoint) -> bytes:
        """The bytes of the one `.metadata`, from a node that has it."""
        file = checkpoint.metadata()
        last: ReplicatedCkptError = ObjectMissing("the nodes", "read", f"{checkpoint.checkpoint_id}/{METADATA_NAME}")
        for node in sorted(checkpoint.nodes_with_metadata, key=lambda each: each != self._own_node):
            try:
                return self._metadata_at(node, checkpoint.checkpoint_id, file.size_bytes)
            except ReplicatedCkptError as exc:
                log.warning("metadata of %s on node %s: %s", checkpoint.checkpoint_id, node, exc)
                last = exc
        raise last

    def _metadata_at(self, node: str, checkpoint_id: str, size_bytes: int) -> bytes:
        if node == self._own_node:
            return self._unmanaged.read(checkpoint_id, METADATA_NAME, size_bytes)
        with AgentClient(self._by_node[node], LOOK_TIMEOUT_S) as client:
            return client.fetch_file(unmanaged_path(checkpoint_id, METADATA_NAME, size_bytes), size_bytes)


def unmanaged_listing_path(checkpoint_id: str | None) -> str:
    return "/v1/unmanaged" if checkpoint_id is None else f"/v1/unmanaged?{_query(checkpoint_id)}"


def unmanaged_verify_path(checkpoint_id: str) -> str:
    return f"/v1/unmanaged/verify?{_query(checkpoint_id)}"


def _query(checkpoint_id: str) -> str:
    return urllib.parse.urlencode({"checkpoint_id": checkpoint_id})
