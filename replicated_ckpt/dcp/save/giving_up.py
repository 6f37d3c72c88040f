"""What a rank does with an open save in which something fails before all ranks are told."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def giving_up_on_error(rank: int, abort: Callable[[str], object], close: Callable[[], object]) -> Iterator[None]:
    """If the block raises: `abort` gives the save up on every node that answers; `close` has this rank hold it no more."""
    try:
        yield
    except BaseException as exc:
        try:
            abort(f"rank {rank} failed: {type(exc).__name__}: {exc}")
        finally:
            close()
        raise
