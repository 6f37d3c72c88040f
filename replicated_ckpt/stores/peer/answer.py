"""Requests and answers of an agent: the paths of files, a range of bytes, and a JSON object or one of our errors."""

import contextlib
import errno
import http.client
import json
import time
import urllib.parse
from collections.abc import Iterator
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
"""What a status may mean where the agent says which of them it is; the first one if it says none of them."""


@contextlib.contextmanager
def parsing(what: str, *others: type[Exception]) -> Iterator[None]:
    """For a block that takes apart what another process said. `what` begins the error: "node b answered wrongly".

    Raises:
        PeerProtocolError: a field is missing, or of another type; or the block raised one of `others`.
    """
    try:
        yield
    except _PROBLEMS + others as exc:
        raise PeerProtocolError(f"{what}: {type(exc).__name__}: {one_line(exc)}.") from exc


def document_in(raw: bytes, what: str) -> dict[str, Any]:
    """The JSON object in an answer; `what` begins the sentence that says what was answered instead.

    Raises:
        PeerProtocolError: there is none.
    """
    try:
        answer = json.loads(raw)
    except (ValueError, RecursionError) as exc:
        raise PeerProtocolError(f"{what} with no JSON: {raw[:80]!r}.") from exc
    if not isinstance(answer, dict):
        raise PeerProtocolError(f"{what} with {type(answer).__name__}.")
    return answer


def refusal(
    status: int, raw: bytes, peer: str, method: str, path: str, wrong_token_hint: str | None = None
) -> ReplicatedCkptError:
    """The error that an agent refused a request with: of its class, with its message and its hint.

    `wrong_token_hint`: the next step where the agent does not know the token, and so is another one than was asked.
    """
    try:
        fields = json.loads(raw)
        message, hint, named = one_line(fields["error"], _MESSAGE_CHARS), fields.get("hint"), fields.get("kind")
    except (ValueError, KeyError, TypeError, RecursionError):
        message, hint, named = one_line(raw[:200].decode(errors="replace")), None, None
    hint = one_line(hint, _HINT_CHARS) if isinstance(hint, str) else None
    if status == HTTPStatus.UNAUTHORIZED:
        hint = wrong_token_hint or hint
    kinds = _KINDS_BY_STATUS.get(status, (PeerProtocolError,))
    kind = next((kind for kind in kinds if kind.__name__ == named), kinds[0])
    if issubclass(kind, StoreError):
        return kind(peer, method, path, message, hint)
    if kind is PeerProtocolError:
        return kind(f"{peer} answered {method} {path} with status {status}: {message}", hint)
    return kind(f"{peer}: {message}", hint)


def file_path(checkpoint_id: str, save_id: str, name: str) -> str:
    """Of a committed checkpoint, if it is of this save."""
    return _path(name, checkpoint_id=checkpoint_id, save_id=save_id)


def unmanaged_path(checkpoint_id: str, name: str, size_bytes: int) -> str:
    """Of a checkpoint without a manifest, if the file has this size."""
    return _path(name, checkpoint_id=checkpoint_id, size_bytes=size_bytes)


def metadata_path(save_id: str) -> str:
    """`.metadata` of a save that is open or committed."""
    return _path(METADATA_NAME, save_id=save_id)


def _path(name: str, **of: str | int) -> str:
    return f"/v1/files/{name}?{urllib.parse.urlencode(of)}"


class CutOff(ConnectionResetError):
    """The connection has ended in the middle of a range: it was cut, the peer has gone, or its disk does not give all."""


def fill(target: memoryview, response: http.client.HTTPResponse, until_s: float, within_s: float) -> None:
    """Fills `target` with the whole body of an answer that has its length.

    Raises:
        TooSlow: it has not all come by `until_s` of the monotonic clock, `within_s` after it was asked for. CutOff: it ends
            before. OSError: no byte has come for the time-out of the connection.
    """
    done = 0
    while done < len(target):
        if time.monotonic() > until_s:
            raise TooSlow(f"too slow: {done} of {len(target)} bytes within {within_s:.0f} s")
        try:
            count = response.fp.readinto1(target[done:])  # what is there by now: all of it may never be
        except ConnectionResetError as exc:
            raise CutOff(*exc.args) from exc
        if count == 0:
            raise CutOff(errno.ECONNRESET, "the peer closed the connection in the middle")
        done += count
    response.close()  # the connection stays open: its next answer begins here
