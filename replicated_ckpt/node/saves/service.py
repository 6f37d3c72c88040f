"""The agent's work for its node, without HTTP: opens saves, receives copies, commits, lists holdings."""

import contextlib
import logging
import math
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from replicated_ckpt import failpoints
from replicated_ckpt.core.inventory import Holding
from replicated_ckpt.core.layout import MANIFEST_NAME, METADATA_NAME, SEQUENCE_FLOOR_MAX, ShardName
from replicated_ckpt.core.lineage import History, merge_histories
from replicated_ckpt.core.manifest import MANIFEST_BYTES_MAX, decode_manifest
from replicated_ckpt.core.protocol.settlement import Answer
from replicated_ckpt.core.upkeep.marks import Marks
from replicated_ckpt.core.upkeep.policy import scope_of
from replicated_ckpt.errors import (
    ConfigInvalid,
    ManifestInvalid,
    ReplicatedCkptError,
    SaveAborted,
    SaveSuperseded,
    StoreUnavailable,
)
from replicated_ckpt.node.peers.address_book import PeerBook
from replicated_ckpt.node.saves.finish import Finisher, Outline
from replicated_ckpt.node.saves.in_doubt import InDoubtSaves, StaleSave
from replicated_ckpt.node.saves.pins import Pins
from replicated_ckpt.node.saves.receive import Intake, Received, receive_file, receive_plain_file, taking_metadata
from replicated_ckpt.node.saves.request_body import Body
from replicated_ckpt.node.saves.submissions import Submissions
from replicated_ckpt.node.state.damage import DamageBook
from replicated_ckpt.node.state.mark_book import MarkBook
from replicated_ckpt.node.state.policies import PolicyBook
from replicated_ckpt.node.state.rank_reports import Figures
from replicated_ckpt.node.state.sequence_floor import ReservedSequences, SequenceFloor
from replicated_ckpt.stores.files.locks import exclusive
from replicated_ckpt.stores.local.directories.intent import WRITER, Intent
from replicated_ckpt.stores.local.directories.journal import End
from replicated_ckpt.stores.local.shard_file import CommittedShard
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.local.unclaimed import UnclaimedFilesReader
from replicated_ckpt.stores.local.versions.readers import lock_version, look_again
from replicated_ckpt.stores.local.versions.recycled import RecycledFiles, RoomOfRecycled
from replicated_ckpt.stores.peer.client import AgentAddress

log = logging.getLogger(__name__)

OPEN_GRACE_S = 5.0  # a rank locks its save a moment after it opens: until then no lock shows that it lives
_ABORTED = (End.ABORTED, End.RETIRED)
"""Ends that hold for every node: the save is decided nowhere, or a policy has retired it."""


