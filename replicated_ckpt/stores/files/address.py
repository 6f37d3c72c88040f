"""Where bytes lie in this process's memory."""

import ctypes


def address_of(piece: memoryview) -> int:
    """The address of a writable piece that is not empty."""
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(piece))
