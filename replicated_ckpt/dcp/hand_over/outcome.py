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
def telling_end(board: Blackboard | None, store: LocalStore, save_id: str) -> Iterator[None]:
    """Coordinator: posts that the block has committed the save, or what it raises.

    Raises RankFailed in place of an error of another package: it says where the save stands.
    """
    try:
        yield
    except ReplicatedCkptError as exc:
        _tell(board, save_id, pack_error(_for_others(exc)))
        raise
    except BaseException as exc:
        what, standing = f"{type(exc).__name__}: {exc}", _describe_standing(store, save_id)
        failed = RankFailed(f"Rank {COORDINATOR} failed to complete save {save_id}: {what}. {standing}")
        _tell(board, save_id, pack_error(failed))
        raise failed from exc
    _tell(board, save_id, None)


def tell_committed(board: Blackboard | None, save_id: str) -> None:
    """Coordinator: a save that ranks wrote themselves is committed. A rank whose node has not published it looks for that.

    What else it ends with DCP tells all ranks.
    """
    _tell(board, save_id, None)


def _describe_standing(store: LocalStore, save_id: str) -> str:
    """What the coordinator's node has of a save that its rank could not complete."""
    with contextlib.suppress(ReplicatedCkptError, OSError):
        name = store.catalog.checkpoint_of(save_id)
        if name is not None:
            return f"It is committed, as {name!r} on this node."
        if store.is_staged(save_id):
            return "It is not given up: agents commit it if it is decided."
        return "It was given up: the checkpoint before stands."
    return f"Whether it is committed `replicated-ckpt ls --root {store.root}` says."


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


def explain_unseen(store: LocalStore, checkpoint_id: str, save_id: str) -> ReplicatedCkptError:
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


def _for_others(error: ReplicatedCkptError) -> ReplicatedCkptError:
    """The error in words that hold on every rank."""
    if isinstance(error, AgentSilent):
        return StoreUnavailable("the agent of rank 0's node", error.op, error.key, error.detail, error.hint)
    return error
