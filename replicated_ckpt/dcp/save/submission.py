"""A shard that a rank submits to its node's agent, which writes it and finishes the save.

The rank sends the layout of the shard: which bytes lie where in the staged copy, and the bytes that are not in it.
"""

import contextlib
import io
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from replicated_ckpt import failpoints
from replicated_ckpt.agent.state.endpoint import read_endpoint
from replicated_ckpt.dcp.staging.segment import descriptor_of
from replicated_ckpt.errors import ObjectMissing, PeerProtocolError, ReplicatedCkptError, StoreUnavailable
from replicated_ckpt.node.saves.finish import Finished, Outline
from replicated_ckpt.node.saves.shard_copies import WrittenCopies
from replicated_ckpt.node.saves.submissions import SubmittedShard
from replicated_ckpt.stores.files.direct import address_of
from replicated_ckpt.stores.files.locks import close_in_forks
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.peer.answer import parsing, refusal
from replicated_ckpt.stores.peer.client import PROGRESS_TIMEOUT_S, AgentClient
from replicated_ckpt.stores.peer.local_messages import connect, receive_message, send_message
from replicated_ckpt.stores.tee import REFERRED_BYTES_MIN
from replicated_ckpt.stores.threads import forget_locals, start_worker

STAGED, BETWEEN = 0, 1
"""Numbers of the two descriptors: the segment with the staged storages, and a file with all other bytes of the shard."""
BETWEEN_BYTES_MAX = 256 << 20
"""The limit for bytes outside the staged copy: objects, and tensors that a planner has made. A rank with more of them
writes its shard itself, which takes less memory."""


class TooMuchElsewhere(ReplicatedCkptError):
    """Too many bytes of a shard lie outside the staged copy, so the shard cannot be submitted."""

    default_hint = "The rank writes the shard itself. No action is needed."


class ShardLayout:
    """A stream for items that records where their bytes lie, instead of writing them. `close` it.

    Bytes in `memory` are recorded by their place. All other bytes, and small items, are copied to the descriptor
    `between`.
    """

    def __init__(self, memory: memoryview) -> None:
        self._begin = address_of(memory)
        self._end = self._begin + len(memory)
        with _taking_memory():
            self.between = os.memfd_create("replicated-ckpt-between", os.MFD_CLOEXEC)
        self._file = io.BufferedWriter(io.FileIO(self.between, "wb"), 1 << 20)
        self._copied = 0
        self.position = 0
        self.pieces: list[tuple[int, int, int]] = []

    def write(self, data: memoryview) -> int:
        """Appends a copy."""
        if self._copied + len(data) > BETWEEN_BYTES_MAX:
            raise TooMuchElsewhere(f"More than {BETWEEN_BYTES_MAX} bytes of a shard lie outside of the staged copy.")
        with _taking_memory():
            self._file.write(data)
        self._append(BETWEEN, self._copied, len(data))
        self._copied += len(data)
        return len(data)

    def refer(self, data: memoryview) -> None:
        """Appends bytes by their place. They must not change until the shard is written."""
        # A small item is cheaper to copy than to refer to. Read-only memory is not in the staged copy.
        if len(data) < REFERRED_BYTES_MIN or data.readonly:
            self.write(data)
            return
        begin = address_of(data)
        if self._begin <= begin and begin + len(data) <= self._end:
            self._append(STAGED, begin - self._begin, len(data))
        else:
            self.write(data)

    def _append(self, source: int, offset: int, size: int) -> None:
        self.position += size
        if self.pieces:
            last, begin, before = self.pieces[-1]
            # Adjacent pieces become one: the pieces of a million items would not fit into one message.
            if last == source and begin + before == offset:
                self.pieces[-1] = source, begin, before + size
                return
        if size:
            self.pieces.append((source, offset, size))

    def finish_layout(self) -> None:
        """Writes the copied bytes to the descriptor. Call it after the last append."""
        with _taking_memory():
            self._file.flush()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a flush that has failed before fails again
            self._file.close()


@contextlib.contextmanager
def _taking_memory() -> Iterator[None]:
    """Translates an OSError of the block. Raises StoreUnavailable: the system has no memory left."""
    try:
        yield
    except OSError as exc:
        raise StoreUnavailable(
            "this rank's memory", "lay out the shard in", "", f"{type(exc).__name__}: {exc}"
        ) from exc


log = logging.getLogger(__name__)

_TRIES = 3
_PAUSE_S = 0.3
LOG_HINT = "Read ROOT/.agent/log for what happened to the agent; then save again."


