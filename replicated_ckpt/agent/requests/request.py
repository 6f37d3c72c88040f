"""One request to the agent and its answer, as values between the HTTP front door and the routes."""

import json
import select
import socket
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.message import Message
from typing import Any

from replicated_ckpt.agent.requests.body import Body
from replicated_ckpt.agent.requests.heartbeat import Heartbeat
from replicated_ckpt.agent.state.rights import Right
from replicated_ckpt.errors import StoreDenied
from replicated_ckpt.stores.peer.answer import document_in

DOCUMENT_BYTES_MAX = 4 << 20
"""JSON takes many times its size once it is parsed; the addresses of 10,000 nodes fit."""

_HINT_BY_RIGHT = {
    Right.JOB: "Nodes are introduced, and saves opened and ended, by a job that has a rank on each of them.",
    Right.OWNER: "Ask on the agent's own host, as its own user: ranks and `replicated-ckpt` read ROOT/.agent there.",
}


@dataclass(frozen=True)
class Request:
    """One authenticated request. `right`: what its token shows; `peer_host`: where it came from, over `connection`."""

    method: str
    target: str
    body: Body
    headers: Message
    heartbeat: Heartbeat
    right: Right
    peer_host: str = ""
    connection: socket.socket | None = None

    def require(self, right: Right) -> None:
        """Goes on only for those who may ask for this.

        Raises:
            StoreDenied: the request's token does not show the right.
        """
        if self.right < right:
            asked = urllib.parse.urlsplit(self.target[:200]).path
            detail = f"it needs the right of {right.name}, and the token shows {self.right.name}"
            raise StoreDenied("this agent", self.method, asked, detail, _HINT_BY_RIGHT[right])

    def document(self) -> Mapping[str, Any]:
        """The JSON object in the body.

        Raises:
            PeerProtocolError: there is none, or it is too large.
        """
        return document_in(self.body.read_all(DOCUMENT_BYTES_MAX) or b"{}", "The request came")


@dataclass(frozen=True)
class Answer:
    """A small answer. `after` runs once it was sent."""

    body: bytes
    content_type: str = "application/json"
    after: Callable[[], object] | None = None


def json_answer(after: Callable[[], object] | None = None, /, **fields: Any) -> Answer:
    return Answer((json.dumps(fields) + "\n").encode(), after=after)


def require_asker(connection: socket.socket) -> None:
    """Goes on only while the answer is waited for: an agent that hung finds questions that were given up.

    Raises:
        ConnectionAbortedError: the other end has closed the connection, or its own direction, whatever it has sent before.
    """
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    if poll.poll(0):
        raise ConnectionAbortedError("the client that asked this waits for no answer any more")
