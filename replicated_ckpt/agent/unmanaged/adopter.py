"""Carrying out an adoption on all nodes: stage everywhere, account for every shard, then decide and publish."""

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from operator import index
from typing import Any, TypeVar

from replicated_ckpt import failpoints
from replicated_ckpt.agent.unmanaged.look import UnmanagedFound
from replicated_ckpt.core.layout import MANIFEST_NAME, METADATA_NAME
from replicated_ckpt.core.lineage import Histories, histories_from_json, merge_histories, newest_lineage
from replicated_ckpt.core.manifest import Manifest, ShardEntry
from replicated_ckpt.core.unmanaged.adopting import AdoptUnmanaged
from replicated_ckpt.core.unmanaged.survey import manifest_of, rank_of
from replicated_ckpt.errors import CheckpointAmbiguous, ReplicatedCkptError, SaveAborted
from replicated_ckpt.stores.peer.answer import parsing
from replicated_ckpt.stores.peer.client import AgentAddress, AgentClient
from replicated_ckpt.stores.peer.fan_out import FanOut
from replicated_ckpt.stores.thread_start import start_worker

log = logging.getLogger(__name__)

KEEP_EVERY_S = 5.0
"""So often nodes hear that the command lives, while it waits for those that stage."""
_ANSWER_S = 10.0
_SESSION = "adoption"
_Staged = Mapping[str, tuple[int, int]]
_Result = TypeVar("_Result")


