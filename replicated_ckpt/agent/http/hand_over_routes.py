"""The agent's verbs for saves whose shards were handed over: what it has written of them, and how they end."""

import json
from typing import Any

from replicated_ckpt.agent.requests.request import Answer, Request, json_answer
from replicated_ckpt.agent.saves.finish import Outline
from replicated_ckpt.agent.saves.service import NodeService
from replicated_ckpt.agent.state.rights import Right
from replicated_ckpt.core.layout import ShardName
from replicated_ckpt.core.manifest import MANIFEST_BYTES_MAX
from replicated_ckpt.errors import PeerProtocolError
from replicated_ckpt.stores.local.directories.intent import Intent
from replicated_ckpt.stores.peer.answer import parsing


class HandOverRoutes:
    """Maps requests to the node's hand-overs. Safe for concurrent use."""

    def __init__(self, service: NodeService) -> None:
        self._service = service

    def finish(self, request: Request, save_id: str) -> Answer:
        """Takes a save over from its ranks, or waits for its end. Raises ReplicatedCkptError: it has failed."""
        raw = request.body.read_all(MANIFEST_BYTES_MAX)
        if raw:
            self._service.finish(_outline_in(raw, save_id))
            return json_answer(state="taken")
        with request.heartbeat:
            finished = self._service.finisher.end_of(save_id).result()
        return json_answer(**finished.to_json())

    def wait_for_written(self, request: Request, save_id: str) -> Answer:
        """Waits for shards of ranks of this node. Raises ReplicatedCkptError: they are not written."""
        fields = request.document()
        path = self._service.store.intent_path(save_id)
        if not Intent.admits_at(save_id, path, str(fields.get("ticket", ""))):
            request.require(Right.JOB)
        names: Any = fields.get("shards")
        if not isinstance(names, list) or any(ShardName.parse(str(name)) is None for name in names):
            raise PeerProtocolError("written: no shards are named.")
        with request.heartbeat:
            written = self._service.hand_overs.wait(save_id, [str(name) for name in names])
        return json_answer(written=[copies.to_json() for copies in written])


def _outline_in(raw: bytes, save_id: str) -> Outline:
    with parsing("A save is not finished"):
        outline = Outline.from_json(json.loads(raw))
    if outline.manifest.save_id != save_id:
        raise PeerProtocolError(f"Save {save_id} is not finished by the outline of another one.")
    return outline
