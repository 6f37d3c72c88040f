"""The agent's verbs of the object tier: name a bucket, probe it, order and follow an upload, remove or reject a save."""

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from replicated_ckpt.agent.http.request import Answer, Request, json_answer
from replicated_ckpt.core.inventory import Holding
from replicated_ckpt.core.layout import SEQUENCE_FLOOR_MAX, is_checkpoint_id, is_save_id
from replicated_ckpt.core.lineage import histories_of
from replicated_ckpt.core.manifest import Manifest, decode_manifest
from replicated_ckpt.core.upkeep.policy import scope_of
from replicated_ckpt.errors import ConfigInvalid, ObjectMissing, ReplicatedCkptError, StoreUnavailable
from replicated_ckpt.node.saves.service import NodeService
from replicated_ckpt.node.state.upload_book import UploadBook, unknown_hint
from replicated_ckpt.node.uploads.uploader import Uploader
from replicated_ckpt.stores.bucket.bucket import Bucket
from replicated_ckpt.stores.bucket.bucket_removal import remove_save
from replicated_ckpt.stores.bucket_client.client import AWAY_HINT
from replicated_ckpt.stores.bucket_client.opening import Trial, try_conditions
from replicated_ckpt.stores.bucket_client.url import ObjectTarget
from replicated_ckpt.stores.peer.answer import parsing
from replicated_ckpt.stores.threads import start_worker

log = logging.getLogger(__name__)

FIRST_WAIT_S, WAIT_S = 10.0, 2.0
"""How long a save waits for the probe of a bucket: the first one, which lists all checkpoints there, and later ones."""
_NOTHING = {"is_empty": False, "save_id": "", "lineage": "", "histories": {}, "error": "", "kind": "", "weakness": ""}


class Prober:
    """Runs at most one probe of each bucket at a time, in a thread of its own. Safe for concurrent use."""

    def __init__(self, book: UploadBook) -> None:
        self._book = book
        self._lock = threading.Lock()
        self._under_way: set[str] = set()
        self._begun: set[str] = set()
        self._holdings_by_url: dict[str, tuple[Holding, ...]] = {}
        self._tried: set[str] = set()
        self._weak_by_url: dict[str, Trial] = {}

    def probe(self, url: str, checkpoint_id: str) -> Mapping[str, Any]:
        """Whether a bucket can be reached, which save has a checkpoint's name there, and the lineages in its directory.

        A bucket that does not answer in time counts as unavailable. While its last probe still runs, it does so at once.
        `weakness`: the fault that the trial of its conditional writes has found. Only one answer has it.
        """
        with self._lock:
            # Each save would otherwise start one more thread for a bucket that hangs.
            is_late = url in self._under_way
            wait_s = WAIT_S if url in self._begun else FIRST_WAIT_S
            self._under_way.add(url)
            self._begun.add(url)
        found: list[Mapping[str, Any]] = []
        if not is_late:
            try:
                thread = start_worker(self._probe, url, checkpoint_id, found, name="rckpt-probe")
            except StoreUnavailable as exc:
                with self._lock:
                    self._under_way.discard(url)
                return _describe_failure(exc)
            thread.join(wait_s)
        late = StoreUnavailable(url, "probe", checkpoint_id, "it has not answered yet", AWAY_HINT)
        return {**(found[0] if found else _describe_failure(late)), "weakness": self._take_weakness(url)}

    def _probe(self, url: str, checkpoint_id: str, found: list[Mapping[str, Any]]) -> None:
        try:
            bucket = self._book.bucket(url)
            is_empty = bucket.is_empty(checkpoint_id)
            there = None if is_empty else bucket.save_of(checkpoint_id)
            histories = self._histories(url, bucket, scope_of(checkpoint_id))
            told = {"is_empty": is_empty, "histories": histories}
            if there is not None:
                told |= {"save_id": there.save_id, "lineage": there.mark.lineage if there.mark else ""}
            found.append({**_NOTHING, **told})
            self._try_conditions(url, bucket)
        except ReplicatedCkptError as exc:
            found.append(_describe_failure(exc))
        finally:
            with self._lock:
                self._under_way.discard(url)

    def _try_conditions(self, url: str, bucket: Bucket) -> None:
        """Tries the conditional writes of a bucket that no agent has tried. The next answer reports a weakness."""
        if url in self._tried:
            return
        self._tried.add(url)
        try:
            trial = try_conditions(bucket.client)
            if trial is not None and trial.describe_weakness(url):
                with self._lock:
                    self._weak_by_url[url] = trial
            elif trial is not None:
                trial.keep(bucket.client)
        except ReplicatedCkptError as exc:
            log.warning("the next agent tries the conditional writes to %s again: %s", url, exc)

    def _take_weakness(self, url: str) -> str:
        """The weakness of a bucket, if no answer has reported it, or "". The trial is then recorded in the bucket."""
        with self._lock:
            trial = self._weak_by_url.pop(url, None)
        if trial is None:
            return ""
        weakness = trial.describe_weakness(url)
        log.warning("%s", weakness)
        try:
            start_worker(self._keep, url, trial, name="rckpt-trial")
        except StoreUnavailable as exc:
            log.warning("the next agent tries the conditional writes to %s again: %s", url, exc)
        return weakness

    def _keep(self, url: str, trial: Trial) -> None:
        try:
            trial.keep(self._book.bucket(url).client)
        except ReplicatedCkptError as exc:
            log.warning("the next agent tries the conditional writes to %s again: %s", url, exc)

    def _histories(self, url: str, bucket: Bucket, scope: str) -> Mapping[str, Any]:
        """The histories in the bucket, which is listed once: later saves there are this run's own."""
        # Listing a large bucket takes seconds, which each save would wait for.
        if url not in self._holdings_by_url:
            self._holdings_by_url[url] = tuple(save.holding for save in bucket.saves() if save.mark is not None)
        held = (holding for holding in self._holdings_by_url[url] if scope_of(holding.checkpoint_id) == scope)
        versions = (holding.version for holding in held if holding.sequence <= SEQUENCE_FLOOR_MAX)
        return {lineage: history.to_json() for lineage, history in histories_of(versions).items()}


