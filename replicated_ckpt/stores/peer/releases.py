"""Releases of this package work together if they have one protocol. For others, the error names both versions."""

from email.message import Message

from replicated_ckpt.errors import ConfigInvalid
from replicated_ckpt.version import PROTOCOL, RELEASE_HEADER, __version__
from replicated_ckpt.wording import one_line

RELEASES_HINT = (
    "All ranks and agents of a job need releases of one protocol. Install the newer release on all nodes, "
    "restart the agents of systemd or Kubernetes, and start the job again."
)
_VERSION_CHARS = 40
_STABLE = ("/v1/status", "/v1/hello", "/v1/shutdown", "/metrics")
"""Unchanged in every protocol, so that an agent of any release can be inspected and replaced."""


def describe_release(said: object) -> str:
    """The release that a process announces, in words; "" if it has this protocol."""
    protocol, _, version = one_line(str(said or ""), _VERSION_CHARS).partition(" ")
    if protocol == str(PROTOCOL):
        return ""
    return f"{version or 'an unknown release'} (protocol {protocol or 'unknown'})"


def check_release(headers: Message, path: str, peer_host: str) -> None:
    """Accepts a request whose sender's release has this protocol, or that names no release, as requests by curl do.

    A request for one of the `_STABLE` paths is always accepted.

    Raises:
        ConfigInvalid: the sender's release has another protocol.
    """
    said = headers.get(RELEASE_HEADER)
    if said is None or path.partition("?")[0] in _STABLE:
        return
    other = describe_release(said)
    if other:
        raise ConfigInvalid(
            f"This agent runs replicated_ckpt {__version__} (protocol {PROTOCOL}), but the calling process at "
            f"{peer_host} runs {other}.",
            RELEASES_HINT,
        )


def check_rank(said: object, rank: int, own_rank: int) -> None:
    """The same check for a post of another rank of the job. All releases so far share the format of posts.

    Raises:
        ConfigInvalid: the rank's release has another protocol.
    """
    other = describe_release(said)
    if other:
        raise ConfigInvalid(
            f"Rank {rank} runs replicated_ckpt {other}, but rank {own_rank} runs {__version__} (protocol {PROTOCOL}).",
            RELEASES_HINT,
        )
