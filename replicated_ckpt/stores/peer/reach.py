"""Hints for an agent that cannot be reached, and the time limit of requests to an agent."""

import errno
import http.client
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

from replicated_ckpt.environment import HOST_ENV
from replicated_ckpt.errors import StoreUnavailable
from replicated_ckpt.stores.peer.tls import is_loopback
from replicated_ckpt.stores.threads import start_worker
from replicated_ckpt.stores.verified import TooSlow

SLOW = "It answers, but its disk, its host or the link to it is slow."
_LOOPBACK = "With {} each host reaches itself, which is right only if all nodes are on one host."
_NO_ROUTE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EADDRNOTAVAIL)


class Address(Protocol):
    """The address of a node's agent; `origin` is where the address comes from."""

    @property
    def node_id(self) -> str: ...
    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def tls_sha256(self) -> str: ...
    @property
    def origin(self) -> str: ...


def reach_hint(at: Address, error: BaseException) -> str:
    """The hint for an agent that did not answer at its address."""
    shown = f"[{at.host}]" if ":" in at.host else at.host
    scheme = "https" if at.tls_sha256 else "http"
    itself = f"{_LOOPBACK.format(at.host)} " if is_loopback(at.host) and HOST_ENV in at.origin else ""
    return (
        f"{itself}{_explain(at, error)} {_describe_origin(at)}On node {at.node_id}, check that its agent runs "
        f"(`replicated-ckpt agent --root ROOT` starts one) and that port {at.port} is open: "
        f"`curl -k {scheme}://{shown}:{at.port}/v1/status` must return 401. "
        f"If other nodes reach it under another address, set {HOST_ENV} to that address there, "
        "and start the job again."
    )


def wrong_token_hint(at: Address) -> str:
    """The hint if another agent than the expected one answers at the address."""
    why = f" {_LOOPBACK.format(at.host)}" if is_loopback(at.host) else ""
    return (
        f"An agent of another node than {at.node_id} answers there.{why} {_describe_origin(at)}If the address is "
        f"wrong, set {HOST_ENV} on the node to the one under which others reach it, and start the job again. If "
        "it is right, the node has a new certificate or disk: the next save or load with ranks there announces "
        "the change."
    )


def _describe_origin(at: Address) -> str:
    return f"The address {at.host}:{at.port} comes from {at.origin}. " if at.origin else ""


def _explain(at: Address, error: BaseException) -> str:
    if isinstance(error, socket.gaierror | UnicodeError):
        return f"This host cannot resolve the name {at.host!r}."
    if isinstance(error, ConnectionRefusedError):
        why = "its agent has ended, or this is another host"
        return f"{at.host} answers, but no process listens on its port {at.port}: {why}."
    if isinstance(error, TooSlow):
        return SLOW
    if isinstance(error, TimeoutError):
        return f"The host is down, the agent is stopped, a firewall drops port {at.port}, or the address is wrong."
    if isinstance(error, OSError) and error.errno in _NO_ROUTE:
        return f"This host has no route to {at.host}."
    return "The connection broke: the agent or its host has ended, or cannot start threads (see its log)."


def is_time_out(error: BaseException | None) -> bool:
    """Whether the error is a time-out of a peer: another request soon would cost another time-out."""
    return isinstance(error, StoreUnavailable) and isinstance(error.__cause__, TimeoutError)


@contextmanager
def limit_time(connected: socket.socket | None, seconds: float) -> Iterator[None]:
    """Shuts the connection down after `seconds`. The block's error then becomes a TimeoutError.

    A StoreUnavailable of the block stays one, with a TimeoutError as its cause.

    Raises:
        StoreUnavailable: the system has no thread for the watch; the block was not begun.
    """
    ended, is_broken = threading.Event(), threading.Event()
    late = f"it has not ended within {seconds:.0f} s"

    def watch() -> None:
        if not ended.wait(seconds) and connected is not None:
            is_broken.set()
            with suppress(OSError):  # closed meanwhile: the block has ended
                # The socket's own method: TLS's would switch to plain text.
                socket.socket.shutdown(connected, socket.SHUT_RDWR)

    start_worker(watch, name="rckpt-deadline")
    try:
        yield
    except (OSError, http.client.HTTPException) as exc:
        if is_broken.is_set():
            raise TimeoutError(late) from exc
        raise
    except StoreUnavailable as exc:
        if is_broken.is_set():
            raise StoreUnavailable(exc.store, exc.op, exc.key, late) from TimeoutError(late)
        raise
    finally:
        ended.set()
