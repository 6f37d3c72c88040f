"""Finishes a save without its ranks: once agents have every shard, the coordinator's agent decides and commits.

The coordinator's rank sends `.metadata` and the outline of the manifest. Its agent alone makes the decision, so decision
and publication have the same order as in every save.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from replicated_ckpt import failpoints
from replicated_ckpt.core.layout import MANIFEST_NAME
from replicated_ckpt.core.manifest import Manifest, decode_manifest
from replicated_ckpt.core.protocol.placement import intended_holders
from replicated_ckpt.errors import ObjectMissing, PeerProtocolError, ReplicatedCkptError, SaveAborted, StoreUnavailable
from replicated_ckpt.node.peers.address_book import PeerBook
from replicated_ckpt.node.saves.shard_copies import WrittenCopies
from replicated_ckpt.node.saves.submissions import Submissions
from replicated_ckpt.stores.files.locks import DescriptorLock
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.local.versions.publish import check_decidable
from replicated_ckpt.stores.peer.answer import parsing
from replicated_ckpt.stores.peer.client import AgentClient
from replicated_ckpt.stores.threads import FanOut, forget_locals, start_worker, translate_any
from replicated_ckpt.wording import one_line

log = logging.getLogger(__name__)

AGAIN_WITHIN_S = 20.0
"""How long a silent agent, or one that lost its shards, is asked again: its ranks may start it again."""
PUBLISHED_WITHIN_S = 60.0
"""Time for the nodes of a save to publish it after the decision. After that re-protection does it."""
_PAUSE_S = 0.3
_KEPT = 64  # ends that a slow rank may still ask for


@dataclass(frozen=True)
class HelperCopy:
    """A copy that a rank of `node` makes from its own memory. Size 0: that node's agent writes it, and reports its size."""

    node: str
    size_bytes: int = 0
    crc32c: int = 0


