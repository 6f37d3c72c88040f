"""A port for the c10d store of a job on this machine, known before rank 0 listens there. Linux only."""

import contextlib
import random
import socket
from pathlib import Path

_GIVEN_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_PORT = 10_000
_TRIES = 100


def find_free_port() -> int:
    """One of 127.0.0.1 that is free, and that Linux gives to nothing which asks for any port: so it is a moment later, too.

    If no port of that kind is free, it is any that is free now.
    """
    first_given = int(_GIVEN_PORTS.read_text().split()[0])
    ports = range(_FIRST_PORT, max(_FIRST_PORT, first_given))
    for port in random.SystemRandom().sample(ports, min(len(ports), _TRIES)):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
