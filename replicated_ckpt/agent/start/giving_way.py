"""Which of a node's running agents give way to one that this process starts."""

import os
import socket
from pathlib import Path

from replicated_ckpt.agent.requests.releases import RELEASES_HINT
from replicated_ckpt.agent.state.endpoint import Endpoint, has_one_to_stay
from replicated_ckpt.environment import TLS_CERT_ENV
from replicated_ckpt.errors import ConfigInvalid
from replicated_ckpt.stores.peer.tls import is_loopback, is_plain_allowed
from replicated_ckpt.version import PROTOCOL, __version__


def gives_way(directory: Path, endpoint: Endpoint, bind_host: str | None) -> bool:
    """Whether this process replaces the agent, see `ensure_agent`.

    Not one that is merely older and was started to stay, by systemd say: that would start it again, and again.
    """
    must_hear = bind_host or "localhost"
    is_deaf = is_loopback(endpoint.host) and must_hear not in (endpoint.host, "localhost")
    is_plain = not endpoint.tls_sha256 and (bool(os.environ.get(TLS_CERT_ENV)) or not is_plain_allowed(must_hear))
    return is_deaf or is_plain or (_is_older(endpoint) and not has_one_to_stay(directory))


def check_running(directory: Path, endpoint: Endpoint) -> None:
    """Raises ConfigInvalid: this process cannot talk to the agent, which is newer, or older and was started to stay."""
    if endpoint.protocol > PROTOCOL or (endpoint.protocol < PROTOCOL and has_one_to_stay(directory)):
        raise ConfigInvalid(
            f"The agent of node {endpoint.node_id} on {socket.gethostname()} runs replicated_ckpt {endpoint.version} "
            f"(protocol {endpoint.protocol}), and this rank there runs {__version__} (protocol {PROTOCOL}).",
            RELEASES_HINT,
        )


def _is_older(endpoint: Endpoint) -> bool:
    """Whether it is of an older protocol, or of a released version before this one; any other version is let be."""
    try:
        is_before = [int(part) for part in endpoint.version.split(".")] < [int(part) for part in __version__.split(".")]
    except ValueError:
        is_before = False
    return endpoint.protocol < PROTOCOL or is_before