class NodeService:
    """One node's saves and checkpoints. Every method may be called from several threads at once."""

    def __init__(self, store: LocalStore, direct_io: str = "off", niceness: int = 0) -> None:
        self.store = store
        self._direct_io = direct_io
        self.node_id = store.node_id()
        self.peers = PeerBook(store.agent_directory())
        self.damage = DamageBook(store)
        self.unclaimed = UnclaimedFilesReader(store, self.node_id)
        self.sequence_floor = SequenceFloor(store.agent_directory())
        self.policies = PolicyBook(store.agent_directory())
        self.marks = MarkBook(store.agent_directory())
        self.in_doubt = InDoubtSaves()
        self.pins = Pins()
        self.figures = Figures()
        self.completing = threading.Lock()
        """Taken by a thread that completes a save from other nodes' answers: two at once would undo each other's work."""
        self._lock = threading.Lock()
        self._intake = Intake(store)
        self.submissions = Submissions(store, niceness)
        abort = partial(self.abort, unless_decided=True)
        self.finisher = Finisher(store, self.peers, self.submissions, self.commit, abort)
        self._opened_at: dict[str, float] = {}
        self._started_at = time.monotonic()
        self._is_leaving, self.is_drained = False, False
        self._reserved = ReservedSequences(store, self.histories)

    def recover(self) -> tuple[str, ...]:
        """Commits the saves whose decision was durable here before a crash; returns their ids. Called at the start.

        A save that cannot be committed stays staged and is logged. It does not prevent the start.
        """
        return self._complete_decided(self.store.list_staged())

    def _complete_decided(self, intents: Iterable[Intent]) -> tuple[str, ...]:
        """Commits the saves that are decided here. A decision is final, so no node may treat such a save as aborted."""
        completed = []
        for save_id in (intent.save_id for intent in intents):
            try:
                # Published, but still staged: a crash came between the rename and the clean-up.
                if self.store.is_decided(save_id) or self.store.is_published(save_id):
                    self.store.commit(save_id)
                    completed.append(save_id)
            except SaveSuperseded as exc:
                log.info("save %s stays staged until the newer one is seen whole: %s", save_id, exc.message)
            except ReplicatedCkptError as exc:
                log.error("save %s cannot be completed: %s", save_id, exc)  # noqa: TRY400 - it explains itself
        return tuple(completed)

    def open_save(self, intent: Intent) -> tuple[dict[str, History], tuple[StaleSave, ...]]:
        """Opens a save. Returns the histories of this node, with the numbers reserved for other open saves, and stale
        saves.

        Stale are other attempts at this checkpoint, and earlier saves of the same process group. Another job's save is
        not stale, even if no rank of this node works on it: its ranks may still be planning.

        Raises:
            CheckpointExists, StoreError. SaveAborted: this node aborted it. StoreUnavailable: this agent is stopping.
        """
        # An opening that arrives late must not revive a save that this node has reported as aborted.
        self._refuse_over(intent.save_id, *_ABORTED)
        self.pins.end(intent.session.partition(WRITER)[0])
        self.is_drained = False  # it is used again
        found = self.list_stale_saves(intent)  # listed once: later, another save may be open
        completed = self._complete_decided(stale_save.intent for stale_save in found)
        stale_saves = tuple(stale_save for stale_save in found if stale_save.intent.save_id not in completed)
        with self._lock:  # before it is on disk: no search may take it for a save without ranks
            if self._is_leaving:
                raise _leaving_error(intent)
            self._opened_at[intent.save_id] = math.inf  # it counts as young until it is open, however slow the disk is
        try:
            self.open_in_store(intent)
        except BaseException:
            with self._lock:
                self._opened_at.pop(intent.save_id, None)
            raise
        with self._lock:
            if intent.save_id in self._opened_at:  # else it was aborted meanwhile
                self._opened_at[intent.save_id] = time.monotonic()
        for stale_save in stale_saves:
            if stale_save.is_over:
                self._reserved.release(stale_save.intent.save_id)
        return self._reserved.reserve(intent.save_id, scope_of(intent.checkpoint_id)), stale_saves

    def refuse_saves(self) -> frozenset[str]:
        """From now on no save is opened here. Returns the saves that are open."""
        with self._lock:
            self._is_leaving = True
            opened = frozenset(self._opened_at)
        return opened | {intent.save_id for intent in self.store.list_staged()}

    def pin(self, save_id: str, reader: str, sender: str = "") -> None:
        """Pins a save for a load from the address `sender`, so that it is not removed here meanwhile."""
        checkpoint_id = self.store.catalog.checkpoint_of(save_id)
        lock = None if checkpoint_id is None else lock_version(self.store.catalog, checkpoint_id, save_id)
        self.pins.pin(save_id, reader, lock, sender)

    def histories(self, scope: str) -> dict[str, History]:
        """The histories in a directory of checkpoints, from saves that are committed or staged here, and from peers."""
        received = {lineage: History(sequence) for lineage, sequence in self.sequence_floor.read_all().items()}
        staged = [
            {note.lineage: History(min(note.sequence, SEQUENCE_FLOOR_MAX))}
            for note in self.store.read_places().values()
        ]
        return merge_histories([self.store.catalog.histories(scope), received, *staged])

    def learn_sequences(self, sequences: Mapping[str, int], sender: str) -> None:
        """Records sequences that a peer or a rank has sent, within the bounds of `SequenceFloor`."""
        known = self.sequence_floor.read_all()
        # Loads and peers repeat known numbers all the time: only news is worth reading the catalog.
        is_news = any(sequence > known.get(lineage, 0) for lineage, sequence in sequences.items())
        self.sequence_floor.raise_to(sequences, self._sequences_here() if is_news else {}, sender)

    def _sequences_here(self) -> dict[str, int]:
        """The largest sequence of each lineage that is committed or staged on this node."""
        versions = [manifest.version for _, manifest in self.store.catalog.versions()]
        staged = [(note.lineage, note.sequence) for note in self.store.read_places().values()]
        here: dict[str, int] = {}
        for lineage, sequence in [*((one.lineage, one.sequence) for one in versions), *staged]:
            here[lineage] = max(here.get(lineage, 0), sequence)
        return here

    def learn_marks(self, told: Iterable[Marks]) -> None:
        """Takes over the marks of other nodes on saves that lie here."""
        told = [marks for marks in told if marks.rejections]
        if told:  # else the catalog need not be read
            self.marks.learn(told, {manifest.save_id for _, manifest in self.store.catalog.versions()})

    def open_in_store(self, intent: Intent) -> None:
        """The step of `open_save` that makes the save visible on disk."""
        self.store.begin(intent)

    def list_stale_saves(self, by: Intent | None = None) -> tuple[StaleSave, ...]:
        """Staged saves that have ended, or may have.

        A save has ended if its session has begun the save `by`, if `by` is a newer save of the same checkpoint, or if
        its processes are gone. A save that is locked, or was opened just now, `may_live`: a trainer may load while it
        saves in the background. Such a save is completed if it was decided, and otherwise left alone.
        """
        with self.looking():
            return tuple(self._list_stale_saves(by, OPEN_GRACE_S))

    def looking(self) -> contextlib.AbstractContextManager[None]:
        """A lock against processes that open a save without the agent. Without it, a search could find the save before
        it is locked.
        """
        return exclusive(self.store.root_agent_directory())

    def _list_stale_saves(self, by: Intent | None, grace_s: float) -> Iterator[StaleSave]:
        for intent in self.store.list_staged():
            is_left = by is not None and intent.session == by.session
            if by is not None and intent.save_id == by.save_id:
                continue
            if by is not None and intent.checkpoint_id == by.checkpoint_id:
                why = f"save {by.save_id} of {by.checkpoint_id!r} overtook it"
                yield StaleSave(intent, why, is_over=True, is_left=is_left)
            elif is_left:
                yield StaleSave(intent, "its process group has started another save", is_over=True, is_left=True)
            else:
                may_live = self.was_opened_within(grace_s, intent) or self.is_locked(intent.save_id)
                yield StaleSave(intent, "its processes have ended", may_live)

    def find_settleable(self, grace_s: float) -> tuple[StaleSave, ...]:
        """Staged saves whose processes are gone, and that were opened, or found at the start, at least `grace_s` ago."""
        with self.looking():
            return tuple(stale_save for stale_save in self._list_stale_saves(None, grace_s) if not stale_save.may_live)

    def was_opened_within(self, grace_s: float, intent: Intent) -> bool:
        """Whether the save is so young that its ranks may not have locked it yet."""
        with self._lock:
            opened_at = self._opened_at.get(intent.save_id)
        # Opened before this agent started: its ranks may be starting again, too.
        if opened_at is None and grace_s > OPEN_GRACE_S:
            opened_at = self._started_at
        return opened_at is not None and time.monotonic() - opened_at < grace_s

    def is_locked(self, save_id: str) -> bool:
        """Whether a rank of this node still works on the save. Each takes a lock before it writes."""
        return self.store.is_locked(save_id)

    def check_open(self, save_id: str) -> None:
        """Raises SaveAborted: the save is not open here."""
        if not self.store.is_staged(save_id):
            self._refuse_over(save_id)
            raise SaveAborted(f"Save {save_id} is not open on node {self.node_id}.")

    def _refuse_over(self, save_id: str, *ends: End) -> None:
        """Raises SaveAborted: the save has ended here; with `ends`, in one of these ways. The message has the reason."""
        entry = self.store.journal.find_end(save_id)
        if entry is not None and (not ends or entry.end in ends):
            raise SaveAborted(f"Save {save_id} was {entry.end.value} on node {self.node_id}: {entry.why}.")

    def receive(self, save_id: str, name: str, body: Body, *, durable: bool) -> Received:
        """Receives one file of an open save from a peer. It counts only if it is complete and intact.

        Raises:
            SaveAborted, StoreFull, ObjectCorrupt, ConnectionResetError, PeerProtocolError
        """
        self.check_open(save_id)
        path = self.store.path_of_staged(save_id, name)
        intent = self.store.intent_of(save_id)
        if name == MANIFEST_NAME:
            raw = body.read_all(MANIFEST_BYTES_MAX)
            manifest = decode_manifest(raw, "the request of a peer")
            # The opening has checked only this name: the decision must not publish under another one.
            if manifest.checkpoint_id != intent.checkpoint_id:
                raise ManifestInvalid(
                    f"Save {save_id} was opened for {intent.checkpoint_id!r}, but its manifest names another checkpoint."
                )
            self.store.put_small(save_id, name, raw)
            failpoints.reach("agent.decision-staged")
            return Received.of(raw)
        if name == METADATA_NAME:
            with taking_metadata(intent, body.size_bytes) as take:
                return receive_plain_file(path, body, take, RecycledFiles(self.store.root))
        # The name comes from a peer, and becomes a file's.
        if ShardName.parse(name) is None:
            raise ConfigInvalid(f"{name!r} is not a file of a checkpoint: agents receive no other files.")
        with self._intake.taking(intent, name, body.size_bytes) as take:
            pool = (RecycledFiles if durable else RoomOfRecycled)(self.store.root)
            return receive_file(path, body, take, durable=durable, direct_io=self._direct_io, recycled=pool)

    def link(self, save_id: str, name: str, source: CommittedShard, *, durable: bool) -> None:
        """Stages a committed shard of this node as a shard of an open save. Its bytes count as received.

        Raises:
            SaveAborted, PeerProtocolError; and as `LocalStore.link_staged`: then the sender sends the bytes.
        """
        self.check_open(save_id)
        # The name comes from a peer, and becomes a file's.
        if ShardName.parse(name) is None:
            raise ConfigInvalid(f"{name!r} is not a shard that can be linked here.")
        with self._intake.taking(self.store.intent_of(save_id), name, source.size_bytes) as take:
            take(source.size_bytes)
            self.store.link_staged(save_id, name, source, self.damage.has_file, durable=durable)

    def commit(self, save_id: str) -> tuple[str, ...]:
        """As `LocalStore.commit`. The save is no longer in doubt."""
        held = self.store.commit(save_id)
        self.in_doubt.settle(save_id)
        with self._lock:
            self._opened_at.pop(save_id, None)
        return held

    def finish_save(self, outline: Outline) -> None:
        """Passes the save to the finisher, which completes or aborts it without any rank.

        Raises:
            SaveAborted: the save is not open, or was aborted.
        """
        self._refuse_over(outline.manifest.save_id)
        self.finisher.begin_finish(outline)

    @property
    def is_saving(self) -> bool:
        """Whether saves that were submitted are being written, or finished."""
        return self.submissions.is_busy or self.finisher.is_busy

    def is_in_use(self) -> bool:
        """Whether ranks of this node save, or a load has a pin here."""
        staged = self.store.list_staged()
        return self.is_saving or self.pins.has_any() or any(self.is_locked(intent.save_id) for intent in staged)

    def abort(self, save_id: str, why: str, *, unless_decided: bool = False) -> None:
        """As `LocalStore.abort`: later bytes of the save are refused, with the reason. A committed one stays."""
        self._reserved.release(save_id)
        with self._lock:
            self._opened_at.pop(save_id, None)
        self.store.abort(save_id, why, unless_decided=unless_decided)
        self.in_doubt.settle(save_id)

    def state_of(self, save_id: str) -> dict[str, Any]:
        """The answer to `GET /v1/saves/{save_id}`: the state of a save, and its checkpoint if it is committed.

        Raises:
            ManifestInvalid: nothing of the save is found, but a checkpoint here with a damaged manifest may be it.
        """
        answer = self.answer_of(save_id)
        if answer is Answer.ABSENT and (unknown := next(self.store.catalog.with_invalid_manifest(), None)) is not None:
            raise ManifestInvalid(
                f"Node {self.node_id} cannot determine the state of save {save_id}: its manifest of {unknown!r} is "
                "damaged.",
                "`replicated-ckpt repair --root ROOT` restores the manifest from another node that has it.",
            )
        if answer is Answer.PUBLISHED:
            return {"state": answer.value, "checkpoint_id": self.store.catalog.checkpoint_of(save_id)}
        return {"state": answer.value}

    def answer_of(self, save_id: str) -> Answer:
        """Whether a save is committed, decided, staged, or absent here.

        A save whose decision lies here is committed before the answer, unless a newer save has its name.
        """
        if self.store.is_decided(save_id):
            try:
                self.store.commit(save_id)
            except SaveSuperseded:
                return Answer.DECIDED
        if self.store.catalog.checkpoint_of(save_id) is not None:
            return Answer.PUBLISHED
        return Answer.STAGED if self.store.is_staged(save_id) else look_again(self.store.catalog, save_id)

    def answer_to_settle(self, save_id: str, *, is_over: bool, is_left: bool) -> dict[str, Any]:
        """As `state_of`, for a node that settles the save. The answer is final: from then on this node acts by it.

        `is_over`: the asking node has a newer save of the checkpoint or the process group, so only a rank that has
        locked the save works on it. `is_left`: the save's coordinator has begun another save, so no rank works on it.

        An undecided save that this node coordinates, and that no rank works on, is removed before the answer. After
        that it can never be decided.
        """
        found = self._end_of(save_id)
        if found["state"] != Answer.STAGED.value:
            return found
        with self.looking():
            intent = self.store.intent_of(save_id)
            is_young = not is_over and self.was_opened_within(OPEN_GRACE_S, intent)
            if not is_left and (is_young or self.is_locked(save_id)):
                return {"state": Answer.WORKING.value}
        # A damaged decision was one all the same: other nodes may have published it.
        if intent.coordinator == self.node_id and not self.store.is_decision_damaged(save_id):
            why = "its coordinator has ended, and another node asks for its state"
            self.abort(save_id, why, unless_decided=True)
        return self._end_of(save_id)

    def _end_of(self, save_id: str) -> dict[str, Any]:
        """As `state_of`, but an aborted save is reported as such even if a checkpoint here has a damaged manifest."""
        entry = self.store.journal.find_end(save_id)
        is_over = entry is not None and entry.end in _ABORTED and self.answer_of(save_id) is Answer.ABSENT
        return {"state": Answer.ABORTED.value} if is_over else self.state_of(save_id)

    def holdings(self, checkpoint_id: str | None = None) -> tuple[Holding, ...]:
        """The holdings of this node, with known damage marked."""
        return self.damage.mark_damaged(self.store.catalog.holdings(self.node_id, checkpoint_id))

    def list_diverged(self) -> list[str]:
        """The checkpoints here whose saves have found that replicas differ."""
        names = [holding.checkpoint_id for holding in self.holdings() if not holding.is_replaced]
        found = [(name, self.store.catalog.find_manifest(name)) for name in names]
        return [name for name, manifest in found if manifest is not None and manifest.divergences]

    def learn_peers(self, peers: Sequence[Mapping[str, Any]]) -> tuple[AgentAddress, ...]:
        """Stores the addresses of the nodes of a save or load in the address book; returns those of the other nodes."""
        others = tuple(peer for peer in map(AgentAddress.from_json, peers) if peer.node_id != self.node_id)
        self.peers.learn(others)
        return others


def _leaving_error(intent: Intent) -> StoreUnavailable:
    return StoreUnavailable(
        "this node's agent",
        "open",
        intent.checkpoint_id,
        "it is stopping, and completes only the saves that are open",
        "Save again once the next agent runs. If no supervisor starts one, the next save does.",
    )
