"""Staging: a tensor on a device is copied to the host in ordered pieces, at most two at a time."""

import ctypes

import pytest
import torch

from replicated_ckpt.dcp.tensors.tensor_memory import copy_to_host, memory_of

PIECE_BYTES = 1 << 10


def tensors(device: str) -> list[torch.Tensor]:
    base = torch.arange(10_000, dtype=torch.int64, device=device)
    shapes = [base, base[:0], base[:3], base[100:2_000], base[:6_000].reshape(60, 100).T, base[7]]
    return [*shapes, base.bool(), base.to(torch.complex64), base.to(torch.bfloat16)]


def plain_bytes(tensor: torch.Tensor) -> bytes:
    """The elements in memory order."""
    flat = tensor.as_strided((tensor.numel(),), (1,)).clone().cpu()
    return ctypes.string_at(flat.data_ptr(), flat.numel() * flat.element_size())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_pieces_are_the_tensor(device: str) -> None:
    """The pieces together are the tensor's bytes, for any dtype, strides, offset and device."""
    for tensor in tensors(device):
        assert b"".join(bytes(memory_of(piece)) for piece in copy_to_host(tensor, PIECE_BYTES)) == plain_bytes(tensor)


@pytest.mark.gpu
def test_pieces_come_through_pinned_memory() -> None:
    """Pieces from a GPU are in pinned memory, and contain the result of earlier kernels."""
    tensor = torch.zeros(1 << 24, device="cuda")
    for step in range(1, 50):
        tensor.fill_(step)
    pieces = [
        (piece.is_pinned(), bool((piece.view(torch.float32) == 49).all())) for piece in copy_to_host(tensor, 1 << 20)
    ]
    assert pieces == [(True, True)] * 64


def test_two_pieces_at_most_are_on_the_host() -> None:
    """The host memory is that of two pieces, however large the tensor is."""
    places = {piece.data_ptr() for piece in copy_to_host(torch.zeros(1 << 16), PIECE_BYTES)}
    assert len(places) == 2
