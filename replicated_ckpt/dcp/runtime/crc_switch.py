"""The switch of `torch.save` for the CRC32 in its zip containers. It is global to the process, so one lock guards it."""

import contextlib
import threading
from collections.abc import Iterator

import torch

_lock = threading.Lock()


@contextlib.contextmanager
def without_crc32() -> Iterator[None]:
    """`torch.save` computes no CRC32 in the block, which should be short: it is so for every thread."""
    with _lock:
        was = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            yield
        finally:
            torch.serialization.set_crc32_options(was)
