"""The agent's verbs: which request does what. Each part of a request's path is validated before it names a file."""

import json
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Protocol

from replicated_ckpt.agent.http.metrics import CONTENT_TYPE, expose
from replicated_ckpt.agent.http.object_routes import ObjectRoutes
from replicated_ckpt.agent.http.relay import open_metadata, pull_metadata
from replicated_ckpt.agent.http.repair_routes import RepairRoutes
from replicated_ckpt.agent.http.request import Answer, Checks, Request, file_answer, json_answer, require_asker
from replicated_ckpt.agent.repair.reprotect import Reprotector
from replicated_ckpt.agent.state.rights import Right, needed_right
from replicated_ckpt.core.layout import (
    METADATA_NAME,
    ShardName,
    check_checkpoint_id,
    is_checkpoint_file,
    is_checkpoint_id,
    is_save_id,
)
from replicated_ckpt.core.manifest import MANIFEST_BYTES_MAX
from replicated_ckpt.core.reading.unmanaged_files import ranges_from_json
from replicated_ckpt.core.reading.windows import ByteRange
from replicated_ckpt.core.upkeep.policy import scope_of
from replicated_ckpt.errors import ConfigInvalid, ObjectMissing, PeerProtocolError, ReplicatedCkptError
from replicated_ckpt.node.saves.finish import Outline
from replicated_ckpt.node.saves.service import NodeService
from replicated_ckpt.node.saves.settle import settle
from replicated_ckpt.node.state.rank_reports import RankReports
from replicated_ckpt.stores.files.durable import flush_later
from replicated_ckpt.stores.local.directories.intent import Announced, Intent
from replicated_ckpt.stores.local.shard_file import CommittedShard
from replicated_ckpt.stores.local.unmanaged import UnmanagedDirectory, UnmanagedInspector
from replicated_ckpt.stores.local.versions.full_disk import try_room
from replicated_ckpt.stores.local.versions.publish import find_named
from replicated_ckpt.stores.peer.answer import parsing
from replicated_ckpt.stores.peer.copy import BEHIND_HEADER
from replicated_ckpt.stores.threads import lower_priority
from replicated_ckpt.wording import one_line

ITEMS_BYTES_MAX = 16 << 20
"""Bound on the JSON of some 800,000 items of one node. During the check they take ten times as much memory."""


class UnmanagedRoutes:
    """Answers requests about checkpoints of stock torch, which have no manifest. Read-only. Safe for concurrent use."""

    def __init__(self, service: NodeService, checks: Checks) -> None:
        self._service = service
        self._checks = checks
        self._unmanaged = UnmanagedDirectory(service.store.root)

    def list(self, checkpoint_id: str | None) -> Answer:
        """The files of all such checkpoints on this node, or of one."""
        if checkpoint_id is not None:
            check_checkpoint_id(checkpoint_id)
        found = self._unmanaged.holdings(self._service.node_id, checkpoint_id)
        return json_answer(node_id=self._service.node_id, unmanaged=[holding.to_json() for holding in found])

    def open(self, checkpoint_id: str, name: str, size_bytes: str) -> int:
        """A file descriptor of the file, which must have this size. The caller closes it."""
        # int() also takes "1_0", signs and other scripts' digits, and is slow on very long numbers.
        is_size = size_bytes.isascii() and size_bytes.isdigit() and len(size_bytes) <= 18
        if not is_checkpoint_file(name) or not is_size:
            raise ObjectMissing("this agent", "GET", name[:200], "no such file")
        return self._unmanaged.open(check_checkpoint_id(checkpoint_id), name, int(size_bytes))

    def verify(self, request: Request, checkpoint_id: str) -> Answer:
        """Checks this node's files of one checkpoint. The body has the items' places, as `.metadata` may be elsewhere."""
        check_checkpoint_id(checkpoint_id)
        inspector = UnmanagedInspector(self._service.store, self._service.node_id)
        with self._checks.in_turn(request, ITEMS_BYTES_MAX) as raw:
            ranges = _ranges(raw)
            findings = [finding.to_json() for finding in inspector.inspect(checkpoint_id, ranges)]
        return json_answer(findings=findings, bytes_read=inspector.bytes_read, unchecked=inspector.unchecked)


