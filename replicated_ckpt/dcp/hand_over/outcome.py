"""How a save that was acknowledged as staged has ended, as the coordinator's rank tells the others: no agent may know."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from replicated_ckpt.dcp.c10d.blackboard import COORDINATOR, Blackboard
from replicated_ckpt.dcp.c10d.posted_error import pack_error, unpack_error
from replicated_ckpt.dcp.hand_over.finishing import AgentSilent
from replicated_ckpt.errors import ObjectMissing, RankFailed, ReplicatedCkptError, SaveAborted, StoreUnavailable
from replicated_ckpt.stores.local.store import LocalStore

_TOPIC = "staged"
_ASK_OTHERS = (
    "Other nodes say whether it is committed: `replicated-ckpt ls --root {0}`. If it is, re-protection mends this node's "
    "copy; else the checkpoint of before still loads."
)
_KEPT = 32
"""So many ends are told at once: a rank looks from time to time only, and newer saves may have ended by then."""


@contextlib.contextmanager
def telling_end(board: Blackboard | None, save_id: str) -> Iterator[None]:
    """Coordinator: posts that the block has committed the save, or what it raises."""
    try:
        yield
    except BaseException as exc:
        _tell(board, save_id, pack_error(_for_others(exc, save_id)))
        raise
    _tell(board, save_id, None)


def _tell(board: Blackboard | None, save_id: str, error: object) -> None:
    if board is None:
        return
    with contextlib.suppress(ReplicatedCkptError):  # without it the others wait longer, and find out
        ends = [*_read_ends(board).items(), (save_id, error)]
        board.post(_TOPIC, {"ends": dict(ends[-_KEPT:])})


def is_told_committed(board: Blackboard, save_id: str) -> bool:
    """Whether the coordinator's rank has said that the save is committed. False: nothing is known of it now.

    Raises:
        MeetingFailed: the c10d store does not answer. Others: what the coordinator's rank has failed with.
    """
    ends = _read_ends(board)
    if save_id not in ends:
        return False
    if ends[save_id] is not None:
        raise unpack_error(ends[save_id])
    return True


def why_unseen(store: LocalStore, checkpoint_id: str, save_id: str) -> ReplicatedCkptError:
    """Why a save of which every shard was staged is not published here, as far as this node can tell.

    It was given up; or this node cannot read the manifest that has its name: then it may be committed.
    """
    try:
        store.catalog.manifest(checkpoint_id)
    except ObjectMissing:
        pass
    except ReplicatedCkptError as exc:
        why = f"this node cannot read what has its name: {exc.message}"
        return StoreUnavailable(str(store.root), "see the end of", save_id, why, _ASK_OTHERS.format(store.root))
    return SaveAborted(f"Save {save_id} was given up after every shard was staged.")


def _read_ends(board: Blackboard) -> Mapping[str, Any]:
    """The saves that have ended, the last ones, and what they have failed with."""
    post = board.read_post(_TOPIC, COORDINATOR)
    return {} if post is None else post["ends"]


def _for_others(error: BaseException, save_id: str) -> ReplicatedCkptError:
    """The error in words that hold on every rank."""
    if isinstance(error, AgentSilent):
        return StoreUnavailable("the agent of rank 0's node", error.op, error.key, error.detail, error.hint)
    if isinstance(error, ReplicatedCkptError):
        return error
    return RankFailed(f"Rank {COORDINATOR} failed to complete save {save_id}: {type(error).__name__}: {error}")
