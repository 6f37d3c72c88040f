"""An error that is kept, for those who ask for it later: of our kinds, and without what was in use where it was raised."""

from traceback import clear_frames

from replicated_ckpt.errors import ReplicatedCkptError, StoreError
from replicated_ckpt.stores.files.durable import store_error_of
from replicated_ckpt.wording import one_line


def translate_any(error: BaseException, store: str, op: str, key: str) -> ReplicatedCkptError:
    """The error as one of ours, which can be sent: of others, as MemoryError, who asks would see the connection break."""
    if isinstance(error, ReplicatedCkptError):
        return error
    if isinstance(error, OSError):
        return store_error_of(error, store, op, key)
    return StoreError(store, op, key, one_line(f"{type(error).__name__}: {error}".removesuffix(": ")))


def forget_locals(error: BaseException) -> BaseException:
    """The error, for those who ask for it later: it says where it was raised, and holds nothing that was in use there."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        each = waiting.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            clear_frames(each.__traceback__)
            waiting += [each.__cause__, each.__context__]
    return error