def _ranges(raw: bytes) -> Mapping[str, tuple[ByteRange, ...]]:
    with parsing("Items cannot be checked"):
        return ranges_from_json(json.loads(raw)["items"])


class SubmissionRoutes:
    """Answers requests about saves that ranks have submitted to this agent. Safe for concurrent use."""

    def __init__(self, service: NodeService) -> None:
        self._service = service

    def finish_save(self, request: Request, save_id: str) -> Answer:
        """With a body, takes a save over from its ranks. Without one, waits for its end, and raises its error."""
        raw = request.body.read_all(MANIFEST_BYTES_MAX)
        if raw:
            self._service.finish_save(_outline_in(raw, save_id))
            return json_answer(state="taken")
        with request.heartbeat:
            finished = self._service.finisher.end_of(save_id).result()
        return json_answer(**finished.to_json())

    def wait_for_written(self, request: Request, save_id: str) -> Answer:
        """Waits until shards of this node's ranks are written. Raises the error of a shard that failed."""
        fields = request.document()
        path = self._service.store.intent_path(save_id)
        # The coordinator's agent sends this, as the ranks may be gone. It has the ticket of the save, but no invitation.
        if not Intent.admits_at(save_id, path, str(fields.get("ticket", ""))):
            request.require(Right.JOB)
        names: Any = fields.get("shards")
        if not isinstance(names, list) or any(ShardName.parse(str(name)) is None for name in names):
            raise PeerProtocolError("The request `written` names no shards.")
        with request.heartbeat:
            written = self._service.submissions.wait_for_shards(save_id, [str(name) for name in names])
        return json_answer(written=[copies.to_json() for copies in written])


def _outline_in(raw: bytes, save_id: str) -> Outline:
    with parsing("A save is not finished"):
        outline = Outline.from_json(json.loads(raw))
    if outline.manifest.save_id != save_id:
        raise PeerProtocolError(f"Save {save_id} cannot be finished with the outline of another save.")
    return outline


_QUERY_FIELDS_MAX = 8  # no verb has more; a hostile query costs no more than these
_WHO = ("node_id", "incarnation", "is_leaving", "tls_sha256", "start_id")


class StatusOf(Protocol):
    """The agent's status. `is_brief`: only the fields whose cost does not grow with the store.

    `is_opening`: the client is a rank of this node that is about to save.
    """

    def __call__(self, *, is_brief: bool, is_opening: bool = False) -> Mapping[str, Any]: ...


