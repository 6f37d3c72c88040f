"""What an agent's answer means: a JSON object, or one of our errors. Whatever else it holds is an error, too."""

import json
from typing import Any

from replicated_ckpt.core.one_line import one_line
from replicated_ckpt.errors import (
    CheckpointExists,
    ObjectCorrupt,
    ObjectMissing,
    PeerProtocolError,
    ReplicatedCkptError,
    SaveAborted,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreUnavailable,
)

_MESSAGE_CHARS = 10_000
_HINT_CHARS = 1_000


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


def refusal(status: int, raw: bytes, peer: str, method: str, path: str) -> ReplicatedCkptError:
    """The error that an agent refused a request with."""
    try:
        fields = json.loads(raw)
        message, hint = one_line(fields["error"], _MESSAGE_CHARS), fields.get("hint")
    except (ValueError, KeyError, TypeError, RecursionError):
        message, hint = one_line(raw[:200].decode(errors="replace")), None
    hint = one_line(hint, _HINT_CHARS) if isinstance(hint, str) else None
    by_status: dict[int, type[StoreError]] = {
        401: StoreDenied,
        403: StoreDenied,
        404: ObjectMissing,
        422: ObjectCorrupt,
        503: StoreUnavailable,
        507: StoreFull,
    }
    if status in by_status:
        return by_status[status](peer, method, path, message, hint)
    if status == 409:
        return CheckpointExists(f"{peer}: {message}", hint)
    if status == 410:
        return SaveAborted(f"{peer}: {message}", hint)
    return PeerProtocolError(f"{peer} answered {method} {path} with status {status}: {message}", hint)
