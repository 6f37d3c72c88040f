"""The life of an agent, from the lock of its root to its exit. Each root has at most one agent."""

import contextlib
import logging
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from replicated_ckpt.agent.certificate import open_certificate
from replicated_ckpt.agent.http.greeting import Greeter
from replicated_ckpt.agent.http.object_routes import ObjectRoutes
from replicated_ckpt.agent.http.routes import Activity, WatchedRoutes
from replicated_ckpt.agent.http.server import AgentServer
from replicated_ckpt.agent.http.unix_socket import open_unix_socket
from replicated_ckpt.agent.repair.reprotect import Reprotector
from replicated_ckpt.agent.repair.scrub import Scrubber
from replicated_ckpt.agent.state.endpoint import (
    LOCK_NAME,
    Endpoint,
    Identity,
    has_clients,
    has_permanent_agent,
    keep_identity,
    next_identity,
    permanent_lock,
    read_endpoint,
    remove_endpoint,
    root_lock,
    served_already,
    shut_out_clients,
    write_endpoint,
    write_metrics_token,
)
from replicated_ckpt.agent.state.listeners import cannot_listen
from replicated_ckpt.agent.state.rights import Tokens, read_owner_key
from replicated_ckpt.config import LEAVE_WITHIN_S, AgentConfig, check_direct_io, parse_ports
from replicated_ckpt.core.upkeep.policy import NodeReport
from replicated_ckpt.errors import ReplicatedCkptError, StoreDenied
from replicated_ckpt.node.peers.watch import SilenceTimeouts
from replicated_ckpt.node.saves.collector import finish_removals
from replicated_ckpt.node.saves.drain import Draining
from replicated_ckpt.node.saves.service import NodeService
from replicated_ckpt.node.saves.settle import awaits_settling
from replicated_ckpt.node.state.upload_book import UploadBook
from replicated_ckpt.node.uploads.uploader import Uploader
from replicated_ckpt.stores.files.durable import remove_broken_off_writes, translate_errors
from replicated_ckpt.stores.files.locks import FileLock, holder_of, is_stopped
from replicated_ckpt.stores.local.identity import FRESH_IDENTITY
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.local.versions.full_disk import (
    keep_room_to_start,
    lacks_room_to_start,
    make_room_to_start,
    try_room,
)
from replicated_ckpt.stores.node_cache.cache import is_any_cache_locked
from replicated_ckpt.stores.threads import start_worker
from replicated_ckpt.stores.throttle import Pace, copy_pace, submission_pace
from replicated_ckpt.version import __version__

log = logging.getLogger(__name__)


def call_on_signals(numbers: Sequence[int], call: Callable[[int], None]) -> None:
    """From now on, each of these signals runs `call(number)` in one thread, one signal after the other.

    So `call` may take any lock. A signal handler could wait for ever for a lock that the main thread holds, such as the
    lock in an `Event`. Call this once in a process, from its main thread.

    Raises:
        StoreUnavailable: no thread can be started. The signals keep their earlier handlers.
    """
    receiver, sender = socket.socketpair()
    # The thread first: if it cannot be started, no handler has been replaced yet.
    start_worker(_call_on_each, receiver, call, name="rckpt-signals")
    # The interpreter writes to it inside its C signal handler, which must never wait.
    sender.setblocking(False)
    signal.set_wakeup_fd(sender.detach(), warn_on_full_buffer=False)
    for number in numbers:
        signal.signal(number, lambda *_: None)  # without a handler the interpreter writes nothing to the descriptor
    # An agent inherits the signals that the rank which starts it has blocked.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


def _call_on_each(receiver: socket.socket, call: Callable[[int], None]) -> None:
    while number := receiver.recv(1):
        call(number[0])


_LOOK_INTERVAL_S = 0.5
_LEAVE_GRACE_S = 5.0
_LEAVE_POLL_S = 0.02


