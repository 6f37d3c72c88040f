"""The HTTP/1.1 client of one agent. Every wait has a deadline; every failure is a typed error that names the peer.

Only a socket time-out on each slice sent and each piece received detects every fault: a stopped process, a cut link, a host
that died while we wait for its answer. Keep-alive and TCP_USER_TIMEOUT miss some. During a long request (an fsync) an agent
sends `100 Continue` at least once a second, so the deadline limits the time without progress, not the work.
"""

import errno
import http.client
import json
import math
import re
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from operator import index
from typing import Any, Self

from replicated_ckpt.errors import ManifestInvalid, ObjectCorrupt, PeerProtocolError, StoreUnavailable
from replicated_ckpt.stores.peer.answer import document_in, fill, refusal
from replicated_ckpt.stores.peer.reach import limit_time, reach_hint, wrong_token_hint
from replicated_ckpt.stores.peer.tls import PinnedConnection, PlainConnection
from replicated_ckpt.version import RELEASE, RELEASE_HEADER
from replicated_ckpt.wording import one_line

PROGRESS_TIMEOUT_S = 5.0
ACK_TIMEOUT_S = 120.0
"""Longest wait for a live peer to make a shard durable. After that its disk counts as hanging."""
ANSWER_BYTES_MAX = 64 << 20
FILE_BYTES_MAX = 8 << 30
_SLICE_BYTES = 1 << 20
_ACK_BYTES_MAX = 1 << 16
_PIECE_BYTES = 16 << 20
_ORIGIN_CHARS = 300
_NODE_ID = re.compile(r"[0-9A-Za-z._-]{1,64}")
HOST_PATTERN = re.compile(r"[0-9A-Za-z.:%_-]{0,255}")
_TOKEN = re.compile(r"[ -~]{0,256}")
_SHA256 = re.compile(r"([0-9a-f]{64})?")