class Adopter:
    """Has the agents of all nodes do one adoption after the other. `addresses` are where they are reached from here."""

    def __init__(self, addresses: Mapping[str, AgentAddress], peers: Iterable[AgentAddress]) -> None:
        self._addresses = addresses
        self._peers = [peer.to_json() for peer in peers]

    def adopt(self, plan: AdoptUnmanaged, found: UnmanagedFound) -> Mapping[str, ReplicatedCkptError]:
        """Makes the checkpoint one of ours on the nodes that give shards; returns which have not published it yet, and why.

        Those complete it when they are asked the next time, as after a save. A failure before any node has the decision
        leaves every node with what stock torch wrote.

        Raises:
            ReplicatedCkptError: it was not adopted, nothing has changed anywhere.
        """
        save_id = uuid.uuid4().hex
        with self._keep_alive(plan, save_id):
            return self._adopt(plan, found, save_id)

    def _adopt(self, plan: AdoptUnmanaged, found: UnmanagedFound, save_id: str) -> Mapping[str, ReplicatedCkptError]:
        try:
            opened = self._each(plan.shards_by_node, lambda client, _: self._open(client, plan, found, save_id))
            staged = self._each(plan.shards_by_node, lambda client, node: self._stage(client, plan, node, save_id))
            lineage = newest_lineage(merge_histories(opened.values())) or uuid.uuid4().hex[:16]
            manifest = replace(self._manifest(plan, found, save_id, staged), lineage=lineage)
            self._each(plan.shards_by_node, lambda client, node: _check_staged(client, node, save_id))
        except ReplicatedCkptError as exc:
            self._abort(plan, save_id, exc.message)
            raise
        failpoints.reach("adopt.accounted")
        return self._publish(plan, save_id, manifest.encode())

    @contextmanager
    def _keep_alive(self, plan: AdoptUnmanaged, save_id: str) -> Iterator[None]:
        """Nodes hear every few seconds that the command lives; one that does not for HELD_S gives the adoption up."""
        is_over = threading.Event()

        def keep(node: str) -> None:
            with AgentClient(self._addresses[node]) as client:
                client.call("POST", f"/v1/saves/{save_id}/keep")

        def tell() -> None:
            while not is_over.wait(KEEP_EVERY_S):
                for node, error in FanOut.run(plan.shards_by_node, keep).errors.items():
                    log.info("node %s may not know that the adoption goes on: %s", node, error.message)

        start_worker(tell, name="rckpt-keep")
        try:
            yield
        finally:
            is_over.set()

    def _each(self, nodes: Iterable[str], call: Callable[[AgentClient, str], _Result]) -> Mapping[str, _Result]:
        def call_node(node: str) -> _Result:
            with AgentClient(self._addresses[node], _ANSWER_S) as client:
                return call(client, node)

        return FanOut.run(nodes, call_node).raise_first()

    def _open(self, client: AgentClient, plan: AdoptUnmanaged, found: UnmanagedFound, save_id: str) -> Histories:
        document = {
            "checkpoint_id": plan.checkpoint_id,
            "session": f"{_SESSION}/{save_id}",
            "overwrite": True,
            "adopts": True,
            "announced": {"save_bytes_max": len(found.metadata)},
            "peers": [peer for peer in self._peers if peer["node_id"] != client.address.node_id],
        }
        answer = client.call("POST", f"/v1/saves/{save_id}", document)
        client.put("PUT", f"/v1/saves/{save_id}/{METADATA_NAME}", found.metadata)
        with parsing(f"{client.address.label} opened an adoption wrongly"):
            return histories_from_json(answer["histories"])

    def _stage(self, client: AgentClient, plan: AdoptUnmanaged, node: str, save_id: str) -> _Staged:
        names = plan.shards_by_node[node]
        answer = client.call("POST", f"/v1/saves/{save_id}/adopt", {"shards": list(names)})
        with parsing(f"{client.address.label} answered adopt wrongly"):
            shards: Mapping[str, Any] = answer["shards"]
            return {name: (index(shards[name]["size_bytes"]), index(shards[name]["crc32c"])) for name in names}

    def _manifest(
        self, plan: AdoptUnmanaged, found: UnmanagedFound, save_id: str, staged: Mapping[str, _Staged]
    ) -> Manifest:
        shards = {}
        for shard in found.save.holders:
            by_node = {node: files[shard] for node, files in sorted(staged.items()) if shard in files}
            if len(set(by_node.values())) > 1:
                listed = {node: f"{size} bytes of CRC32C {crc:08x}" for node, (size, crc) in by_node.items()}
                raise CheckpointAmbiguous(plan.checkpoint_id, shard, listed)
            owner = min(by_node)
            shards[shard] = ShardEntry(*by_node[owner], rank_of(shard), owner, tuple(by_node))
        hosts = {node: self._addresses[node].host for node in plan.node_ids}
        as_of_unix_s = min(found.save.checkpoint.adopted_as_of_unix_s, time.time())
        manifest = manifest_of(found.save, save_id, shards, plan.copies, hosts)
        return replace(manifest, created_unix_s=as_of_unix_s)

    def _publish(self, plan: AdoptUnmanaged, save_id: str, raw: bytes) -> Mapping[str, ReplicatedCkptError]:
        """From the first manifest that was sent on nothing is taken back: some node may have published already."""

        def publish(node: str) -> None:
            with AgentClient(self._addresses[node], _ANSWER_S) as client:
                with suppress(SaveAborted):  # a load may have brought it from another node: `commit` tells
                    client.put("PUT", f"/v1/saves/{save_id}/{MANIFEST_NAME}", raw)
                client.call("POST", f"/v1/saves/{save_id}/commit")

        outcome = FanOut.run(plan.shards_by_node, publish)
        if not outcome.results:
            raise next(iter(outcome.errors.values()))
        return outcome.errors

    def _abort(self, plan: AdoptUnmanaged, save_id: str, why: str) -> None:
        def abort(node: str) -> None:
            with AgentClient(self._addresses[node]) as client:
                client.call("POST", f"/v1/saves/{save_id}/abort", {"why": why[:500]})

        outcome = FanOut.run(plan.shards_by_node, abort)
        for node, error in outcome.errors.items():
            log.info("node %s gives the adoption up by itself: %s", node, error.message)


def _check_staged(client: AgentClient, node: str, save_id: str) -> None:
    state = client.call("GET", f"/v1/saves/{save_id}").get("state")
    if state != "staged":
        raise SaveAborted(
            f"Node {node} has given the adoption up while others were staging: it is {state!r} there.", "Repair again."
        )
