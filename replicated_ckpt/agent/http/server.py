"""The agent's HTTP server: reads a request, checks the token, routes it, answers. Plain threads, bounded in number."""

import errno
import json
import logging
import os
import socket
import socketserver
import ssl
import sys
import time
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase, BufferedReader
from typing import Any, cast

from replicated_ckpt.agent.http.connections import Connections, UnauthenticatedClients
from replicated_ckpt.agent.http.request import Answer, FileAnswer, Heartbeat, Request
from replicated_ckpt.agent.http.routes import Routes
from replicated_ckpt.agent.state.rights import Right, Tokens
from replicated_ckpt.errors import (
    CheckpointExists,
    ConfigInvalid,
    ManifestInvalid,
    ObjectCorrupt,
    ObjectMissing,
    PeerProtocolError,
    ReplicatedCkptError,
    SaveAborted,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreUnavailable,
)
from replicated_ckpt.node.saves.request_body import Body, Head
from replicated_ckpt.stores.files.durable import SHORTAGES, UNREADABLE, read_exactly, store_error_of
from replicated_ckpt.stores.peer.answer import check_release
from replicated_ckpt.stores.peer.client import PROGRESS_TIMEOUT_S
from replicated_ckpt.stores.threads import start_worker
from replicated_ckpt.version import __version__
from replicated_ckpt.wording import one_line

log = logging.getLogger(__name__)

ALL_ADDRESSES = "0.0.0.0"  # noqa: S104 - a token guards it
_MAPPED = "::ffff:"
"""The prefix of an IPv4 address on a socket for both versions. Source: RFC 4291, 2.5.5.2."""


class DualStackServer(ThreadingHTTPServer):
    """Listens on `bind`. 0.0.0.0 includes IPv6 if the host has it: peers may have no other route to this node.

    `server_address` is the requested address, with the port that was taken.
    """

    def __init__(self, bind: tuple[str, int], handler: Any) -> None:
        self._asked = bind[0]
        takes_both = bind[0] == ALL_ADDRESSES and socket.has_dualstack_ipv6()
        self.address_family = socket.AF_INET6 if takes_both or ":" in bind[0] else socket.AF_INET
        super().__init__(("::" if takes_both else bind[0], bind[1]), handler)

    def server_bind(self) -> None:
        """As in `http.server`, but without looking up the host name, which takes many seconds if DNS does not answer."""
        # The host's default may be IPv6 alone (net.ipv6.bindv6only).
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        socketserver.TCPServer.server_bind(self)
        found, self.server_port = self.socket.getsockname()[:2]
        self.server_name = self._asked if self._asked == ALL_ADDRESSES else found
        self.server_address = (self.server_name, self.server_port)

    def get_request(self) -> tuple[Any, Any]:
        """The next connection and its peer's address; an IPv4 address without the IPv6 prefix."""
        request, (host, *rest) = super().get_request()
        return request, (host.removeprefix(_MAPPED), *rest)


# Errors that only a file of this node causes. All others come from the connection, whose client is gone.
_OF_DISK = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ESTALE,
    errno.ENODEV,
    errno.ENXIO,
    errno.ENOENT,
    errno.ENOTDIR,
    *UNREADABLE,
    *SHORTAGES,
)


def disk_error_of(exc: OSError, op: str, target: str) -> StoreError | None:
    """The error to answer, if this node's disk caused it. None: the connection broke, and no answer can be sent."""
    if isinstance(exc, ssl.SSLError) or exc.errno not in _OF_DISK:
        return None
    return store_error_of(exc, "the disk of this node", op, str(exc.filename or target))


CONNECTIONS_MAX = 512
IDLE_CONNECTION_S = 60.0
HEAD_BYTES_MAX = 64 << 10
_DRAIN_BYTES_MAX = 64 << 20
_LOGGED_CHARS = 200
_PIECE_BYTES = 1 << 20


class TokenInvalid(StoreDenied):
    """The request carries no valid token; it was not processed."""


_STATUS_BY_ERROR: Mapping[type[ReplicatedCkptError], HTTPStatus] = {
    TokenInvalid: HTTPStatus.UNAUTHORIZED,
    StoreDenied: HTTPStatus.FORBIDDEN,
    ObjectMissing: HTTPStatus.NOT_FOUND,
    CheckpointExists: HTTPStatus.CONFLICT,
    SaveAborted: HTTPStatus.GONE,
    ObjectCorrupt: HTTPStatus.UNPROCESSABLE_ENTITY,
    ManifestInvalid: HTTPStatus.UNPROCESSABLE_ENTITY,
    ConfigInvalid: HTTPStatus.BAD_REQUEST,
    PeerProtocolError: HTTPStatus.BAD_REQUEST,
    StoreUnavailable: HTTPStatus.SERVICE_UNAVAILABLE,
    StoreFull: HTTPStatus.INSUFFICIENT_STORAGE,
}


def status_of(error: ReplicatedCkptError) -> int:
    found = next((code for kind, code in _STATUS_BY_ERROR.items() if isinstance(error, kind)), None)
    return int(found or HTTPStatus.INTERNAL_SERVER_ERROR)