class AgentSilent(StoreUnavailable):
    """This node's agent was asked to finish the save, and no longer answers. It may have committed the save."""

    default_hint = (
        "The next save or load completes or aborts it. On rank 0's node, `replicated-ckpt status --root ROOT` "
        "shows whether the agent is stopped; ROOT/.agent/log has the cause."
    )


def finish_by_agent(store: LocalStore, outline: Outline, start_agent: Callable[[], object]) -> Finished:
    """Has this node's agent finish the save, and waits for it. If the agent dies, starts it and asks it again.

    Raises:
        AgentSilent: the agent stopped answering, or could not be started again. Others: it has aborted or refused the save.
    """
    body = json.dumps(outline.to_json()).encode()
    for tries_left in reversed(range(_TRIES)):
        try:
            return _finish(store, outline.manifest.save_id, body)
        except AgentSilent:
            raise
        except (StoreUnavailable, ObjectMissing) as exc:  # missing: a restarted agent has no record of the save
            if tries_left == 0:
                raise AgentSilent("this node's agent", "finish", outline.manifest.save_id, exc.message) from exc
            log.warning("asks this node's agent again to finish the save: %s", exc)
        time.sleep(_PAUSE_S)
        try:
            start_agent()
        except BaseException as exc:  # the start failed, but a live agent may be finishing the save
            raise AgentSilent("this node's agent", "finish", outline.manifest.save_id, _describe(exc)) from exc
    raise AssertionError("the last try returns or raises")


def _finish(store: LocalStore, save_id: str, body: bytes) -> Finished:
    endpoint = read_endpoint(store.agent_directory())
    if endpoint is None:
        raise StoreUnavailable("this node's agent", "finish", save_id, "no agent runs there", LOG_HINT)
    path = f"/v1/saves/{save_id}/finish"
    with AgentClient(endpoint.local_address()) as client:
        try:
            client.put("POST", path, body)
            failpoints.reach("coordinator.submitted")
            return Finished.from_json(client.call("POST", path))
        except ReplicatedCkptError:
            raise  # the agent has aborted the save, or has ended
        except BaseException as exc:  # the agent may have decided: the other nodes must not abort
            raise AgentSilent("this node's agent", "finish", save_id, _describe(exc)) from exc


def _describe(exc: BaseException) -> str:
    return f"{type(exc).__name__}: {exc}"


_AGENT = "this node's agent"
_never_released: list[tuple[socket.socket, memoryview | None]] = []
"""Connections that no thread could watch, with the memory that their agents may read: at worst a whole copy of a state."""


class Submission:
    """A shard that the agent has accepted. Its memory must not change until `wait` has returned or raised. One thread."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def wait(self) -> WrittenCopies:
        """Returns the copies of the shard, once it is durable in the node's own store.

        Raises:
            StoreUnavailable: the agent died or hangs, so the outcome is unknown. Others: the agent could not write the
                shard.
        """
        while True:
            answer = _receive(self._connection)
            if answer["state"] == "working":
                continue
            with parsing(f"{_AGENT} returned an invalid state of a shard: {answer!r}"):
                return WrittenCopies.from_json(answer["copies"])

    def detach(self, memory: memoryview) -> None:
        """As `close`. If the agent only hangs, `memory` is kept until the agent can no longer read it."""
        _keep_while_read(self._connection, memory)

    def close(self) -> None:
        """Ends this rank's part in the save. From then on the agent may settle the save on its own."""
        with contextlib.suppress(OSError):  # already closed, or the agent has ended, or this is a forked child
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def submit(
    store: LocalStore, shard: SubmittedShard, descriptors: Sequence[int], memory: memoryview | None = None
) -> Submission:
    """Submits a shard to this node's agent, which has accepted it when this returns.

    `memory`: must not change as long as the agent may read it, even if this raises.

    Raises:
        StoreUnavailable: no agent accepts shards. StoreDenied: the agent is another user's. Others: the agent refuses this
            shard. Nothing of the shard was written.
    """
    try:
        connection = connect(store.root_agent_directory(), PROGRESS_TIMEOUT_S)
    except OSError as exc:
        raise _unavailable(exc) from exc
    close_in_forks(connection)
    try:
        try:
            send_message(connection, shard.to_json(), descriptors)
        except OSError as exc:
            raise _unavailable(exc) from exc
        _receive(connection)
    except BaseException:
        _keep_while_read(connection, memory)
        raise
    return Submission(connection)


