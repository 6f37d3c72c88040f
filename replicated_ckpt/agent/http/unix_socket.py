"""The agent's Unix socket, on which ranks submit shards, as descriptors of memory, and reports of saves and loads."""

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from replicated_ckpt.agent.http.request import INTERVAL_S, require_asker
from replicated_ckpt.agent.http.server import describe_refusal, status_of
from replicated_ckpt.core.rank_report import RankReport
from replicated_ckpt.errors import PeerProtocolError, ReplicatedCkptError, StoreUnavailable
from replicated_ckpt.node.saves.service import NodeService
from replicated_ckpt.node.saves.settle import follow_stale_save
from replicated_ckpt.node.saves.shard_copies import WrittenCopies
from replicated_ckpt.node.saves.submissions import SubmittedShard
from replicated_ckpt.stores.peer.answer import parsing
from replicated_ckpt.stores.peer.client import PROGRESS_TIMEOUT_S
from replicated_ckpt.stores.peer.local_messages import check_same_user, listen, receive_message, send_message
from replicated_ckpt.stores.threads import start_worker, translate_any

log = logging.getLogger(__name__)

CONNECTIONS_MAX = 256  # one thread each; ranks beyond it wait in the kernel's queue
_PAUSE_S = 0.3  # without free descriptors accept() fails at once, and the loop would take a whole processor


class UnixSocketServer:
    """Takes shards and reports from the ranks of this node. One thread for each connection."""

    def __init__(self, directory: Path, service: NodeService, on_report: Callable[[RankReport], object]) -> None:
        """`on_report` is called in several threads. Raises OSError: the directory's file system supports no sockets."""
        self._service, self._on_report = service, on_report
        self._slots = threading.BoundedSemaphore(CONNECTIONS_MAX)
        self._stopping = threading.Event()
        self._listener = listen(directory)

    def start(self) -> None:
        start_worker(self._accept, name="rckpt-unix-socket")

    def close(self) -> None:
        """Refuses new shards. Shards that are being written continue."""
        self._stopping.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            # Before accept(): an accepted connection holds a descriptor of this process.
            self._slots.acquire()
            try:
                connection, _ = self._listener.accept()
            except OSError as exc:
                self._slots.release()
                if self._stopping.wait(_PAUSE_S):
                    return
                log.warning("a rank that submits a shard has to wait: %s", exc)  # for example, too many files are open
                continue
            try:
                start_worker(self._serve, connection, name="rckpt-submit")
            except StoreUnavailable as exc:
                self._slots.release()
                self._refuse(connection, exc)

    def _refuse(self, connection: socket.socket, exc: StoreUnavailable) -> None:
        """Refuses a rank, which then writes its shard itself. The rank's message is not read: it may be long."""
        log.warning("a rank that submits a shard is refused: %s", exc)
        with connection, contextlib.suppress(OSError):
            connection.settimeout(_PAUSE_S)  # the accepting thread runs this: no rank may hold it up
            send_message(connection, _refusal(exc))

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.settimeout(PROGRESS_TIMEOUT_S)
                self._take(connection)
        except (OSError, EOFError) as exc:
            log.info("a rank that was submitting a shard is gone: %s", exc)
        finally:
            self._slots.release()

    def _take(self, connection: socket.socket) -> None:
        try:
            check_same_user(connection)
            fields, descriptors = receive_message(connection)
            if "report" in fields:
                self._take_report(fields["report"], descriptors)
                return
            future = self._begin(connection, fields, descriptors)
        except ReplicatedCkptError as exc:
            send_message(connection, _refusal(exc))
            return
        with contextlib.suppress(OSError):  # the rank may be gone
            send_message(connection, {"state": "taken"})
            self._send_result(connection, future)
        # Even if the rank has died: the agent has its memory, writes the shard, and settles the save below.
        wait([future])
        self._wait_for_leave(connection)
        follow_stale_save(self._service, str(fields["copies"]["save_id"]))

    def _take_report(self, fields: Any, descriptors: list[int]) -> None:
        """Takes the report of a rank that has ended its save or load. The rank waits for no answer."""
        for descriptor in descriptors:
            os.close(descriptor)
        try:
            with parsing("A rank sent no report of a save or load"):
                report = RankReport.from_json(fields)
        except PeerProtocolError as exc:
            log.warning("%s", exc)
            return
        self._on_report(report)

    def _wait_for_leave(self, connection: socket.socket) -> None:
        """Returns once the rank has closed its end, or has died."""
        connection.settimeout(None)
        with contextlib.suppress(OSError):
            while connection.recv(1):
                pass

    def _begin(
        self, connection: socket.socket, fields: dict[str, Any], descriptors: list[int]
    ) -> "Future[WrittenCopies]":
        """Begins to write a shard.

        Raises:
            ConnectionAbortedError: this agent hung, and the rank, which no longer waits, writes the shard itself.
        """
        try:
            # Otherwise, after a hang of this agent, both it and the rank would write the file.
            require_asker(connection)
            with parsing("No shard is submitted"):
                shard = SubmittedShard.from_json(fields, len(descriptors))
            self._service.check_open(shard.copies.save_id)
        except BaseException:
            # These descriptors are open in this process: if they stayed open, the rank's memory would stay in use.
            for descriptor in descriptors:
                os.close(descriptor)
            raise
        return self._service.submissions.take_shard(shard, descriptors)

    def _send_result(self, connection: socket.socket, future: "Future[WrittenCopies]") -> None:
        """Sends a sign of life once a second, and then the result."""
        while not wait([future], INTERVAL_S).done:
            send_message(connection, {"state": "working"})
        error = future.exception()
        if error is None:
            send_message(connection, {"state": "written", "copies": future.result().to_json()})
            return
        send_message(connection, _refusal(translate_any(error, "this node's agent", "write", "a shard")))


def open_unix_socket(
    directory: Path, service: NodeService, on_report: Callable[[RankReport], object]
) -> UnixSocketServer | None:
    """Opens the socket. None: the file system supports no sockets, and ranks write their shards themselves."""
    try:
        unix_socket = UnixSocketServer(directory, service, on_report)
    except OSError as exc:
        log.warning("ranks cannot submit their shards: %s", exc)
        return None
    unix_socket.start()
    return unix_socket


def _refusal(exc: ReplicatedCkptError) -> dict[str, Any]:
    return {"state": "refused", "status": status_of(exc), **describe_refusal(exc)}
