"""One request to the agent and its answer, as values between the HTTP front door and the routes."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.message import Message
from http import HTTPStatus
from typing import Any

from replicated_ckpt.agent.body import Body
from replicated_ckpt.agent.heartbeat import Heartbeat
from replicated_ckpt.errors import PeerProtocolError

DOCUMENT_BYTES_MAX = 4 << 20
"""JSON takes many times its size once it is parsed; the addresses of 10,000 nodes fit."""


@dataclass(frozen=True)
class Request:
    """One authenticated request. `peer_host`: the address that it came from."""

    method: str
    target: str
    body: Body
    headers: Message
    heartbeat: Heartbeat
    peer_host: str = ""

    def document(self) -> Mapping[str, Any]:
        """The JSON object in the body.

        Raises:
            PeerProtocolError: there is none, or it is too large.
        """
        raw = self.body.read_all(DOCUMENT_BYTES_MAX)
        try:
            fields = json.loads(raw or b"{}")
        except (ValueError, RecursionError) as exc:
            raise PeerProtocolError(f"The request's body is no JSON: {raw[:80]!r}.") from exc
        if not isinstance(fields, dict):
            raise PeerProtocolError("The request's body is no JSON object.")
        return fields


def _nothing() -> None:
    """What follows most answers."""


@dataclass(frozen=True)
class Answer:
    """A small answer. `after` runs once it was sent."""

    body: bytes
    status: int = HTTPStatus.OK
    content_type: str = "application/json"
    after: Callable[[], None] = field(default=_nothing)


def json_answer(**fields: Any) -> Answer:
    return Answer((json.dumps(fields) + "\n").encode())