def describe_refusal(error: ReplicatedCkptError) -> dict[str, str]:
    """The JSON of an error, as the client's `refusal` parses it."""
    return {"error": error.message, "kind": type(error).__name__, "hint": error.hint}


class AgentServer(DualStackServer):
    """Listens for one agent. At most CONNECTIONS_MAX connections are open: to accept another, it closes an idle one.

    OWNER_RESERVE of the connections are reserved for requests of the node's own user.
    """

    # A thread that waits for a silent peer must not keep the process alive.
    daemon_threads = True
    # With socketserver's 5, some of many ranks that connect at once would wait for TCP to retry.
    request_queue_size = 256

    def __init__(
        self, bind: tuple[str, int], tokens: Tokens, routes: Routes, tls: ssl.SSLContext | None = None
    ) -> None:
        self.tokens = tokens
        self.routes = routes
        self._tls = tls
        self.connections = Connections(CONNECTIONS_MAX)
        self._unauthenticated = UnauthenticatedClients()
        super().__init__(bind, _Handler)

    def get_request(self) -> tuple[Any, Any]:
        """The next connection."""
        try:
            return super().get_request()
        except OSError as exc:
            if exc.errno in SHORTAGES:
                # Without a free descriptor accept() fails at once: the caller's loop would take a whole processor.
                time.sleep(0.1)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self.connections.admit(client_address, request):
            self.shutdown_request(request)
            return
        try:
            start_worker(self.process_request_thread, request, client_address, name="rckpt-request")
        except StoreUnavailable as exc:
            log.warning("a connection from %s is refused: %s", client_address[0], exc)
            self.connections.end(client_address)
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            secured = self._secure(request, client_address)
            if secured is not None:
                super().process_request_thread(secured, client_address)
        finally:
            self.connections.end(client_address)

    def _secure(self, request: socket.socket, client_address: Any) -> socket.socket | None:
        """The connection after its TLS handshake, if the agent uses TLS; None if the handshake failed."""
        if self._tls is None:
            return request
        # A client that never sends its handshake would keep this thread for ever.
        request.settimeout(PROGRESS_TIMEOUT_S)
        secured = request
        try:
            secured = self._tls.wrap_socket(request, server_side=True, do_handshake_on_connect=False)
            # Registered before the handshake, so that a connection that stalls in it can be closed to make room.
            self.connections.secure(client_address, secured)
            secured.do_handshake()
        except (OSError, ValueError) as exc:  # ValueError: the connection was closed meanwhile, to make room
            self.log_problem(client_address, f"no TLS: {exc}")
            self.shutdown_request(secured)
            return None
        return secured

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Called by socketserver inside its exception handler: the peer has disconnected, or this package has a defect."""
        del request
        is_defect = not isinstance(sys.exception(), OSError)
        # A client without a token can cause any exception, and must not fill the log with tracebacks.
        if is_defect and self.connections.is_known(client_address):
            log.warning("connection from %s broke", client_address, exc_info=True)  # noqa: LOG014
        else:
            self.log_problem(client_address, f"connection broke: {type(sys.exception()).__name__}")

    def log_problem(self, client_address: Any, what: str) -> None:
        """Logs one line. For a peer without a valid token, `UnauthenticatedClients` bounds the number of lines."""
        if self.connections.is_known(client_address):
            log.info("%s:%d: %s", *client_address[:2], what)
        else:
            self._unauthenticated.log_refusal(str(client_address[0]) if client_address else "this host", what)


class _Handler(BaseHTTPRequestHandler):
    """Serves the requests of one connection."""

    server: AgentServer
    protocol_version = "HTTP/1.1"
    server_version = f"replicated-ckpt/{__version__}"
    sys_version = ""
    disable_nagle_algorithm = True  # else a heartbeat may wait for the peer's delayed ACK
    timeout = IDLE_CONNECTION_S

    def handle_one_request(self) -> None:
        """As in http.server, which alone would read up to 6 MiB of headers from any client, for days."""
        stream, head = self.rfile, Head(self.rfile, self.connection, HEAD_BYTES_MAX)
        self.rfile = cast(BufferedIOBase, head)  # http.server only reads lines from it
        try:
            super().handle_one_request()
        finally:
            self.rfile = stream

    def parse_request(self) -> bool:
        is_parsed = super().parse_request()
        self.rfile = cast(Head, self.rfile).stream
        return is_parsed

    def do_GET(self) -> None:
        self._serve()

    do_PUT = do_POST = do_GET  # noqa: N815 - the names that http.server looks for

    def _serve(self) -> None:
        self.connection.settimeout(PROGRESS_TIMEOUT_S)
        body = None
        try:
            right = self._find_right()
            # Checked before the body is read: a flood of requests must cost no memory.
            if not self.server.connections.note_working(self.client_address, right):
                what = "too many requests of other nodes are under way. This node's own user can still send requests"
                raise StoreUnavailable("this agent", self.command, self.path[:_LOGGED_CHARS], what)
            body = Body(self.rfile, self.headers)  # made first, so that `_refuse` can read the body to its end
            check_release(self.headers, self.path, str(self.client_address[0]))
            heartbeat = Heartbeat(self.wfile, body)
            host = str(self.client_address[0])
            request = Request(self.command, self.path, body, self.headers, heartbeat, right, host, self.connection)
            answer = self.server.routes.answer(request)
        except ReplicatedCkptError as exc:
            self._refuse(exc, body)
        except (OSError, ValueError) as exc:
            self._break_off(exc, body)
        else:
            self.close_connection = self.close_connection or not body.done  # unread bytes would count as a request
            self._send(answer)
        self.connection.settimeout(IDLE_CONNECTION_S)
        self.server.connections.note_answered(self.client_address)

    def _break_off(self, exc: OSError | ValueError, body: Body | None) -> None:
        """Ends a request after an OSError or ValueError. Answers an error of the disk; logs a broken connection."""
        found = disk_error_of(exc, self.command, self.path[:_LOGGED_CHARS]) if isinstance(exc, OSError) else None
        if found is not None:
            self._refuse(found, body)
            return
        self.server.log_problem(self.client_address, f"{self._show()} broke: {exc}")
        self.close_connection = True

    def _show(self) -> str:
        """The request for the log, cut and escaped, because its sender has chosen the text."""
        return f"{self.command[:_LOGGED_CHARS]!r} {self.path[:_LOGGED_CHARS]!r}"

    def _find_right(self) -> Right:
        """The right that the token of the request gives. Raises TokenInvalid."""
        scheme, _, given = self.headers.get("Authorization", "").partition(" ")
        right = self.server.tokens.right_of(given) if scheme == "Bearer" else None
        if right is None:
            path = self.path.partition("?")[0][:_LOGGED_CHARS]
            raise TokenInvalid("this agent", self.command, path, "no valid token")
        return right

    def _refuse(self, exc: ReplicatedCkptError, body: Body | None) -> None:
        code = status_of(exc)
        what = f"refused {self._show()}: {code} {one_line(exc)}"
        if code == HTTPStatus.INTERNAL_SERVER_ERROR:
            log.error("%s: %s", self.client_address[0], what)
        else:
            self.server.log_problem(self.client_address, what)
        # The rest of an unread body would be taken for the next request.
        self.close_connection = True
        self._send_bytes(code, json.dumps(describe_refusal(exc)).encode(), "application/json")
        self._drain(body)

    def _drain(self, body: Body | None) -> None:
        """Reads the rest of the request, so that the peer gets the answer and not a reset connection."""
        # Not SSLSocket's method, which drops TLS: the reads below would get ciphertext.
        socket.socket.shutdown(self.connection, socket.SHUT_WR)
        piece = memoryview(bytearray(1 << 20))
        drained = 0
        if body is not None:
            body.end_within(IDLE_CONNECTION_S)  # a client that sends a byte now and then would hold the thread for ever
        try:
            while body is not None and not body.done and drained < _DRAIN_BYTES_MAX:
                drained += body.readinto(piece)
        except (OSError, PeerProtocolError):
            return  # the peer has closed the connection, after it got the answer

    def _send(self, answer: Answer) -> None:
        if isinstance(answer, FileAnswer):
            self._send_file(answer)
        else:
            self._send_bytes(HTTPStatus.OK, answer.body, answer.content_type)
            # Only now: `POST /v1/shutdown` must not end the process before its answer is sent.
            if answer.after is not None:
                answer.after()

    def _send_bytes(self, status: int, body: bytes, content_type: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def _send_file(self, answer: FileAnswer) -> None:
        with os.fdopen(answer.fd, "rb") as file:
            self.send_response(HTTPStatus.PARTIAL_CONTENT if answer.is_partial else HTTPStatus.OK)
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Content-Length", str(answer.length))
            self.send_header("Accept-Ranges", "bytes")
            if answer.is_partial:
                last = answer.offset + answer.length - 1
                self.send_header("Content-Range", f"bytes {answer.offset}-{last}/{answer.size_bytes}")
            self.end_headers()
            if answer.length:
                # sendfile() bypasses the buffer: the head must be sent before the bytes.
                self.wfile.flush()
                sent = self._send_range(file, answer.offset, answer.length)
                # If the file got shorter meanwhile, only a closed connection shows the peer that bytes are missing.
                self.close_connection = self.close_connection or sent != answer.length

    def _send_range(self, file: BufferedReader, offset: int, length: int) -> int:
        """Sends a range of a file, and returns the number of bytes. Over TLS, Python's own `sendfile` uses 8 KiB pieces."""
        connection: socket.socket = self.connection
        if not isinstance(connection, ssl.SSLSocket):
            return connection.sendfile(file, offset, length)
        piece, sent = memoryview(bytearray(min(length, _PIECE_BYTES))), 0
        while sent < length:
            count = read_exactly(file.fileno(), piece[: length - sent], offset + sent)
            if count == 0:
                break
            connection.sendall(piece[:count])
            sent += count
        return sent

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name in http.server
        log.debug("%s %s", self.client_address[0], format % args)