def _describe_failure(error: ReplicatedCkptError) -> Mapping[str, Any]:
    return {**_NOTHING, "error": str(error), "kind": type(error).__name__}


_ASK_HOLDER = "`replicated-ckpt show ID --root ROOT` lists the nodes that hold it: upload it from one of them."


class ObjectRoutes:
    """Maps requests to the uploader. Safe for concurrent use."""

    def __init__(self, service: NodeService, uploader: Uploader) -> None:
        self._service = service
        self.uploader = uploader
        self._prober = Prober(uploader.book)

    def answer(self, request: Request, parts: Sequence[str], query: Mapping[str, str]) -> Answer:
        """Answer to a request below `/v1/object`.

        Raises:
            PeerProtocolError, ConfigInvalid: the request is invalid; nothing was changed. ObjectMissing: there is no such
                verb, or the save is not here. StoreError: of the bucket, or of the node's own store.
        """
        match (request.method, *parts):
            case ("GET", "saves", save_id):
                return self._state(save_id, is_urgent="now" in query)
            case ("POST", "target" | "probe" | "upload" | "remove" | "reject" as verb):
                return self._do(verb, request)
        raise ObjectMissing("this agent", request.method, request.target[:200], "no such verb")

    def _state(self, save_id: str, *, is_urgent: bool) -> Answer:
        """The progress of this node's upload of a save: the fields of UploadState. `is_urgent`: tries the upload now."""
        if is_urgent:
            self.uploader.try_now(save_id)
        found = self.uploader.state_of(save_id) if is_save_id(save_id) else None
        if found is None:
            raise ObjectMissing("this agent", "GET", save_id[:80], "this node uploads no such save")
        return json_answer(**asdict(found))

    def _do(self, verb: str, request: Request) -> Answer:
        fields = request.document()
        with parsing(f"object/{verb} is not possible"):
            match verb:
                case "target":
                    target = ObjectTarget.from_json(fields)
                    # The objects of a file:// bucket inside the root would look like files of checkpoints.
                    target.check_is_apart(self._service.store.root)
                    is_new = self.uploader.book.learn(target)
                    return json_answer(self.uploader.try_now if is_new else self.uploader.wake)
                case "probe":
                    with request.heartbeat:
                        return json_answer(**self._probe(fields))
                case "upload":
                    return self._order(fields)
                case "remove":
                    with request.heartbeat:
                        return self._remove(fields)
                case "reject":
                    with request.heartbeat:
                        return self._reject(fields)
        raise ObjectMissing("this agent", "POST", f"object/{verb}"[:80], "no such verb")

    def _probe(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """Whether a bucket can be reached, and whether a checkpoint's name is free there."""
        if not is_checkpoint_id(fields["checkpoint_id"]):
            raise ConfigInvalid("The request `probe` names no checkpoint id.")
        return self._prober.probe(str(fields["url"]), fields["checkpoint_id"])

    def _remove(self, fields: Mapping[str, Any]) -> Answer:
        """Removes a save from a bucket that this node's own user has named. Answers whether the save was there."""
        checkpoint_id, save_id = fields["checkpoint_id"], fields["save_id"]
        if not (is_checkpoint_id(checkpoint_id) and is_save_id(save_id)):
            raise ConfigInvalid("The request `remove` names no save of a checkpoint.")
        told = decode_manifest(fields["manifest"].encode(), "the command") if fields.get("manifest") else None
        # The manifest lists the objects to delete: another save's would delete the wrong ones.
        if told is not None and (told.checkpoint_id, told.save_id) != (checkpoint_id, save_id):
            raise ConfigInvalid("The manifest in the request `remove` is of another save.")
        manifest = self._manifest_of(save_id) or told
        # Before the removal: a remaining order would upload the save again.
        self.uploader.book.forget(save_id)
        bucket = self.uploader.book.bucket(str(fields["url"]), checkpoint_id)
        # An upload in progress would put back the objects that are being deleted.
        with self.uploader.paused.pause(save_id):
            is_removed = remove_save(bucket, checkpoint_id, save_id, manifest)
        return json_answer(is_removed=is_removed)

    def _reject(self, fields: Mapping[str, Any]) -> Answer:
        """Marks a save as rejected, or ends the rejection, in a bucket that this node's own user has named."""
        checkpoint_id, save_id = fields["checkpoint_id"], fields["save_id"]
        if not (is_checkpoint_id(checkpoint_id) and is_save_id(save_id)):
            raise ConfigInvalid("The request `reject` names no save of a checkpoint.")
        bucket = self.uploader.book.bucket(str(fields["url"]), checkpoint_id)
        is_there = bucket.mark_rejected(checkpoint_id, save_id, is_rejected=fields["is_rejected"] is True)
        return json_answer(is_there=is_there)

    def _manifest_of(self, save_id: str) -> Manifest | None:
        """The manifest of a save on this node; None: it is not here."""
        committed = (manifest for _, manifest in self._service.store.catalog.committed())
        return next((manifest for manifest in committed if manifest.save_id == save_id), None)

    def _order(self, fields: Mapping[str, Any]) -> Answer:
        """Orders the upload of this node's part of a save, to a bucket that this node's own user has named."""
        save_id, url = fields["save_id"], fields["url"]
        node, store = f"node {self._service.node_id}", self._service.store
        if not is_save_id(save_id):
            raise ConfigInvalid("The request `upload` names no save.")
        # Any peer may order an upload, but none may choose where this node's data goes.
        if url not in self.uploader.book.read_urls():
            shown = str(url)[:200]
            hint = unknown_hint(shown, store.root, store.catalog.checkpoint_of(save_id) or "ID")
            raise ConfigInvalid(f"No rank of {node} has named the object store {shown!r}.", hint)
        if store.catalog.checkpoint_of(save_id) is None:
            raise ObjectMissing(node, "upload", save_id, "this save is not committed here", _ASK_HOLDER)
        self.uploader.order(save_id, url)
        return json_answer()
