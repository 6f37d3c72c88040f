"""Errors that are stored and raised later: as our own classes, without the memory that their frames refer to."""

from traceback import clear_frames

from replicated_ckpt.errors import ReplicatedCkptError, StoreError
from replicated_ckpt.stores.files.durable import store_error_of
from replicated_ckpt.wording import one_line


def translate_any(error: BaseException, store: str, op: str, key: str) -> ReplicatedCkptError:
    """The error as one of our classes. Others, as MemoryError, cannot be sent: the connection would break."""
    if isinstance(error, ReplicatedCkptError):
        return error
    if isinstance(error, OSError):
        return store_error_of(error, store, op, key)
    return StoreError(store, op, key, one_line(f"{type(error).__name__}: {error}".removesuffix(": ")))


def forget_locals(error: BaseException) -> BaseException:
    """Returns the error itself, to be stored: its traceback stays, and the local variables of its frames are released."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        each = waiting.pop()
        if each is not None and id(each) not in seen:  # causes may form a circle
            seen.add(id(each))
            # The frames refer to buffers: 16 MiB for each stored error of a shard.
            clear_frames(each.__traceback__)
            waiting += [each.__cause__, each.__context__]
    return error
