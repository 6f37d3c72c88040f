"""The agent's verbs of upkeep: greetings, suspect files, policies, full reads, plans, removal, rejection, drain."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from typing import Any

from replicated_ckpt.agent.http.greeting import CallBacks, confirm_goodbye, confirm_hello
from replicated_ckpt.agent.http.request import Answer, Checks, Request, json_answer
from replicated_ckpt.agent.repair.reprotect import Reprotector
from replicated_ckpt.agent.state.rights import Right
from replicated_ckpt.core.layout import (
    SEQUENCE_FLOOR_MAX,
    is_checkpoint_file,
    is_checkpoint_id,
    is_lineage,
    is_save_id,
)
from replicated_ckpt.core.upkeep.marks import merge_marks
from replicated_ckpt.core.upkeep.policy import Policy
from replicated_ckpt.core.upkeep.repair_plan import RepairPlan
from replicated_ckpt.errors import ConfigInvalid, ManifestInvalid, StoreError
from replicated_ckpt.node.peers.watch import HOLDINGS_TIMEOUT_S, ask_holdings, describe_silence
from replicated_ckpt.node.saves.pins import PIN_S
from replicated_ckpt.node.saves.service import NodeService
from replicated_ckpt.node.saves.settle import abort_lost
from replicated_ckpt.stores.local.directories.journal import End
from replicated_ckpt.stores.local.inspection import Inspector
from replicated_ckpt.stores.local.versions.full_disk import keep_room_to_start, make_room_to_start, try_room
from replicated_ckpt.stores.local.versions.readers import is_read
from replicated_ckpt.stores.local.versions.remove import renamed_refusal, retire
from replicated_ckpt.stores.peer.answer import parsing
from replicated_ckpt.stores.peer.client import AgentAddress, AgentClient
from replicated_ckpt.stores.threads import FanOut
from replicated_ckpt.wording import one_line

_READER_CHARS_MAX = 256  # a peer chooses it, and it is kept in memory
_WHY_CHARS_MAX = 500  # a peer chooses it, and it is logged


class RepairRoutes:
    """Answers requests of upkeep, through re-protection and the node's service. Safe for concurrent use."""

    def __init__(
        self,
        service: NodeService,
        reprotector: Reprotector,
        checks: Checks,
        hold_upload: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self._service = service
        self._hold_upload = hold_upload
        self._reprotector = reprotector
        self._checks = checks
        self._call_backs = CallBacks()
        self._inspector: Inspector | None = None
        self._bytes_to_read = 0
        self.by_verb: Mapping[str, Callable[[Mapping[str, Any], Request], Answer]] = {
            "hello": self._hello,
            "sequence": self._sequence,
            "suspects": self._suspect,
            "verify": self._verify,
            "repair": self._carry_out,
            "retention": self._retain,
            "abort-lost": self._abort_lost,
            "remove": self._remove,
            "forget": self._forget,
            "drained": self._drain,
            "reject": self._reject,
            "marks": self._fetch_marks,
        }

    def answer(self, verb: str, request: Request) -> Answer:
        """Answer to `POST /v1/{verb}`.

        Raises:
            PeerProtocolError, ConfigInvalid: the request is invalid; nothing was changed. StoreError: of the node's own
                store, or of a peer.
        """
        fields = request.document()
        with parsing(f"{verb} is not possible"):
            return self.by_verb[verb](fields, request)

    def _hello(self, fields: Mapping[str, Any], request: Request) -> Answer:
        """The agent of a known peer has started, perhaps at another address, or exits with its disk intact."""
        said, is_leaving = AgentAddress.from_json(fields["peer"]), fields.get("is_leaving") is True
        confirm = confirm_goodbye if is_leaving else confirm_hello
        with request.heartbeat:
            confirm(self._service.peers, said, request.peer_host, self._call_backs)
        return json_answer(None if is_leaving else self._reprotector.wake)

    def _sequence(self, fields: Mapping[str, Any], request: Request) -> Answer:
        """A load begins: pins the save that the load reads, and records the largest sequence that it found in the lineage.

        `restores`: for a load of "latest", how often the save was restored since the run's last save, this time included.
        """
        lineage, save_id, reader = (str(fields[name]) for name in ("lineage", "save_id", "reader"))
        if not is_lineage(lineage) or not is_save_id(save_id) or len(reader) > _READER_CHARS_MAX:
            raise ConfigInvalid("The request `sequence` names no save of a lineage.")
        sequence, restores = int(fields["sequence"]), int(fields.get("restores", 0))
        self._service.learn_sequences({lineage: sequence}, request.peer_host)
        if not fields.get("is_load", True):
            return json_answer()
        if restores > 0 and 0 <= sequence <= SEQUENCE_FLOOR_MAX:
            self._service.marks.note_restores(lineage, sequence, save_id, restores)
        self._service.pin(save_id, reader, request.peer_host)
        here = [found for _, found in self._service.store.catalog.versions() if found.save_id == save_id]
        # Read after the pin, from which on the save's optimizer is not removed.
        return json_answer(is_here=bool(here), is_slim=any(found.is_slim for found in here))

    def _suspect(self, fields: Mapping[str, Any], _: Request) -> Answer:
        """A load got bad bytes from this node: the agent reads the file again, and repairs it if it is bad."""
        checkpoint_id, save_id, name = (fields[key] for key in ("checkpoint_id", "save_id", "name"))
        if not (is_checkpoint_id(checkpoint_id) and is_save_id(save_id) and is_checkpoint_file(name)):
            raise ConfigInvalid("The request `suspects` names no file of a checkpoint.")
        self._reprotector.suspect(checkpoint_id, save_id, name, one_line(fields.get("why", ""), _WHY_CHARS_MAX))
        return json_answer()

    def _retain(self, fields: Mapping[str, Any], _: Request) -> Answer:
        """A rank sends the policies of its run. Their revision is the sequence of the save that it makes, or has made."""
        is_new = self._service.policies.learn([Policy.from_json(entry) for entry in fields["policies"]])
        is_due = is_new or fields.get("is_committed")
        return json_answer(self._reprotector.wake if is_due else None)

    def _abort_lost(self, fields: Mapping[str, Any], request: Request) -> Answer:
        """The operator declares nodes lost: a save that is in doubt only because of these nodes is settled."""
        save_id, lost = fields["save_id"], [str(node) for node in fields["lost"]]
        if not is_save_id(save_id) or not lost:
            raise ConfigInvalid("The request `abort-lost` names no save, or no lost nodes.")
        with request.heartbeat:
            waits_for = abort_lost(self._service, save_id, lost)
        return json_answer(self._reprotector.wake, waits_for=list(waits_for))

    def _remove(self, fields: Mapping[str, Any], request: Request) -> Answer:
        """Removes this node's copy of a save for good. If the copy stays, answers why.

        `is_asked`: removes nothing, and answers whether the copy could be removed. `is_patient`: a save that a load reads
        is removed when the load has ended. `session`: the loads of this session have ended.
        """
        checkpoint_id, save_id, service = fields["checkpoint_id"], fields["save_id"], self._service
        if not (is_checkpoint_id(checkpoint_id) and is_save_id(save_id)):
            raise ConfigInvalid("The request `remove` names no save of a checkpoint.")
        self._refuse_renamed(checkpoint_id, save_id)
        if fields.get("session"):
            service.pins.end(str(fields["session"]))
        # Otherwise a load in progress would fail on all of its ranks.
        if service.pins.is_pinned(save_id) and not fields.get("force"):
            if fields.get("is_patient"):
                with request.heartbeat, self._hold_upload(save_id):
                    service.store.journal.append_end(save_id, End.REMOVING)
            return json_answer(is_removed=False, why=f"a load reads it, or has read it in the last {PIN_S:.0f} s")
        service.pins.drop(save_id)
        root = service.store.root
        if fields.get("is_asked"):
            manifest = service.store.catalog.manifest_path(checkpoint_id, save_id)
            # `rm` sends this before it touches the bucket: a load that reads the save keeps both copies.
            is_kept = not fields.get("force") and is_read(manifest)
            return json_answer(is_removed=False, why="a process of this node reads it" if is_kept else "")
        with request.heartbeat:
            # On a full disk the journal entry below could not be written, and nothing could be removed.
            make_room_to_start(root)
            with self._hold_upload(save_id):
                # Written first: after a crash the next start finishes the removal, and no node copies the save back.
                service.store.journal.append_end(save_id, End.REMOVING)
            is_staged = service.store.is_staged(save_id)  # read first: the save may be published during the removal
            is_removed = retire(root, checkpoint_id, save_id)
            keep_room_to_start(root)
        why = ""
        if not is_removed and self._is_here(checkpoint_id, save_id):
            why = "a process of this node reads it; it is removed when that process has ended"
        elif is_staged and not is_removed:
            why = "its save has not ended on this node; it is removed when the save has ended"
        else:
            with suppress(StoreError):  # the next round of re-protection writes it
                service.store.journal.append_end(save_id, End.REMOVED)
        return json_answer(self._reprotector.wake, is_removed=is_removed, why=why)

    def _reject(self, fields: Mapping[str, Any], request: Request) -> Answer:
        """Records that this node's user rejects saves, which "latest" then skips, or ends that. Peers fetch the mark.

        Answers which peers have the mark, and why the others do not. Those get it in a later round of re-protection.
        """
        save_ids, service = [str(save_id) for save_id in fields["save_ids"]], self._service
        if not save_ids or not all(map(is_save_id, save_ids)):
            raise ConfigInvalid("The request `reject` names no saves.")
        peers = {peer.node_id: peer for peer in service.peers.read_all() if peer.node_id != service.node_id}

        def ask(node: str) -> None:
            with AgentClient(peers[node], HOLDINGS_TIMEOUT_S) as client:
                client.call("POST", "/v1/marks", {"node_id": service.node_id})

        with request.heartbeat:
            looked = FanOut.run(peers, lambda node: ask_holdings(peers[node]))
            # The new mark must be newer than every mark that a peer has.
            known = merge_marks(found.node_report.marks for found in looked.results.values())
            service.marks.reject(save_ids, known, is_rejected=fields["is_rejected"] is True)
            fetched = FanOut.run(looked.results, ask)
        errors = {**looked.errors, **fetched.errors}
        not_reached = {node: describe_silence(error) for node, error in errors.items()}
        return json_answer(self._reprotector.wake, reached=sorted(fetched.results), not_reached=not_reached)

    def _fetch_marks(self, fields: Mapping[str, Any], request: Request) -> Answer:
        """A node has a new mark, which this node fetches from the node's known address. The request itself has no mark."""
        peer = next((one for one in self._service.peers.read_all() if one.node_id == fields["node_id"]), None)
        if peer is None:
            raise ConfigInvalid("The request `marks` names a node that is not in this node's address book.")
        with request.heartbeat:
            self._service.learn_marks([ask_holdings(peer).node_report.marks])
        return json_answer()

    def _refuse_renamed(self, checkpoint_id: str, save_id: str) -> None:
        """Refuses a directory that a user renamed, or copied under another name: it belongs to the user alone."""
        manifest = self._service.store.catalog.find_manifest(checkpoint_id)
        if manifest is not None and manifest.save_id == save_id and manifest.checkpoint_id != checkpoint_id:
            raise renamed_refusal(checkpoint_id, manifest.checkpoint_id, self._service.store.root)

    def _is_here(self, checkpoint_id: str, save_id: str) -> bool:
        """Whether the save is here under this name. A copy that a user made under another name does not count."""
        try:
            return self._service.store.catalog.is_here(checkpoint_id, save_id)
        except ManifestInvalid:
            return False

    def _forget(self, fields: Mapping[str, Any], _: Request) -> Answer:
        """Removes a node, which the user declares lost, from the address book. Answers whether the book had it."""
        is_known = self._service.peers.forget(str(fields["node_id"]))
        return json_answer(self._reprotector.wake, is_known=is_known)

    def _drain(self, fields: Mapping[str, Any], _: Request) -> Answer:
        """Marks this node as about to be taken down, or not. The mark ends with the agent, or when a save opens here."""
        self._service.is_drained = fields["is_drained"] is True
        return json_answer()

    def _verify(self, fields: Mapping[str, Any], request: Request) -> Answer:
        """Reads all files of this node, or of one checkpoint. Answers which are damaged and which are intact.

        Damaged files are recorded, and repaired like those that a load reports.
        """
        checkpoint_id = fields.get("checkpoint_id")
        if checkpoint_id is not None and not is_checkpoint_id(checkpoint_id):
            raise ConfigInvalid(f"{str(checkpoint_id)[:200]!r} is not a checkpoint id.")
        inspector = Inspector(self._service.store, self._service.node_id)
        with self._checks.in_turn(request):
            note = self._service.damage.begin_reading()
            # The size is set before the inspector: once that is set, another thread may read both.
            self._bytes_to_read, self._inspector = inspector.sum_sizes(checkpoint_id), inspector
            try:
                findings = [finding.to_json() for finding in inspector.inspect(checkpoint_id)]
            finally:
                self._inspector = None
        for holding in inspector.holdings:
            note(holding)
        return json_answer(
            self._reprotector.wake if findings else None,
            node_id=self._service.node_id,
            findings=findings,
            holdings=[holding.to_json() for holding in inspector.holdings],
            unclaimed=[unclaimed.to_json() for unclaimed in inspector.unclaimed],
            node_report=self._reprotector.node_report().to_json(),
            room=try_room(self._service.store.root).to_json(),
            newer=list(self._service.store.catalog.of_newer_format(checkpoint_id)),
            silent=[holding.to_json() for holding in self._reprotector.watch.silent_holdings()],
            bytes_read=inspector.bytes_read,
        )

    def how_far(self) -> Mapping[str, int]:
        """The progress of the running full read; zeros if none runs."""
        inspector = self._inspector
        if inspector is None:
            return {"bytes_read": 0, "size_bytes": 0}
        return {"bytes_read": inspector.bytes_read, "size_bytes": self._bytes_to_read}

    def _carry_out(self, fields: Mapping[str, Any], request: Request) -> Answer:
        """Does this node's part of a plan. Answers the error of each action, or ""."""
        part = RepairPlan.from_json(fields["plan"]).of_node(self._service.node_id)
        with request.heartbeat:
            # A peer's plan may replace no save: otherwise a peer's token would be enough to delete checkpoints here.
            outcomes = self._reprotector.carry_out(part, may_replace=request.right >= Right.OWNER)
        results = [{"action": str(action), "error": error} for action, error in outcomes]
        return json_answer(self._reprotector.wake, results=results)