@dataclass(frozen=True)
class AgentAddress:
    """The address of an agent and its token. The token never appears in `repr`, logs or errors.

    `incarnation` counts the starts of the node's agents: of two addresses of one node the larger one is newer.
    `tls_sha256` is the fingerprint of its certificate. Empty: plain HTTP, used only on this host or in a trusted network.
    `origin`: where the address comes from.
    """

    node_id: str
    host: str
    port: int
    token: str
    incarnation: int = 0
    tls_sha256: str = ""
    origin: str = field(default="", compare=False)

    def __repr__(self) -> str:
        return f"AgentAddress({self.label})"

    @property
    def label(self) -> str:
        return f"node {self.node_id} at {self.host}:{self.port}"

    def to_json(self) -> dict[str, Any]:
        """The fields with the token, for clients of the agent. Lists for others must omit the token."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "AgentAddress":
        """Raises ValueError, KeyError, TypeError: no request to such an address could succeed."""
        fields = dict(fields)
        address = cls(
            str(fields["node_id"]),
            str(fields["host"]),
            index(fields["port"]),
            str(fields["token"]),
            index(fields.get("incarnation", 0)),
            str(fields.get("tls_sha256", "")),
            "".join(filter(str.isprintable, str(fields.get("origin", ""))))[:_ORIGIN_CHARS],
        )
        texts = (address.node_id, address.host, address.token, address.tls_sha256)
        patterns = (_NODE_ID, HOST_PATTERN, _TOKEN, _SHA256)
        is_spelt = all(pattern.fullmatch(text) for pattern, text in zip(patterns, texts, strict=True))
        if not (is_spelt and 0 <= address.port <= 65535 and 0 <= address.incarnation <= 1 << 62):
            raise ValueError(f"not an address of an agent: {address.label!r}"[:400])
        return address


def open_connection(address: AgentAddress, timeout_s: float) -> http.client.HTTPConnection:
    """A connection to an agent, by TLS if its address has a fingerprint. It connects at its first use."""
    if address.tls_sha256:
        pinned, hint = address.tls_sha256, wrong_token_hint(address)
        return PinnedConnection(
            address.host, address.port, timeout=timeout_s, sha256=pinned, label=address.label, hint=hint
        )
    return PlainConnection(address.host, address.port, timeout=timeout_s, label=address.label)


class AgentClient:
    """One connection to one agent, reopened after it broke. For one thread."""

    def __init__(self, address: AgentAddress, timeout_s: float = PROGRESS_TIMEOUT_S) -> None:
        self.address = address
        self._connection = open_connection(address, timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    def call(self, method: str, path: str, document: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Sends a JSON request and returns the JSON answer.

        Raises:
            StoreUnavailable: no answer in time. PeerProtocolError: an invalid answer. Also the agent's errors.
        """
        return self.put(method, path, None if document is None else json.dumps(document).encode())

    def put(self, method: str, path: str, body: bytes | None) -> dict[str, Any]:
        """As `call`, with a body of bytes."""
        return document_in(self.fetch(method, path, body), f"{self.address.label} answered {method} {path}")

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Limits the requests in the block: together with the peer's work they end within `seconds`, or raise
        StoreUnavailable.
        """
        # The watcher shuts down a socket, so there must be one before it starts.
        if self._connection.sock is None:
            with self.translate_errors("CONNECT", "/"):
                self._connection.connect()
        with limit_time(self._connection.sock, seconds):
            yield

    def fetch(self, method: str, path: str, body: bytes | None = None) -> bytes:
        """Body of the answer to a request, as bytes, at most ANSWER_BYTES_MAX of them."""
        with self.translate_errors(method, path):
            self._connection.request(method, path, body, self._headers())
            response = self._connection.getresponse()
            raw = self.body_of(response, ANSWER_BYTES_MAX, f"{method} {path}")
            self.raise_for(response.status, raw, method, path)
            return raw

    def body_of(self, response: http.client.HTTPResponse, size_max: int, request: str) -> bytes:
        """The whole body of an answer with a length or chunks. A truncated body raises ConnectionResetError."""
        # Otherwise the body ends with the connection, and a truncated one would look complete.
        if response.length is None and not response.chunked:
            self._connection.close()
            raise PeerProtocolError(f"{self.address.label} answered {request} without a length.")
        raw = response.read(size_max)
        # http.client returns fewer bytes without an error if the connection ends.
        if len(raw) < size_max and response.length:
            raise ConnectionResetError(errno.ECONNRESET, "the peer closed the connection too early")
        if response.read(1):
            self._connection.close()
            raise PeerProtocolError(f"{self.address.label} answered {request} with too many bytes.")
        return raw

    def fetch_file(self, path: str, size_bytes: int) -> bytes:
        """A file of exactly `size_bytes`, read in pieces: memory grows with received bytes, not with the promised size.

        Raises:
            ManifestInvalid: `size_bytes` exceeds FILE_BYTES_MAX. ObjectCorrupt: the file is shorter. Else as `read_range`.
        """
        if size_bytes > FILE_BYTES_MAX:
            raise ManifestInvalid(f"the size of {path} at {self.address.label} is invalid: {size_bytes} bytes.")
        whole = bytearray()
        while len(whole) < size_bytes:
            piece = bytearray(min(_PIECE_BYTES, size_bytes - len(whole)))
            self.read_range(path, len(whole), memoryview(piece))
            whole += piece
        return bytes(whole)

    def read_range(self, path: str, offset: int, target: memoryview, within_s: float = math.inf) -> None:
        """Fills `target` with the bytes of a file from `offset` on.

        Raises:
            ObjectCorrupt: the peer's file is shorter. StoreUnavailable: the peer cannot be reached, or (from TooSlow) not
                all bytes came within `within_s`. ObjectMissing, PeerProtocolError
        """
        until_s = time.monotonic() + within_s
        with self.translate_errors("GET", path):
            response = self._ask_range(path, f"bytes={offset}-{offset + len(target) - 1}")
            if response.status not in (200, 206):
                self.raise_for(response.status, response.read(ANSWER_BYTES_MAX), "GET", path)
            if response.status == 206 and response.length is not None and response.length < len(target):
                self._connection.close()
                detail = f"it ends {len(target) - response.length} bytes before byte {offset + len(target)}"
                raise ObjectCorrupt(self.address.label, "GET", path, detail)
            # Close: the rest of this body would be read as the next answer.
            if response.status != 206 or response.length != len(target):
                self._connection.close()
                raise PeerProtocolError(
                    f"{self.address.label} answered a range of {len(target)} bytes of {path} with status "
                    f"{response.status} and {response.length} bytes."
                )
            fill(target, response, until_s, within_s)

    def _ask_range(self, path: str, wanted: str) -> http.client.HTTPResponse:
        """Requests a part of a file. If an old connection has ended meanwhile, it tries once more with a new one.

        An agent closes connections that are idle for some time, or that it needs for new clients. Its restart closes all.
        """
        headers, was_open = {**self._headers(), "Range": wanted}, self._connection.sock is not None
        try:
            self._connection.request("GET", path, headers=headers)
            return self._connection.getresponse()
        except (ConnectionError, ssl.SSLError):
            # A fresh connection that breaks is a fault of the peer; an old one may have been closed as idle.
            if not was_open:
                raise
        self._connection.close()
        self._connection.request("GET", path, headers=headers)
        return self._connection.getresponse()

    def start_upload(self, path: str, headers: Mapping[str, str]) -> "Upload":
        """Begins a PUT with a chunked body, whose size is unknown at its start."""
        with self.translate_errors("PUT", path):
            self._connection.putrequest("PUT", path, skip_accept_encoding=True)
            for name, value in {**self._headers(), **headers, "Transfer-Encoding": "chunked"}.items():
                self._connection.putheader(name, value)
            self._connection.endheaders()
        return Upload(self, self._connection, path)

    @contextmanager
    def translate_errors(self, method: str, path: str) -> Iterator[None]:
        """Turns transport errors of the block into typed ones, and closes the connection, whose state is unknown then."""
        try:
            yield
        except (OSError, http.client.HTTPException, UnicodeError) as exc:  # UnicodeError: an invalid host name
            self._connection.close()
            detail = one_line(f"{type(exc).__name__}: {exc}") if str(exc) else type(exc).__name__
            at = self.address
            raise StoreUnavailable(at.label, method, path, detail, reach_hint(at, exc)) from exc

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.address.token}", RELEASE_HEADER: RELEASE}

    def raise_for(self, status: int, raw: bytes, method: str, path: str) -> None:
        if not 200 <= status < 300:
            raise refusal(status, raw, self.address.label, method, path, wrong_token_hint(self.address))

    def raise_refusal(self, path: str) -> None:
        """Called after a broken send. If the agent answered with an error before it closed, raises that error."""
        try:
            response = self._connection.getresponse()
            self.raise_for(response.status, response.read(1 << 16), "PUT", path)
        except (OSError, http.client.HTTPException):
            return  # closed without an answer: the caller reports the broken send


class Upload:
    """The body of one PUT in progress."""

    def __init__(self, client: AgentClient, connection: http.client.HTTPConnection, path: str) -> None:
        self._client = client
        self._connection = connection
        self._path = path

    def send(self, *pieces: memoryview) -> None:
        """Sends the next bytes, which may lie in several places, as one chunk."""
        with self._client.translate_errors("PUT", self._path):
            try:
                self._connection.send(b"%x\r\n" % sum(map(len, pieces)))
                for piece in pieces:
                    for start in range(0, len(piece), _SLICE_BYTES):
                        # In slices: the socket's time-out covers a whole call, so a large one would fail on a slow link.
                        self._connection.send(piece[start : start + _SLICE_BYTES])
                self._connection.send(b"\r\n")
            except OSError as exc:
                # After a time-out there is no answer to wait for: that would cost a second time-out.
                if not isinstance(exc, TimeoutError):
                    self._client.raise_refusal(self._path)
                raise

    def finish_upload(self) -> dict[str, Any]:
        """Ends the body and returns the agent's JSON answer, which comes within ACK_TIMEOUT_S."""
        with self._client.translate_errors("PUT", self._path), limit_time(self._connection.sock, ACK_TIMEOUT_S):
            try:
                self._connection.send(b"0\r\n\r\n")
            except ConnectionError:
                self._client.raise_refusal(self._path)
                raise
            response = self._connection.getresponse()
            raw = self._client.body_of(response, _ACK_BYTES_MAX, f"PUT {self._path}")
            self._client.raise_for(response.status, raw, "PUT", self._path)
            return document_in(raw, f"{self._client.address.label} answered PUT {self._path}")