class Routes:
    """Maps each request to a call of the node's service. Safe for concurrent use."""

    def __init__(
        self,
        service: NodeService,
        reprotector: Reprotector,
        objects: ObjectRoutes,
        status: StatusOf,
        stop: Callable[[], None],
        prove: Callable[[str], str] = lambda _: "",
    ) -> None:
        self._service = service
        self._reprotector = reprotector
        self._prove = prove
        checks = Checks()
        self._repair = RepairRoutes(service, reprotector, checks, objects.uploader.paused.pause)
        self._objects = objects
        self._unmanaged = UnmanagedRoutes(service, checks)
        self._submitted = SubmissionRoutes(service)
        self._status = status
        self._stop = stop

    def answer(self, request: Request) -> Answer:  # noqa: PLR0911, C901 - one return a verb
        """Answer to a request.

        Raises:
            ReplicatedCkptError: the request is refused or failed.
        """
        parts, query = split_target(request.target)
        # Before the body is read or the path is used. An unknown verb needs the owner's right.
        request.require(needed_right(request.method, parts))
        match (request.method, *parts):
            case ("GET", "v1", "status"):
                return json_answer(**self._make_status(query, is_owner=request.right >= Right.OWNER))
            case ("GET", "metrics"):
                return self._expose(is_cluster="cluster" in query)
            case (_, "v1", "object", *rest):
                return self._objects.answer(request, rest, query)
            case ("GET", "v1", "unmanaged"):
                return self._unmanaged.list(query.get("checkpoint_id"))
            case ("POST", "v1", "unmanaged", "verify"):
                return self._unmanaged.verify(request, query.get("checkpoint_id", ""))
            case ("GET", "v1", "holdings"):
                return self._holdings(query.get("checkpoint_id"), is_upkeep="upkeep" in query)
            case ("GET", "v1", "reports"):
                found = RankReports(self._service.store).read(query.get("checkpoint_id", ""))
                return json_answer(node_id=self._service.node_id, reports=[report.to_json() for report in found])
            case ("POST", "v1", "peers"):
                return self._begin_load(request)
            case ("GET", "v1", "files", name):
                return file_answer(request, self._open(name, query))
            case (_, "v1", "saves", save_id, *rest) if is_save_id(save_id):
                return self._save(request, save_id, rest, query.get("settle", ""), query.get("ticket", ""))
            case ("POST", "v1", verb) if verb in self._repair.by_verb:
                return self._repair.answer(verb, request)
            case ("POST", "v1", "shutdown"):
                return json_answer(self._stop)
        raise ObjectMissing("this agent", request.method, request.target[:200], "no such verb")

    def _make_status(self, query: Mapping[str, str], *, is_owner: bool) -> Mapping[str, Any]:
        """The status. Clients other than the owner get the agent's identity and the progress of reads and copies alone."""
        status = self._status(is_brief="brief" in query or not is_owner, is_opening="opening" in query and is_owner)
        told = status if is_owner else {name: status[name] for name in _WHO}
        # The proof shows a client with the user's key that this agent has the key, too.
        if is_owner and "challenge" in query:
            told = {**told, "proof": self._prove(query["challenge"])}
        return {**told, "verify": self._repair.how_far(), "bytes_fetched": self._reprotector.bytes_fetched}

    def _expose(self, *, is_cluster: bool) -> Answer:
        status = self._make_status({}, is_owner=True)
        return Answer(expose(self._service, self._reprotector.seen, status, is_cluster=is_cluster), CONTENT_TYPE)

    def _save(  # noqa: PLR0911, C901 - one return a verb
        self, request: Request, save_id: str, rest: list[str], settles: str, ticket: str
    ) -> Answer:
        self._require_end(request, rest)
        match (request.method, *rest):
            case ("GET",):
                with request.heartbeat:
                    if settles:
                        self._require_part(request, save_id, ticket)
                        how = {"is_over": settles in ("over", "left"), "is_left": settles == "left"}
                        return json_answer(**self._service.answer_to_settle(save_id, **how))
                    return json_answer(**self._service.state_of(save_id))
            case ("POST",):
                return self._begin(request, save_id)
            case ("PUT", name):
                return self._receive(request, save_id, name)
            case ("POST", name, "link"):
                return self._link(request, save_id, name)
            case ("POST", "pull"):
                return json_answer(**asdict(pull_metadata(self._service, save_id, request)))
            case ("POST", "commit"):
                with request.heartbeat:
                    held = self._service.commit(save_id)
                return json_answer(self._wake_upkeep, held=list(held))
            case ("POST", "written"):
                return self._submitted.wait_for_written(request, save_id)
            case ("POST", "finish"):
                return self._submitted.finish_save(request, save_id)
            case ("POST", "abort"):
                return self._abort(request, save_id)
        raise ObjectMissing("this agent", request.method, request.target[:200], "no such verb")

    def _wake_upkeep(self) -> None:
        self._reprotector.wake()
        self._objects.uploader.wake()

    def _begin(self, request: Request, save_id: str) -> Answer:
        fields = request.document()
        with parsing("A save cannot be opened"):
            peers = self._service.learn_peers(fields["peers"])
            intent = Intent(
                save_id,
                fields["checkpoint_id"],
                str(fields["session"]),
                bool(fields["overwrite"]),
                tuple(sorted({self._service.node_id, *(peer.node_id for peer in peers)})),
                str(fields.get("coordinator", "")),
                announced=Announced.from_json(fields.get("announced", {})),
                ticket=str(fields.get("ticket", "")),
            )
        # A peer chose the id: one such as "../x" would name a directory outside of the root.
        if not isinstance(intent.checkpoint_id, str) or not is_checkpoint_id(intent.checkpoint_id):
            raise ConfigInvalid(f"{str(intent.checkpoint_id)[:200]!r} is not a checkpoint id.")
        # A rank that gave up may be at a later save by now, which this one would abort.
        if request.connection is not None:
            require_asker(request.connection)
        histories, stale_saves = self._service.open_save(intent)
        named = find_named(self._service.store.catalog, intent.checkpoint_id)
        if stale_saves:
            with request.heartbeat:
                settle(self._service, stale_saves, peers)
        told = {lineage: history.to_json() for lineage, history in histories.items()}
        taken = self._service.store.find_taken_numbers(intent.checkpoint_id, save_id)
        return json_answer(histories=told, named=named, taken_numbers=None if taken is None else sorted(taken))

    def _abort(self, request: Request, save_id: str) -> Answer:
        """Aborts a save. A peer may do so only if it takes part in the save and the save is not decided here.

        Once a node has published a save, every peer can read its id, and this node may hold the only copy.
        """
        fields = request.document()
        if request.right < Right.JOB and not self._service.store.has_intent(save_id):
            return json_answer()  # each rank of a failed save sends an abort to each node: another rank was first
        if self._service.store.is_decided(save_id) or not self._admits(save_id, str(fields.get("ticket", ""))):
            request.require(Right.JOB)
        why = one_line(fields.get("why", "no reason given"), 500)
        self._service.abort(save_id, why, unless_decided=request.right < Right.JOB)
        return json_answer()

    def _admits(self, save_id: str, ticket: str) -> bool:
        return Intent.admits_at(save_id, self._service.store.intent_path(save_id), ticket)

    def _require_part(self, request: Request, save_id: str, ticket: str) -> None:
        """Checks that the sender may settle a save with a ticket. Only its own nodes may, as that can abort the save."""
        if self._service.store.intent_of(save_id).ticket and not self._admits(save_id, ticket):
            request.require(Right.JOB)

    def _require_end(self, request: Request, rest: Sequence[str]) -> None:
        """Checks that a request that ends a save comes from the coordinator. A peer may send shards."""
        is_end = rest in (["pull"], ["commit"]) or (
            request.method == "PUT" and any(ShardName.parse(name) is None for name in rest)
        )
        if is_end:
            request.require(Right.JOB)

    def _receive(self, request: Request, save_id: str, name: str) -> Answer:
        durable = request.headers.get("X-Rckpt-Ack", "durable") != "memory"
        with request.heartbeat:
            if BEHIND_HEADER in request.headers:  # this thread serves only the connection that sends the shard
                lower_priority(self._service.submissions.niceness)
            found = self._service.receive(save_id, name, request.body, durable=durable)
        if durable:
            return json_answer(**asdict(found))
        # ack="peer-memory": the rank goes on now, and the kernel then starts to write the file.
        return json_answer(flush_later(self._service.store.path_of_staged(save_id, name)), **asdict(found))

    def _link(self, request: Request, save_id: str, name: str) -> Answer:
        fields = request.document()
        with parsing("A shard cannot be linked"):
            source, durable = CommittedShard.from_json(fields["source"]), bool(fields["durable"])
        with request.heartbeat:
            self._service.link(save_id, name, source, durable=durable)
        return json_answer()

    def _holdings(self, checkpoint_id: str | None, *, is_upkeep: bool) -> Answer:
        if checkpoint_id is not None:
            check_checkpoint_id(checkpoint_id)
        found = self._service.holdings(checkpoint_id)
        unclaimed = [found.to_json() for found in self._service.unclaimed.find_files(checkpoint_id)]
        holdings = [holding.to_json() for holding in found]
        newer = [] if is_upkeep else list(self._service.store.catalog.of_newer_format(checkpoint_id))
        answer = {"node_id": self._service.node_id, "holdings": holdings, "unclaimed": unclaimed, "newer": newer}
        if checkpoint_id is not None:
            beside = self._service.store.catalog.newest_of_runs(self._service.node_id, scope_of(checkpoint_id))
            told = {"marks": self._service.marks.read().to_json()}
            return json_answer(**answer, node_report=told, beside=[holding.to_json() for holding in beside])
        room = try_room(self._service.store.root).to_json()
        node_report = replace(self._objects.uploader.node_report(), is_busy=self._reprotector.is_busy)
        return json_answer(**answer, node_report=node_report.to_json(), room=room)

    def _begin_load(self, request: Request) -> Answer:
        """A load begins: stores the addresses of the nodes that take part, and settles stale saves."""
        fields = request.document()
        with parsing("Peers cannot be learned"):
            peers = self._service.learn_peers(fields["peers"])
        with request.heartbeat:
            settle(self._service, self._service.list_stale_saves(), peers)
        return json_answer(self._reprotector.wake_for_load)

    def _open(self, name: str, query: Mapping[str, str]) -> int:
        """A descriptor of a file of a committed save, of a checkpoint without a manifest, or of `.metadata` of any save."""
        checkpoint_id, save_id = query.get("checkpoint_id"), query.get("save_id", "")
        if checkpoint_id is not None and "size_bytes" in query:
            return self._unmanaged.open(checkpoint_id, name, query["size_bytes"])
        if checkpoint_id is None and name == METADATA_NAME and is_save_id(save_id):
            return open_metadata(self._service, save_id)
        if checkpoint_id is None or not is_checkpoint_id(checkpoint_id) or not is_save_id(save_id):
            raise ObjectMissing("this agent", "GET", name[:200], "no such file")
        # The load goes on, and retention must not remove the files that it has yet to read.
        self._service.pins.renew(save_id)
        return self._service.store.open_file(checkpoint_id, save_id, name)