class Agent:
    """One node's agent in this process."""

    def __init__(self, config: AgentConfig) -> None:
        self.config = config
        self._stopping, self._hurry = threading.Event(), threading.Event()
        self._activity = Activity()
        self._started_at, self._start_id = time.monotonic(), uuid.uuid4().hex
        self._hello: threading.Thread | None = None
        self._permanent_lock: FileLock | None = None

    def run(self) -> None:
        """Serves until it is told to stop or is idle for too long. Called once, from the main thread.

        Raises:
            AgentUnavailable: another agent serves this root and does not exit for this one, or the port is taken.
        """
        store = LocalStore(self.config.root)
        directory = store.agent_directory()
        # Before anything under the root changes: two agents would recover the same saves at once.
        lock = self._take_root(directory)
        with translate_errors(str(store.root), "start", "agent"):
            remove_broken_off_writes(directory)
            remove_broken_off_writes(store.root, FRESH_IDENTITY)
        # On a full disk the small files that follow could not be written, and no command could then free room.
        make_room_to_start(store.root)
        self._service = NodeService(store, check_direct_io(self.config.direct_io), self.config.nice)
        # Before the first request: a save that was decided here before a crash must not be reported as staged.
        completed = self._service.recover()
        finish_removals(store)
        self._start_background_work()
        # The port and tokens of the last start, so that peers that were away still find this node.
        identity = next_identity(directory, self._service.node_id)
        self._certificate = open_certificate(self.config, directory)
        server = self._open_server(identity)
        self._endpoint = self._open_endpoint(server, identity)  # before the first request is answered
        self._greeter = Greeter(self._service.peers, self._endpoint)
        call_on_signals((signal.SIGTERM, signal.SIGINT), self._on_signal)
        thread = start_worker(server.serve_forever, 0.2, name="rckpt-accept")
        unix_socket = open_unix_socket(directory, self._service, self._service.figures.add_report)
        try:
            with translate_errors(str(store.root), "start", "agent"):
                # Durable before a peer gets it: an agent that starts after a crash must count one more start.
                keep_identity(directory, replace(identity, port=self._endpoint.port))
                self._hello = self._greeter.start()
                write_metrics_token(directory, identity.tokens)
                write_endpoint(directory, self._endpoint)
            log.info("serving %s as %r, completed %d saves", self.config.root, self._endpoint, len(completed))
            self._reprotector.start()
            self._scrubber.start()
            self._uploader.start()
            # The reserve is made last: on a nearly full disk it would take the room that the start itself needs.
            if not lacks_room_to_start(store.root):
                keep_room_to_start(store.root)
            self._wait(directory, lock)
            self._leave(server)
        finally:
            self._stopping.set()
            if unix_socket is not None:
                unix_socket.close()
            # Otherwise another root lies at this path by now, and its endpoint file is another agent's.
            if lock.is_in_place():
                remove_endpoint(directory)
            server.shutdown()
            server.server_close()
            thread.join()
            # Released after the server is closed, because the agent that waits for this lock binds the same port.
            lock.release()
            if self._permanent_lock is not None:
                self._permanent_lock.release()
            log.info("stopped serving %s", self.config.root)

    def _take_root(self, directory: Path) -> FileLock:
        """Takes the lock of the root. A permanent agent first waits until an agent that ranks started has exited."""
        lock = None
        if self.config.idle_exit_s is not None:
            lock = root_lock(directory)
        elif (permanent := permanent_lock(directory)) is not None:
            # Held before the wait: the agent that ranks started exits once it sees this lock.
            self._permanent_lock = permanent
            self._log_wait(directory)
            lock = root_lock(directory, LEAVE_WITHIN_S)  # the agent of the ranks first completes its open saves
        if lock is None:
            raise served_already(self.config.root, directory)
        return lock

    def _log_wait(self, directory: Path) -> None:
        """Logs which agent this one waits for. Without the line, it would seem to hang."""
        pid = holder_of(directory / LOCK_NAME)
        if pid is not None:
            state = f"; it is stopped: `kill -CONT {pid}`" if is_stopped(pid) else ""
            log.warning(
                "waits for the agent that ranks started for %s (process %d) to complete its open saves and exit, for at "
                "most %.0f s%s",
                self.config.root,
                pid,
                LEAVE_WITHIN_S,
                state,
            )

    def _start_background_work(self) -> None:
        """Makes the threads of re-protection, uploads and scrub, which `run` starts once the agent can be reached."""
        config = self.config
        is_fetching = partial(is_any_cache_locked, self._service.store.agent_directory())
        copying = copy_pace(config.copy_mib_per_s, self._stopping, self._service.is_in_use, is_fetching)
        self._service.submissions.pace = submission_pace(config.copy_mib_per_s, self._stopping, copying)
        scrubbing = Pace(config.scrub_mib_per_s * (1 << 20), self._stopping)
        timeouts = SilenceTimeouts(config.lost_after_s, config.away_after_s)
        self._reprotector = Reprotector(
            self._service,
            timeouts,
            copying,
            self._stopping,
            node_report=self._make_node_report,
            on_seen=self._on_seen,
            idle_pause_s=config.round_every_s,
        )
        book = UploadBook(self._service.store.agent_directory(), config.upload_part_mib << 20)
        uploading = Pace(config.upload_mib_per_s * (1 << 20), self._stopping)
        self._uploader = Uploader(self._service, book, uploading, timeouts, self._stopping, self._reprotector.suspect)
        self._scrubber = Scrubber(
            self._service.store,
            self._service.node_id,
            scrubbing,
            self._stopping,
            config.scrub_every_s,
            self._reprotector.suspect_finding,
            self._service.damage,
        )

    def _leave(self, server: AgentServer) -> None:
        """Finishes the open saves, announces the exit to the peers, and then refuses new connections.

        The agent answers until the goodbye is sent: peers bring copies, and call back to check that it exits.
        """
        # An agent that exits because it is idle has no open save to wait for.
        is_told_to_stop = self._stopping.is_set()
        self._stopping.set()
        if is_told_to_stop:
            self._drain()
        self._greeter.announce_exit()
        server.shutdown()
        server.server_close()  # otherwise a client that connects now would wait in vain for an answer
        deadline = time.monotonic() + _LEAVE_GRACE_S
        # `_activity` would not do: it ends a request before its answer is sent, and the exit would cut the answer off.
        while server.connections.has_requests() and time.monotonic() < deadline and not self._hurry.wait(_LEAVE_POLL_S):
            pass
        # Each join is bounded: a thread that hangs in a dead peer or disk ends with the process.
        self._reprotector.join()
        self._scrubber.join()
        self._uploader.join()

    def _drain(self) -> None:
        """Waits for the open saves, and for a save that a rank of this node was about to open at the time of the stop."""
        directory, told_at = self._service.store.agent_directory(), time.monotonic()
        deadline = told_at + self.config.drain_s
        try:
            while self._activity.awaits_opening and has_clients(directory) and time.monotonic() < deadline:
                if self._hurry.wait(_LEAVE_POLL_S):
                    break
            Draining(self._service, self._hurry).run(self.config.drain_s, told_at)
        except (ReplicatedCkptError, OSError) as exc:  # the node's own disk fails; the next start settles the saves
            log.error("exits, and could not determine which saves are unfinished: %s", exc)  # noqa: TRY400 - it explains itself

    def _open_server(self, identity: Identity) -> AgentServer:
        objects = ObjectRoutes(self._service, self._uploader)
        tokens = self._make_tokens(identity)
        routes = WatchedRoutes(
            self._activity, self._service, self._reprotector, objects, self.status, self._stopping.set, tokens.prove
        )
        tls = self._certificate.context if self._certificate else None
        allowed = parse_ports(self.config.port)
        ports = list(allowed) or [0]
        if identity.port and (not allowed or identity.port in allowed):
            ports.insert(0, identity.port)  # the port that the peers have in their address books
        for port in ports:
            try:
                return AgentServer((self.config.host, port), tokens, routes, tls)
            except OSError as exc:
                problem = exc
        raise cannot_listen(self.config.host, ports[-1], problem) from problem

    def _make_tokens(self, identity: Identity) -> Tokens:
        tokens, shown = replace(identity.tokens, key=read_owner_key()), self._certificate
        return tokens if shown is None else replace(tokens, names=lambda: shown.names)

    def _open_endpoint(self, server: AgentServer, identity: Identity) -> Endpoint:
        return Endpoint(
            self._service.node_id,
            str(server.server_address[0]),
            int(server.server_address[1]),
            identity.token,
            os.getpid(),
            __version__,
            identity.incarnation,
            self._certificate.sha256 if self._certificate else "",
            identity.owner_token,
        )

    def _wait(self, directory: Path, lock: FileLock) -> None:
        """Returns once the agent is told to stop, or is idle for too long. An agent that cannot read its root goes on.

        It may lack descriptors or memory only for a moment. If its disk has failed, peers at least get an error at once
        instead of a time-out.
        """
        logged = ""
        while not self._stopping.wait(_LOOK_INTERVAL_S):
            try:
                if self._is_over(directory, lock):
                    return
                logged = ""
            except (ReplicatedCkptError, OSError, MemoryError) as exc:
                why = str(exc) or repr(exc)
                if why != logged:
                    log.warning("cannot check its root and its clients: %s", why)
                logged = why
                # A root that can never be read again must not keep an idle agent for ever.
                idle_exit_s = self.config.idle_exit_s
                if idle_exit_s is not None and not self._is_working() and self._activity.idle_s() > idle_exit_s:
                    return

    def _is_over(self, directory: Path, lock: FileLock) -> bool:
        """Whether the root is gone, a permanent agent takes over, or this agent was idle for `idle_exit_s` seconds.

        Raises:
            ReplicatedCkptError, OSError: the root or its locks cannot be read.
        """
        # The agent would otherwise write into a removed directory, or into the root of another agent.
        if not lock.is_in_place():
            log.warning("the root %s was removed or replaced by another one", self.config.root)
            return True
        self._keep_endpoint_shown(directory)
        if self.config.idle_exit_s is None:
            return False
        # A permanent agent, with the operator's options, waits for the lock of this one.
        if has_permanent_agent(directory):
            log.info("a permanent agent serves %s from now on", self.config.root)
            self._stopping.set()
            return True
        if self._is_working() or has_clients(directory) or awaits_settling(self._service):
            self._activity.touch()
            return False
        # New clients are locked out first: a rank must not begin to use an agent that exits.
        is_idle = self._activity.idle_s() > self.config.idle_exit_s and shut_out_clients(directory)
        if is_idle:
            log.info("no client and no work for %.0f s: exits", self.config.idle_exit_s)
        return is_idle

    def _is_working(self) -> bool:
        return self._reprotector.is_busy or self._uploader.is_busy or self._service.is_saving

    def _keep_endpoint_shown(self, directory: Path) -> None:
        """Writes the endpoint file again if the certificate was renewed, or if the file was removed or changed.

        If the certificate is new, the agent greets its peers again. On a full disk the old file stays, and the next call
        tries again.
        """
        shown = self._endpoint
        if self._certificate is not None:
            self._certificate.take_up()
            shown = replace(shown, tls_sha256=self._certificate.sha256)
        with contextlib.suppress(StoreDenied):  # another user has written it
            if read_endpoint(directory) == shown:
                return
        try:
            write_endpoint(directory, shown)
        except OSError as exc:
            log.warning("the file with this agent's address cannot be written again: %s", exc)
            return
        if shown == self._endpoint:
            log.warning("the file with this agent's address was removed or changed; it is written again")
            return
        self._endpoint = shown
        # Peers pin the certificate, and only the last few earlier ones are still shown to them.
        self._hello = self._greeter.announce(shown)

    def _on_signal(self, number: int) -> None:
        log.info("stopping on %s", signal.Signals(number).name)
        # The second signal: exit at once, even if saves are open.
        (self._hurry if self._stopping.is_set() else self._stopping).set()

    def _on_seen(self, nodes: Collection[str]) -> None:
        self._greeter.greet(nodes)
        self._service.peers.duplicate_nodes.look_again()

    def _make_node_report(self) -> NodeReport:
        return self._uploader.node_report()

    def status(self, *, is_brief: bool, is_opening: bool = False) -> Mapping[str, Any]:
        """The answer to `GET /v1/status`. `is_brief`: the agent's identity alone. `is_opening`: see `StatusOf`."""
        if is_opening and not self._stopping.is_set():
            self._activity.note_registered()  # before the answer: an agent that is told to stop now waits for that save
        brief = {
            "node_id": self._endpoint.node_id,
            "version": __version__,
            "pid": os.getpid(),
            "root": self.config.root,
            "uptime_s": round(time.monotonic() - self._started_at, 3),
            "incarnation": self._endpoint.incarnation,
            "is_leaving": self._stopping.is_set(),
            "tls_sha256": self._endpoint.tls_sha256,
            "start_id": self._start_id,
        }
        # Every rank asks this at each save and load: its cost must not grow with the store.
        if is_brief:
            return brief
        staged = [intent.save_id for intent in self._service.store.list_staged()]
        in_doubt = [save for save in self._service.in_doubt.read_all() if save.intent.save_id in staged]
        return {
            **brief,
            "staged": staged,
            "checkpoints": [holding.checkpoint_id for holding in self._service.holdings()],
            "in_doubt": [save.to_json() for save in in_doubt],
            "diverged": self._service.list_diverged(),
            "greeted": self._hello is not None and not self._hello.is_alive(),
            "duplicate_nodes": [*self._service.peers.duplicate_nodes.describe(), *self._greeter.describe_refusals()],
            "restoring": self._reprotector.is_busy,
            "protection": self._reprotector.status(),
            "scrub": self._scrubber.status(),
            "room": try_room(self._service.store.root).to_json(),
            "object_store": self._uploader.status(),
            "has_clients": has_clients(self._service.store.root_agent_directory()),
            "threads": threading.active_count(),
        }