def _keep_while_read(connection: socket.socket, memory: memoryview | None) -> None:
    """Half-closes the connection, and keeps the memory until the agent has closed it, too. The agent has then finished with
    the shard, or has died.

    A stopped agent that continues later still reads this memory. Without this, the next save's bytes could lie there.
    """
    fd = connection.detach()  # `connection` is closed from here on
    if fd < 0:
        return  # already closed
    kept = socket.socket(fileno=fd)
    close_in_forks(kept)
    with contextlib.suppress(OSError):
        kept.shutdown(socket.SHUT_WR)  # the agent sees that this rank has left, and begins nothing more for it
    try:
        start_worker(_wait_for_end, kept, memory, name="rckpt-kept")
    except StoreUnavailable as exc:
        log.warning("the memory of a submitted shard is never freed: %s", exc)
        _never_released.append((kept, memory))


def _wait_for_end(connection: socket.socket, memory: memoryview | None) -> None:
    with connection, contextlib.suppress(OSError):
        connection.settimeout(None)
        while connection.recv(1 << 16):
            pass
    del memory


def _receive(connection: socket.socket) -> dict[str, Any]:
    try:
        answer, descriptors = receive_message(connection)
    except (OSError, EOFError) as exc:
        raise _unavailable(exc) from exc
    if descriptors or "state" not in answer:
        raise PeerProtocolError(f"{_AGENT} returned an invalid state of a shard: {answer!r}.")
    if answer["state"] == "refused":
        status = int(answer.get("status", 500))
        raise refusal(status, json.dumps(answer).encode(), _AGENT, "submit a shard to", "")
    return answer


def _unavailable(exc: Exception) -> StoreUnavailable:
    return StoreUnavailable(_AGENT, "submit a shard to", "", f"{type(exc).__name__}: {exc}", LOG_HINT)


_FOLLOW_TRIES = 3
_FOLLOW_PAUSE_S = 0.3  # a restarted agent needs a moment to open its socket


class Follower:
    """Waits in a thread for the outcome of one submitted shard. `end` is the future of the outcome. `leave` ends this
    rank's part in the save.
    """

    def __init__(
        self,
        store: LocalStore,
        shard: SubmittedShard,
        layout: ShardLayout,
        staged: memoryview,
        start_agent: Callable[[], object],
        submitted: Submission,
    ) -> None:
        """Closes `layout` once it is no longer needed. Raises StoreUnavailable: no thread can be started. The layout and
        the connection to the agent are closed then.
        """
        self._store, self._shard, self._layout, self._start_agent = store, shard, layout, start_agent
        self._staged: memoryview | None = staged
        self._submitted = submitted
        self._left = threading.Event()
        self.end: Future[WrittenCopies] = Future()
        try:
            start_worker(self._follow, name="rckpt-submitted")
        except StoreUnavailable:
            layout.close()
            submitted.close()
            raise

    def leave(self) -> None:
        """Ends this rank's part in the save. The connection to the agent is closed once the outcome is known."""
        self._left.set()
        if self.end.done():
            self._submitted.close()

    def _follow(self) -> None:
        try:
            found, error = self._wait(), None
        except BaseException as exc:  # noqa: BLE001 - top of a thread; `end` gets the error
            # The future holds the error, whose frames would hold the staged memory.
            found, error = None, forget_locals(exc)
        self._layout.close()
        # Before the future is done: after that, its waiters may reuse the memory.
        self._staged = None
        if found is not None:
            self.end.set_result(found)
        else:
            self.end.set_exception(error)
        if self._left.is_set():
            self._submitted.close()

    def _wait(self) -> WrittenCopies:
        first: StoreUnavailable | None = None  # the cause: later errors may only report a closed connection
        for tries_left in reversed(range(_FOLLOW_TRIES)):
            try:
                return self._submitted.wait()
            except StoreUnavailable as exc:
                assert self._staged is not None, "dropped only when the shard has ended"
                self._submitted.detach(self._staged)
                first = first or exc
                if tries_left == 0:
                    raise first from exc
                log.warning("%s; the shard is submitted again", exc)
                self._again()
        raise AssertionError("the last try returns or raises")

    def _again(self) -> None:
        time.sleep(_FOLLOW_PAUSE_S)
        try:
            self._start_agent()
            assert self._staged is not None, "it is dropped when the shard has ended"
            descriptors = [descriptor_of(self._staged), self._layout.between]
            self._submitted = submit(self._store, self._shard, descriptors, self._staged)
        except StoreUnavailable as exc:  # the next wait, on the closed connection, raises and leads here again
            log.warning("the shard could not be submitted again yet: %s", exc)