def split_target(target: str) -> tuple[tuple[str, ...], Mapping[str, str]]:
    """The parts of a request's path, and its query."""
    try:
        url = urllib.parse.urlsplit(target)
        query = dict(urllib.parse.parse_qsl(url.query, max_num_fields=_QUERY_FIELDS_MAX))
    except ValueError as exc:
        raise PeerProtocolError(f"{target[:200]!r} is not a valid target of a request: {exc}.") from exc
    return tuple(urllib.parse.unquote(part) for part in url.path.split("/")[1:]), query


OPENING_WITHIN_S = 60.0
"""How long an agent that was told to stop waits for a save that a rank of this node is about to open."""
_WATCHING, _HOLDINGS, _SAVES = {("v1", "status"), ("metrics",)}, ("v1", "holdings"), ("v1", "saves")


class Activity:
    """When the agent last had work, and whether a save is about to be opened. A request in progress is work."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way = 0
        self._last = time.monotonic()
        self._registered_at: float | None = None

    def __enter__(self) -> None:
        with self._lock:
            self._under_way += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._under_way -= 1
            self._last = time.monotonic()

    def touch(self) -> None:
        with self._lock:
            self._last = time.monotonic()

    def note_registered(self) -> None:
        """A rank of this node is about to save, and relies on this agent to open the save."""
        with self._lock:
            self._registered_at = time.monotonic()

    def note_opened(self) -> None:
        with self._lock:
            self._registered_at = None

    @property
    def awaits_opening(self) -> bool:
        with self._lock:
            return self._registered_at is not None and time.monotonic() - self._registered_at < OPENING_WITHIN_S

    def idle_s(self) -> float:
        with self._lock:
            return 0.0 if self._under_way else time.monotonic() - self._last


class WatchedRoutes(Routes):
    """Counts each request as work, except those of upkeep, with which idle agents would keep each other alive."""

    def __init__(self, activity: Activity, *args: Any) -> None:
        super().__init__(*args)
        self._activity = activity

    def answer(self, request: Request) -> Answer:
        parts, query = split_target(request.target)
        if parts in _WATCHING or (parts == _HOLDINGS and "upkeep" in query):
            return self._answer_counted(request)
        with self._activity:
            try:
                return self._answer_counted(request)
            finally:
                if (
                    request.method == "POST" and parts[:2] == _SAVES and len(parts) == 3
                ):  # a save was opened, or refused
                    self._activity.note_opened()

    def _answer_counted(self, request: Request) -> Answer:
        try:
            return super().answer(request)
        except ReplicatedCkptError as exc:
            self._service.figures.count_error("request", exc)
            raise
