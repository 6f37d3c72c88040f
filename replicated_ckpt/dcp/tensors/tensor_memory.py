"""A tensor's memory as bytes, and bytes as a tensor, without numpy, which torch does not need."""

import ctypes
import mmap
from contextlib import nullcontext

import torch

_MAPPED_BYTES_MIN = 1 << 20
_NUMBERS_BY_NAME = {  # torch removes these types one by one
    "qint8": torch.int8,
    "quint8": torch.uint8,
    "qint32": torch.int32,
    "quint4x2": torch.uint8,
    "quint2x4": torch.uint8,
}
_NUMBERS = {getattr(torch, name): numbers for name, numbers in _NUMBERS_BY_NAME.items() if hasattr(torch, name)}
"""torch makes tensors of these types without a scale, and crashes when they are used: here they are seen as numbers."""


def empty_tensor(shape: tuple[int, ...], dtype: torch.dtype, stride: tuple[int, ...] | None = None) -> torch.Tensor:
    """A tensor on the CPU that consists only of elements. It is to be filled or, with a `stride`, never touched.

    Under `use_deterministic_algorithms`, torch fills the memory of `torch.empty`, so all of it would be allocated.
    """
    numbers = _NUMBERS.get(dtype, dtype)
    if stride is None:
        return torch.empty(shape, dtype=numbers, device="cpu").view(dtype)
    elements = 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    memory = torch.UntypedStorage(elements * dtype.itemsize, device="cpu")  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=numbers, device="cpu").set_(memory, 0, shape, stride).view(dtype)


def tensor_over(raw: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """The elements that lie in `raw`, without a copy."""
    return torch.frombuffer(raw, dtype=_NUMBERS.get(dtype, dtype)).view(dtype)


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, writable; they live as long as the view does."""
    # The address alone would read beyond a view's elements, or in another order.
    assert tensor.is_contiguous(), "only what lies in one piece and in order can be seen as bytes"
    size_bytes = tensor.numel() * tensor.itemsize
    if size_bytes == 0:
        return memoryview(b"")
    memory = (ctypes.c_ubyte * size_bytes).from_address(tensor.data_ptr())
    memory.owner = tensor  # type: ignore[attr-defined]  # ctypes holds the address only: this keeps the memory alive
    return memoryview(memory).cast("B")


def copy_into(target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool = False) -> None:
    """Copies in place, without autograd; a tensor made in inference mode can be changed only in that mode."""
    is_inference = target.is_inference()
    # Entered only where it changes something: it costs more than the copy of a small tensor.
    mode = nullcontext() if is_inference == torch.is_inference_mode_enabled() else torch.inference_mode(is_inference)
    with mode, torch.no_grad():  # in this order: the first one turns grad on again
        target.copy_(source, non_blocking=non_blocking)


def window_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A contiguous tensor for the window of a conversion: its memory returns to the system as soon as it is freed.

    Large ones are mapped, not allocated: the C library keeps freed blocks below 32 MiB. Later, larger tensors do not fit
    in there, and the process would hold more than its window.
    """
    count = torch.Size(shape).numel()
    size_bytes = count * dtype.itemsize
    if size_bytes < _MAPPED_BYTES_MIN:
        return empty_tensor(shape, dtype)
    mapped = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # the tensor keeps it
    return tensor_over(memoryview(mapped)[:size_bytes], dtype).view(shape)
