"""A tensor's memory as bytes, without numpy, which torch does not need."""

import ctypes

import torch


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, writable; valid only while the tensor is."""
    assert tensor.is_contiguous(), "only what lies in one piece can be seen as bytes"
    size_bytes = tensor.numel() * tensor.itemsize
    if size_bytes == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * size_bytes).from_address(tensor.data_ptr())).cast("B")
