"""Steps that go wrong, to see that the harness notices."""

import os
import time

from tests.multiprocess.context import Context


def hang(context: Context) -> None:
    if context.rank == 1:
        a_place_to_hang()


def a_place_to_hang() -> None:
    time.sleep(600)


def raise_on(context: Context, rank: int) -> None:
    if context.rank == rank:
        raise RuntimeError(f"rank {rank} raises on purpose")


def where(context: Context) -> dict[str, int]:
    return {"rank": context.rank, "node": context.node, "pid": os.getpid()}
