"""How a save that was acknowledged as staged has failed, as the coordinator's rank tells the others: no agent may know."""

import contextlib
from collections.abc import Iterator

from replicated_ckpt.dcp.c10d.blackboard import COORDINATOR, Blackboard
from replicated_ckpt.dcp.c10d.posted_error import pack_error, unpack_error
from replicated_ckpt.dcp.hand_over.finishing import AgentSilent
from replicated_ckpt.errors import RankFailed, ReplicatedCkptError, StoreUnavailable

_TOPIC = "staged"


@contextlib.contextmanager
def telling_failure(board: Blackboard | None, save_id: str) -> Iterator[None]:
    """Coordinator: posts what the block raises."""
    try:
        yield
    except BaseException as exc:
        if board is not None:
            with contextlib.suppress(ReplicatedCkptError):  # without it the others wait longer, and find out
                board.post(_TOPIC, {"save_id": save_id, "error": pack_error(_for_others(exc, save_id))})
        raise


def find_failure(board: Blackboard, save_id: str) -> ReplicatedCkptError | None:
    """What the coordinator's rank has failed with; None: nothing that is known now.

    Raises:
        MeetingFailed: the c10d store does not answer.
    """
    post = board.read_post(_TOPIC, COORDINATOR)
    return None if post is None or post.get("save_id") != save_id else unpack_error(post["error"])


def _for_others(error: BaseException, save_id: str) -> ReplicatedCkptError:
    """The error in words that hold on every rank."""
    if isinstance(error, AgentSilent):
        return StoreUnavailable("the agent of rank 0's node", error.op, error.key, error.detail, error.hint)
    if isinstance(error, ReplicatedCkptError):
        return error
    return RankFailed(f"Rank {COORDINATOR} failed to complete save {save_id}: {type(error).__name__}: {error}")
