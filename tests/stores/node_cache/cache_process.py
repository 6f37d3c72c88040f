"""Other processes that use caches: `python -m tests.stores.node_cache.cache_process WHAT DIRECTORY ...`."""

import os
import sys
import time
from pathlib import Path

from replicated_ckpt.stores.node_cache.cache import RankCache


def keep_making(directory: Path, seconds: float) -> None:
    """Makes and closes caches. Prints their number, and how many had lost their name."""
    until = time.monotonic() + seconds
    made = lost = 0
    while time.monotonic() < until:
        cache = RankCache.create(directory, 2, 1 << 12)
        made += 1
        lost += not (directory / cache.name).exists()
        cache.close()
    print(made, lost)  # noqa: T201


def hold(directory: Path, pieces: int) -> None:
    """Makes a cache, puts pieces, prints its name, and pulses until it is killed."""
    cache = RankCache.create(directory, 2, 1 << 12)
    cache.reserve(pieces)
    cache.board.pass_pieces(0, 0)
    cache.board.pass_pieces(1, 0)
    for number in range(pieces):
        cache.put_piece(number, memoryview(bytearray([number + 1] * 8)))
    print(cache.name, flush=True)  # noqa: T201
    while True:
        time.sleep(0.05)
        cache.board.pulse(time.monotonic_ns())


if __name__ == "__main__":
    what, directory, argument = sys.argv[1:]
    if what == "keep-making":
        keep_making(Path(directory), float(argument))
    else:
        hold(Path(directory), int(argument))
    os._exit(0)
