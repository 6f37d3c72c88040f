"""Memory that a GPU writes to by itself, at the speed of its bus: pages that stay in place, registered with CUDA once."""

import contextlib
import os
import weakref
from typing import Any

import torch

from replicated_ckpt.stores.files.address import address_of

_PORTABLE = 1
"""For every GPU of this process: `cudaHostRegisterPortable` of the CUDA runtime API."""


class PinnedPages:
    """All pages of a piece of memory, until `free` or the end of this object: before the memory moves or goes."""

    def __init__(self, memory: memoryview) -> None:
        """Raises MemoryError: the system or the driver refuses, and the memory is as it was."""
        address = address_of(memory)
        code = int(_cudart().cudaHostRegister(address, len(memory), _PORTABLE))
        if code != 0:
            _clear_error()
            raise MemoryError(f"CUDA does not pin {len(memory):,} bytes of memory: error {code}")
        self._memory = memory  # it is not unmapped before the finalizer has run
        self.free = weakref.finalize(self, _unregister, os.getpid(), address)
        self.free.atexit = False


def _unregister(pid: int, address: int) -> None:
    """In a process that was forked they are its parent's."""
    if os.getpid() == pid:
        _cudart().cudaHostUnregister(address)


def _clear_error() -> None:
    """CUDA keeps the last error for what asks next, which would be a kernel of the training."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
