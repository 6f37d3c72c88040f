"""Memory for the window of a conversion: it goes back to the system as soon as it is let go."""

import mmap

import torch

from replicated_ckpt.dcp.tensors.memory import empty_tensor, tensor_over

_MAPPED_BYTES_MIN = 1 << 20


def window_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A contiguous tensor on the CPU that is to be filled.

    Large ones are mapped, not allocated: the C library keeps what is freed below 32 MiB, and later, larger tensors do not
    fit in there, so that a process would hold more than its window.
    """
    count = torch.Size(shape).numel()
    size_bytes = count * dtype.itemsize
    if size_bytes < _MAPPED_BYTES_MIN:
        return empty_tensor(shape, dtype)
    mapped = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # the tensor keeps it
    return tensor_over(memoryview(mapped)[:size_bytes], dtype).view(shape)
