"""The next step where an agent cannot be reached: what the failure says, where the address comes from, who sets it."""

import errno
import socket

from replicated_ckpt.config import HOST_ENV

_NO_ROUTE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EADDRNOTAVAIL)


def reach_hint(node_id: str, host: str, port: int, origin: str, error: BaseException) -> str:
    """What to do about an agent that did not answer at its address; `origin` says where the address comes from."""
    known = f"The address {host}:{port} comes from {origin}. " if origin else ""
    shown = f"[{host}]" if ":" in host else host
    return (
        f"{_explain(host, port, error)} {known}Look on node {node_id} whether its agent runs (`replicated-ckpt agent "
        f"--root ROOT` starts one) and whether port {port} is open: `curl -k https://{shown}:{port}/v1/status` answers 401 "
        f"then. If other nodes reach it under another address, set {HOST_ENV} to that there, and start the job again."
    )


def _explain(host: str, port: int, error: BaseException) -> str:
    if isinstance(error, socket.gaierror | UnicodeError):
        return f"This host knows no address of the name {host!r}."
    if isinstance(error, ConnectionRefusedError):
        return f"{host} answers, and nothing listens on its port {port}: its agent has ended, or this is another host."
    if isinstance(error, TimeoutError):
        return f"The host is down, the agent is stopped, a firewall drops port {port}, or the address is wrong."
    if isinstance(error, OSError) and error.errno in _NO_ROUTE:
        return f"No route leads from this host to {host}."
    return "The connection broke off: the agent or its host has gone."