@dataclass(frozen=True)
class Outline:
    """A save that is complete except for shards that agents still write. In `manifest` these shards have no size yet.

    `buddies_by_shard`: the nodes for the copies of these shards, and of the shards in `helpers_by_shard`.
    `must_have_all`: no copy may be missing.
    """

    manifest: Manifest
    buddies_by_shard: Mapping[str, Sequence[str]]
    copies: int
    must_have_all: bool
    helpers_by_shard: Mapping[str, Sequence[HelperCopy]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "manifest": self.manifest.encode().decode()}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Raises ManifestInvalid, ValueError, KeyError, TypeError: the fields are not an outline."""
        manifest = decode_manifest(str(fields["manifest"]).encode(), "the outline that a rank sent")
        buddies = {str(name): tuple(map(str, nodes)) for name, nodes in fields["buddies_by_shard"].items()}
        helpers = {
            str(name): tuple(HelperCopy(str(one["node"]), int(one["size_bytes"]), int(one["crc32c"])) for one in made)
            for name, made in fields["helpers_by_shard"].items()
        }
        if not manifest.shards.keys() >= buddies.keys() >= helpers.keys():
            raise ValueError("it names shards that the manifest does not have")
        return cls(manifest, buddies, int(fields["copies"]), bool(fields["must_have_all"]), helpers)

    def complete(self, written: Mapping[str, WrittenCopies]) -> Manifest:
        shards = dict(self.manifest.shards)
        for name, copies in written.items():
            holders = intended_holders(copies.holders, self.buddies_by_shard[name], self.copies)
            shards[name] = replace(shards[name], size_bytes=copies.size_bytes, crc32c=copies.crc32c, holders=holders)
        return replace(self.manifest, shards=shards)


@dataclass(frozen=True)
class Finished:
    """The end of a save, with the shards that agents wrote. `manifest` is "" if the save was aborted for missing copies."""

    manifest: str
    written: Sequence[WrittenCopies]
    differing: Sequence[tuple[str, str]] = ()
    """Shard and node of each helper's copy that does not count: it is missing, or has other bytes."""

    def to_json(self) -> dict[str, Any]:
        written = [copies.to_json() for copies in self.written]
        return {"manifest": self.manifest, "written": written, "differing": self.differing}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Raises ValueError, KeyError, TypeError: the fields are invalid."""
        differing = tuple((str(name), str(node)) for name, node in fields["differing"])
        return cls(str(fields["manifest"]), tuple(map(WrittenCopies.from_json, fields["written"])), differing)


class Finisher:
    """Finishes saves that this node coordinates. The thread of each save locks the save as a rank would.

    Safe for concurrent use.
    """

    def __init__(
        self,
        store: LocalStore,
        peers: PeerBook,
        submissions: Submissions,
        commit: Callable[[str], object],
        abort: Callable[[str, str], object],
    ) -> None:
        """`abort` removes a save that is not decided."""
        self._store, self._peers, self._submissions = store, peers, submissions
        self._commit, self._abort = commit, abort
        self._lock = threading.Lock()
        self._ends: dict[str, Future[Finished]] = {}
        self._nodes: dict[str, tuple[float, frozenset[str]]] = {}

    @property
    def is_busy(self) -> bool:
        with self._lock:
            return any(not end.done() for end in self._ends.values())

    def is_finishing(self, save_id: str) -> bool:
        with self._lock:
            return save_id in self._ends and not self._ends[save_id].done()

    def read_published(self) -> Mapping[str, frozenset[str]]:
        """By save that was decided here in the last PUBLISHED_WITHIN_S: its other nodes, which may need this node to
        publish.
        """
        since = time.monotonic() - PUBLISHED_WITHIN_S
        with self._lock:
            return {save_id: nodes for save_id, (decided_at, nodes) in self._nodes.items() if decided_at > since}

    def begin_finish(self, outline: Outline) -> "Future[Finished]":
        """Finishes a save without its ranks. Returns the future of its end, also if finishing was begun before.

        Raises:
            SaveAborted: the save is not open. StoreUnavailable: no thread can be started for it; nothing was begun.
        """
        save_id = outline.manifest.save_id
        with self._lock:
            known = self._ends.get(save_id)
            # A rank that lost its connection asks again: the save must not be finished twice.
            if known is not None:
                return known
            for old in list(self._ends)[: max(0, len(self._ends) - _KEPT)]:
                if self._ends[old].done():
                    del self._ends[old]
            end: Future[Finished] = Future()
            # A rank asks again after a restart of its agent: the save may have been published meanwhile.
            published = self._store.catalog.checkpoint_of(save_id)
            if published is not None:
                manifest = self._store.catalog.manifest_of(published, save_id)  # a newer one may have its name
                end.set_result(Finished(manifest.encode().decode(), ()))
                self._ends[save_id] = end
                return end
            # Locked before the rank may exit: a save that no process has locked is settled as stale.
            held = self._store.lock_save(save_id)
            try:
                start_worker(self._run, outline, held, end, name="rckpt-finish")
            except StoreUnavailable:
                held.release()
                raise
            self._ends[save_id] = end
        return end

    def end_of(self, save_id: str) -> "Future[Finished]":
        """The future of a save's end. Raises ObjectMissing: it was not begun here."""
        with self._lock:
            if save_id in self._ends:
                return self._ends[save_id]
        why = "this agent has no record of an order to finish that save; it may have been restarted since"
        raise ObjectMissing("this agent", "finish", save_id, why)

    def _run(self, outline: Outline, held: DescriptorLock, end: "Future[Finished]") -> None:
        save_id = outline.manifest.save_id
        try:
            failpoints.reach("agent.finishing")
            end.set_result(self._finish(save_id, outline))
        except BaseException as exc:  # noqa: BLE001 - top of a thread; the rank that waits gets the error
            error = translate_any(forget_locals(exc), "this node's agent", "finish", save_id)
            log.warning("save %s cannot be finished: %s", save_id, one_line(error))
            end.set_exception(error)
        finally:
            held.release()

    def _finish(self, save_id: str, outline: Outline) -> Finished:
        try:
            written, differing = self._add_helpers(save_id, outline, self._collect(save_id, outline))
            # Before the decision: afterwards the save could not be aborted any more.
            if outline.must_have_all and any(copies.missed for copies in written.values()):
                self._abort(save_id, "a shard has too few copies, and on_degraded is 'raise'")
                return Finished("", tuple(written.values()), differing)
            raw = outline.complete(written).encode()
            # Decoded before it becomes the decision: a manifest that readers reject would lose the save.
            decode_manifest(raw, "the shards that agents have written")
            # The last look before the decision: another run may have taken the name since the save opened.
            check_decidable(self._store.root, self._store.intent_of(save_id))
            # The decision: durable here before any other node gets it.
            self._store.put_small(save_id, MANIFEST_NAME, raw)
            self._note_nodes(outline.manifest)
        except BaseException as exc:
            self._abort_unwritten(save_id, one_line(translate_any(exc, "this node's agent", "finish", save_id)))
            if isinstance(exc, StoreUnavailable | ObjectMissing):  # the error of another node, not of this agent
                raise SaveAborted(f"Save {save_id} was aborted: {exc.message}", exc.hint) from exc
            raise
        failpoints.reach("agent.decided")
        try:
            self._commit(save_id)
        except ReplicatedCkptError as exc:  # it is decided: re-protection publishes it here later
            log.warning("save %s is decided, but not published here yet: %s", save_id, exc)
        failpoints.reach("agent.finished")
        return Finished(raw.decode(), tuple(written.values()), differing)

    def _abort_unwritten(self, save_id: str, why: str) -> None:
        """Aborts the save. If that fails, the failure is only logged: ranks get the first error, which may have the
        same cause.
        """
        try:
            self._abort(save_id, f"its shards are not all written: {why}")
        except ReplicatedCkptError as exc:
            log.warning("save %s is aborted, and stays staged for now: %s", save_id, exc)

    def _note_nodes(self, manifest: Manifest) -> None:
        nodes = frozenset(entry.node_id for entry in manifest.nodes) - {self._store.node_id()}
        with self._lock:
            self._nodes[manifest.save_id] = time.monotonic(), nodes
            for old in list(self._nodes)[:-_KEPT]:
                del self._nodes[old]

    def _collect(self, save_id: str, outline: Outline) -> Mapping[str, WrittenCopies]:
        names_by_node: dict[str, list[str]] = {}
        for name in outline.buddies_by_shard:
            if outline.manifest.shards[name].size_bytes:  # its rank has written it
                continue
            names_by_node.setdefault(outline.manifest.shards[name].owner_node, []).append(name)
        outcome = FanOut.run(names_by_node, lambda node: self._await_shards(save_id, node, names_by_node[node]))
        return {copies.name: copies for found in outcome.raise_first().values() for copies in found}

    def _add_helpers(
        self, save_id: str, outline: Outline, written: Mapping[str, WrittenCopies]
    ) -> tuple[dict[str, WrittenCopies], tuple[tuple[str, str], ...]]:
        """Adds to each shard the helpers' nodes whose file equals the owner's. Also returns the copies that do not
        count.

        A helper that fails costs a copy, but does not fail the save.
        """
        complete, differing = dict(written), []
        asked = [
            (one.node, name)
            for name, helpers in outline.helpers_by_shard.items()
            for one in helpers
            if not one.size_bytes
        ]
        made = FanOut.run(asked, lambda copy: self._await_shards(save_id, copy[0], [copy[1]])[0])
        for name, helpers in outline.helpers_by_shard.items():
            entry = outline.manifest.shards[name]
            shard = written.get(name) or WrittenCopies(name, entry.size_bytes, entry.crc32c, entry.holders)
            holders, missed = list(shard.holders), list(shard.missed)
            if name not in written:  # its entry lists the intended holders, with the helpers
                holders = [node for node in holders if node not in {one.node for one in helpers}]
            for one in helpers:
                copy = made.results.get((one.node, name)) if not one.size_bytes else one
                if copy is not None and (copy.size_bytes, copy.crc32c) == (shard.size_bytes, shard.crc32c):
                    holders.append(one.node)
                    continue
                differing.append((name, one.node))
                why = made.errors.get((one.node, name)) or "a rank's replica there has other bytes than the owner saved"
                missed.append(f"no copy of {name} was made on node {one.node}: {one_line(str(why))}")
            complete[name] = replace(shard, holders=tuple(holders), missed=tuple(missed))
        return complete, tuple(differing)

    def _await_shards(self, save_id: str, node: str, names: Sequence[str]) -> Sequence[WrittenCopies]:
        failing_since: float | None = None
        while True:
            try:
                if node == self._store.node_id():
                    return self._submissions.wait_for_shards(save_id, names)
                return self._ask(save_id, node, names)
            except (StoreUnavailable, ObjectMissing):
                failing_since = failing_since or time.monotonic()
                if time.monotonic() > failing_since + AGAIN_WITHIN_S:
                    raise
                self._store.lock_save(save_id).release()  # raises SaveAborted if it was aborted meanwhile
                time.sleep(_PAUSE_S)

    def _ask(self, save_id: str, node: str, names: Sequence[str]) -> Sequence[WrittenCopies]:
        ticket = self._store.intent_of(save_id).ticket
        with AgentClient(self._peers.address_of(node)) as client:
            answer = client.call("POST", f"/v1/saves/{save_id}/written", {"shards": list(names), "ticket": ticket})
        with parsing(f"Node {node} sent an invalid report of its shards"):
            found = tuple(map(WrittenCopies.from_json, answer["written"]))
        # Otherwise the manifest would be completed with another shard's checksum.
        if sorted(copies.name for copies in found) != sorted(names):
            raise PeerProtocolError(f"Node {node} reports other shards than {sorted(names)}.")
        return found
