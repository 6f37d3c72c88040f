"""SIGTERM as Ctrl-C, for verbs that clean up behind them."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


@contextmanager
def stop_on_sigterm() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does, so that what was half written is removed."""

    def interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    # Slurm and Kubernetes end a job by SIGTERM, whose default would leave half-written output behind.
    was = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, was)
