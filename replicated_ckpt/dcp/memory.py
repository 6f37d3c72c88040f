"""A tensor's memory as bytes, without numpy, which torch does not need."""

import ctypes

import torch


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, writable; they live as long as the view does."""
    assert tensor.is_contiguous(), "only what lies in one piece and in order can be seen as bytes"
    size_bytes = tensor.numel() * tensor.itemsize
    if size_bytes == 0:
        return memoryview(b"")
    memory = (ctypes.c_ubyte * size_bytes).from_address(tensor.data_ptr())
    memory.owner = tensor  # type: ignore[attr-defined]  # ctypes knows the address only
    return memoryview(memory).cast("B")
