"""What an agent's answer means: a JSON object, or one of our errors. Whatever else it holds is an error, too."""

import contextlib
import json
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

from replicated_ckpt.core.one_line import one_line
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
    status: int, raw: bytes, peer: str, method: str, path: str, stranger_hint: str | None = None
) -> ReplicatedCkptError:
    """The error that an agent refused a request with: of its class, with its message and its hint.

    `stranger_hint`: the next step where the agent does not know the token, and so is another one than was asked.
    """
    try:
        fields = json.loads(raw)
        message, hint, named = one_line(fields["error"], _MESSAGE_CHARS), fields.get("hint"), fields.get("kind")
    except (ValueError, KeyError, TypeError, RecursionError):
        message, hint, named = one_line(raw[:200].decode(errors="replace")), None, None
    hint = one_line(hint, _HINT_CHARS) if isinstance(hint, str) else None
    if status == HTTPStatus.UNAUTHORIZED:
        hint = stranger_hint or hint
    kinds = _KINDS_BY_STATUS.get(status, (PeerProtocolError,))
    kind = next((kind for kind in kinds if kind.__name__ == named), kinds[0])
    if issubclass(kind, StoreError):
        return kind(peer, method, path, message, hint)
    if kind is PeerProtocolError:
        return kind(f"{peer} answered {method} {path} with status {status}: {message}", hint)
    return kind(f"{peer}: {message}", hint)
