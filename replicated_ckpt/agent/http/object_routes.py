"""The agent's verbs of the object tier: name a bucket, probe it, follow an upload, order one, remove a save there."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from replicated_ckpt.agent.requests.request import Answer, Request, json_answer
from replicated_ckpt.agent.saves.service import NodeService
from replicated_ckpt.agent.state.upload_book import UNKNOWN_HINT
from replicated_ckpt.agent.uploads.probe import Prober
from replicated_ckpt.agent.uploads.uploader import Uploader
from replicated_ckpt.core.layout import is_checkpoint_id, is_save_id
from replicated_ckpt.core.manifest import Manifest, decode_manifest
from replicated_ckpt.errors import ConfigInvalid, ObjectMissing
from replicated_ckpt.stores.bucket.removal import remove_save
from replicated_ckpt.stores.bucket_client.url import ObjectTarget
from replicated_ckpt.stores.peer.answer import parsing

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
            PeerProtocolError, ConfigInvalid: the request is not understood; nothing was changed. ObjectMissing, StoreError
        """
        match (request.method, *parts):
            case ("GET", "saves", save_id):
                return self._state(save_id, is_urgent="now" in query)
            case ("POST", "target" | "probe" | "upload" | "remove" as verb):
                return self._do(verb, request)
        raise ObjectMissing("this agent", request.method, request.target[:200], "no such verb")

    def _state(self, save_id: str, *, is_urgent: bool) -> Answer:
        """How far this node's upload of a save has come: the fields of UploadState. `is_urgent`: it is tried again now."""
        if is_urgent:
            self.uploader.try_now(save_id)
        found = self.uploader.state_of(save_id) if is_save_id(save_id) else None
        if found is None:
            raise ObjectMissing("this agent", "GET", save_id[:80], "not a save that is uploaded")
        return json_answer(**asdict(found))

    def _do(self, verb: str, request: Request) -> Answer:
        fields = request.document()
        with parsing(f"object/{verb} is not possible"):
            match verb:
                case "target":
                    target = ObjectTarget.from_json(fields)
                    # A file:// bucket inside the root would have its objects taken for files of checkpoints.
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
        raise ObjectMissing("this agent", "POST", f"object/{verb}"[:80], "no such verb")

    def _probe(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """Whether a bucket can be reached, and whether a checkpoint's name is free there."""
        if not is_checkpoint_id(fields["checkpoint_id"]):
            raise ConfigInvalid("probe: no checkpoint id.")
        return self._prober.probe(str(fields["url"]), fields["checkpoint_id"])

    def _remove(self, fields: Mapping[str, Any]) -> Answer:
        """Removes a save from a bucket that this node's own user has named; answers whether it was there."""
        checkpoint_id, save_id = fields["checkpoint_id"], fields["save_id"]
        if not (is_checkpoint_id(checkpoint_id) and is_save_id(save_id)):
            raise ConfigInvalid("remove: no save of a checkpoint is named.")
        told = decode_manifest(fields["manifest"].encode(), "the command") if fields.get("manifest") else None
        # With another save's manifest the objects of that save would be deleted.
        if told is not None and (told.checkpoint_id, told.save_id) != (checkpoint_id, save_id):
            raise ConfigInvalid("remove: the manifest is of another save.")
        manifest = self._manifest_of(save_id) or told
        # Before the objects go: an order that is left would upload the save again.
        self.uploader.book.forget(save_id)
        bucket = self.uploader.book.bucket(str(fields["url"]))
        # An upload that is under way would bring back what is being deleted.
        with self.uploader.paused.hold(save_id):
            is_removed = remove_save(bucket, checkpoint_id, save_id, manifest)
        return json_answer(is_removed=is_removed)

    def _manifest_of(self, save_id: str) -> Manifest | None:
        """The manifest of a save on this node; None: it is not here."""
        committed = (manifest for _, manifest in self._service.store.catalog.committed())
        return next((manifest for manifest in committed if manifest.save_id == save_id), None)

    def _order(self, fields: Mapping[str, Any]) -> Answer:
        """Orders the upload of this node's part of a save, to a bucket that this node's own user has named."""
        save_id, url = fields["save_id"], fields["url"]
        node = f"node {self._service.node_id}"
        if not is_save_id(save_id):
            raise ConfigInvalid("upload: no save is named.")
        # Any peer may order an upload, but none may choose where this node's data goes.
        if url not in self.uploader.book.read_urls():
            raise ConfigInvalid(f"No rank of {node} has named the object store {str(url)[:200]!r}.", UNKNOWN_HINT)
        if self._service.store.catalog.checkpoint_of(save_id) is None:
            raise ObjectMissing(node, "upload", save_id, "this save is not committed here", _ASK_HOLDER)
        self.uploader.order(save_id, url)
        return json_answer()
