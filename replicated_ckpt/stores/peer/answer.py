"""Requests and answers of an agent: the paths of files, a range of bytes, and a JSON object or one of our errors.

Agents and ranks work together if their releases have one protocol. For others, the error names both releases.
"""

import contextlib
import errno
import http.client
import json
import time
import urllib.parse
from collections.abc import Iterator
from email.message import Message
from http import HTTPStatus
from typing import Any

from replicated_ckpt.core.layout import METADATA_NAME
from replicated_ckpt.errors import (
    AgentUnavailable,
    CheckpointExists,
    ConfigInvalid,
    MetadataUnsafe,
    ObjectCorrupt,
    ObjectMissing,
    PeerProtocolError,
    ReplicatedCkptError,
    SaveAborted,
    SaveSuperseded,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreUnavailable,
)
from replicated_ckpt.stores.verified import TooSlow
from replicated_ckpt.version import PROTOCOL, RELEASE_HEADER, __version__
from replicated_ckpt.wording import one_line

_MESSAGE_CHARS = 10_000
_HINT_CHARS = 1_000
_PROBLEMS = (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)
_KINDS_BY_STATUS: dict[int, tuple[type[ReplicatedCkptError], ...]] = {
    400: (PeerProtocolError, ConfigInvalid),
    401: (StoreDenied,),
    403: (StoreDenied,),
    404: (ObjectMissing,),
    409: (CheckpointExists,),
    410: (SaveAborted, SaveSuperseded),
    422: (ObjectCorrupt,),
    500: (PeerProtocolError, StoreError, AgentUnavailable, MetadataUnsafe),
    503: (StoreUnavailable,),
    507: (StoreFull,),
}
"""Error classes that a status may stand for: the one that the agent names, or the first."""


@contextlib.contextmanager
def parsing(what: str, *others: type[Exception]) -> Iterator[None]:
    """Turns errors of a block that parses a message into a PeerProtocolError. `what` begins its text: "node b answered"."""
    try:
        yield
    except _PROBLEMS + others as exc:
        raise PeerProtocolError(f"{what}: {type(exc).__name__}: {one_line(exc)}.") from exc


def document_in(raw: bytes, what: str) -> dict[str, Any]:
    """The JSON object in an answer. `what` begins the error text.

    Raises:
        PeerProtocolError: the answer is not a JSON object.
    """
    try:
        answer = json.loads(raw)
    except (ValueError, RecursionError) as exc:
        raise PeerProtocolError(f"{what} without JSON: {raw[:80]!r}.") from exc
    if not isinstance(answer, dict):
        raise PeerProtocolError(f"{what} with JSON of the type {type(answer).__name__}.")
    return answer


def refusal(
    status: int, raw: bytes, peer: str, method: str, path: str, wrong_token_hint: str | None = None
) -> ReplicatedCkptError:
    """The error with which an agent answered a request: its class, message and hint.

    `wrong_token_hint`: the hint for an unknown token, which means that another agent listens at the address.
    """
    try:
        fields = json.loads(raw)
        message, hint, named = one_line(fields["error"], _MESSAGE_CHARS), fields.get("hint"), fields.get("kind")
    except (ValueError, KeyError, TypeError, RecursionError):
        message, hint, named = one_line(raw[:200].decode(errors="replace")), None, None
    hint = one_line(hint, _HINT_CHARS) if isinstance(hint, str) else None
    if status == HTTPStatus.UNAUTHORIZED:
        hint = wrong_token_hint or hint
    # Only classes of this status: the class name in the answer is text from a peer.
    kinds = _KINDS_BY_STATUS.get(status, (PeerProtocolError,))
    kind = next((kind for kind in kinds if kind.__name__ == named), kinds[0])
    if issubclass(kind, StoreError):
        return kind(peer, method, path, message, hint)
    if kind is PeerProtocolError:
        return kind(f"{peer} answered {method} {path} with status {status}: {message}", hint)
    return kind(f"{peer}: {message}", hint)


def file_path(checkpoint_id: str, save_id: str, name: str) -> str:
    """The path of a file of one committed save."""
    return _path(name, checkpoint_id=checkpoint_id, save_id=save_id)


def unmanaged_path(checkpoint_id: str, name: str, size_bytes: int) -> str:
    """The path of a file of this size in a checkpoint without a manifest."""
    return _path(name, checkpoint_id=checkpoint_id, size_bytes=size_bytes)


def metadata_path(save_id: str) -> str:
    """The path of `.metadata` of an open or committed save."""
    return _path(METADATA_NAME, save_id=save_id)


def _path(name: str, **of: str | int) -> str:
    return f"/v1/files/{name}?{urllib.parse.urlencode(of)}"


class CutOff(ConnectionResetError):
    """The connection ended in the middle of a range: it was cut, the peer ended, or its disk could not read all bytes."""


def fill(target: memoryview, response: http.client.HTTPResponse, until_s: float, within_s: float) -> None:
    """Fills `target` with the whole body of an answer of the same length.

    Raises:
        TooSlow: bytes are missing at `until_s` of the monotonic clock, `within_s` after the request. CutOff: the body is
            too short. OSError: no byte came within the time-out of the connection.
    """
    done = 0
    while done < len(target):
        # A peer that sends one byte at a time never meets the socket's time-out.
        if time.monotonic() > until_s:
            raise TooSlow(f"too slow: {done} of {len(target)} bytes within {within_s:.0f} s")
        try:
            # Returns after one receive: waiting for all could hide a slow peer.
            count = response.fp.readinto1(target[done:])
        except ConnectionResetError as exc:
            raise CutOff(*exc.args) from exc
        if count == 0:
            raise CutOff(errno.ECONNRESET, "the peer closed the connection too early")
        done += count
    response.close()  # ends the answer only: the connection is used again


RELEASES_HINT = (
    "All ranks and agents of a job need releases of one protocol. Install the newer release on all nodes, "
    "restart the agents of systemd or Kubernetes, and start the job again."
)
_VERSION_CHARS = 40
_STABLE = ("/v1/status", "/v1/hello", "/v1/shutdown", "/metrics")
"""Unchanged in every protocol, so that an agent of any release can be inspected and replaced."""


def describe_release(said: object) -> str:
    """The release that a process announced, in words; "" if it has this protocol."""
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
