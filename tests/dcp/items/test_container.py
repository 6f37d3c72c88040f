"""The container format: stock torch reads what this package writes, and the reverse. The fast path from a template
gives the same result as torch.
"""

import io
import mmap
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replicated_ckpt.dcp.tensors import container
from replicated_ckpt.dcp.tensors.container import TEMPLATE_BYTES_MAX, TensorReader, data_range, learn_envelope
from replicated_ckpt.dcp.tensors.item_writer import TensorWriter
from replicated_ckpt.dcp.tensors.tensor_memory import empty_tensor
from replicated_ckpt.errors import StoreFull

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
]
DTYPES.append(torch.float8_e4m3fn)


class Stream(io.BytesIO):
    """Keeps all data, and records the memory that `refer` was given."""

    def __init__(self) -> None:
        super().__init__()
        self.position = 0
        self.referred: list[memoryview] = []

    def refer(self, data: memoryview) -> None:
        self.referred.append(data)
        self.write(data)


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    elements = torch.Size(shape).numel()
    raw = torch.randint(0, 2 if dtype == torch.bool else 100, (elements * dtype.itemsize,), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    as_bytes = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (found, wanted)]
    return found.dtype == wanted.dtype and found.shape == wanted.shape and torch.equal(*as_bytes)


def written(writer: TensorWriter, tensor: torch.Tensor) -> memoryview:
    stream = Stream()
    writer.write_tensor(tensor, stream)
    return memoryview(bytearray(stream.getvalue()))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=4))
def test_any_tensor_is_exchanged_with_stock_torch(dtype: torch.dtype, shape: list[int]) -> None:
    """The first tensor of a kind, written by torch, and later ones, written from the template, load with stock torch
    and with this package.
    """
    writer, reader = TensorWriter(), TensorReader()
    for _ in range(3):
        tensor = random_tensor(dtype, tuple(shape))
        raw = written(writer, tensor)
        assert same(torch.load(io.BytesIO(raw), weights_only=True), tensor)
        assert same(reader.read_tensor(raw), tensor)
        stock = io.BytesIO()
        torch.save(tensor, stock)
        assert same(reader.read_tensor(memoryview(bytearray(stock.getvalue()))), tensor)


class FullStream(Stream):
    """Has room for a number of bytes, then raises StoreFull."""

    def __init__(self, room_bytes: int) -> None:
        super().__init__()
        self._room_bytes = room_bytes

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > self._room_bytes:
            raise StoreFull("/nvme/ckpt", "write", "__0_0.distcp")
        return super().write(data)


def test_an_error_of_the_stream_reaches_the_caller() -> None:
    """The stream's StoreFull reaches the caller wherever it occurs. Torch, which writes a sparse tensor, would raise
    its own error.
    """
    tensor = torch.eye(300).to_sparse()
    size_bytes = len(written(TensorWriter(), tensor))
    for room_bytes in range(0, size_bytes, 500):
        with pytest.raises(StoreFull, match=r"__0_0\.distcp"):
            TensorWriter().write_tensor(tensor, FullStream(room_bytes))


@pytest.mark.parametrize("permuted", [(1, 0, 2), (2, 1, 0), (0, 2, 1)])
def test_strides_are_kept(permuted: tuple[int, ...]) -> None:
    """A permuted tensor is written in its memory order and loads equal."""
    writer, reader = TensorWriter(), TensorReader()
    for seed in range(3):
        tensor = (torch.arange(24) + seed).reshape(2, 3, 4).permute(permuted)
        raw = written(writer, tensor)
        assert torch.equal(reader.read_tensor(raw), tensor)
        assert torch.equal(torch.load(io.BytesIO(raw), weights_only=True), tensor)


def test_stock_containers_of_views_are_read_right() -> None:
    """Stock torch's container of a view with an offset or an overlap loads right: the fast path does not apply."""
    reader = TensorReader()
    for value in (2, 3, 1):
        for tensor in (torch.arange(4.0)[value : value + 1].expand(4), torch.arange(8.0)[value : value + 4]):
            stock = io.BytesIO()
            torch.save(tensor, stock)
            assert torch.equal(reader.read_tensor(memoryview(bytearray(stock.getvalue()))), tensor)
            assert torch.equal(reader.read_tensor(written(TensorWriter(), tensor)), tensor)


def test_kinds_of_one_size_are_not_mistaken_for_each_other() -> None:
    """Tensors of one byte size but different dtypes or shapes load with their own."""
    writer, reader = TensorWriter(), TensorReader()
    tensors = [
        torch.zeros(4, 6),
        torch.zeros(6, 4),
        torch.zeros(24),
        torch.zeros(24, dtype=torch.int32),
        torch.zeros(12, dtype=torch.int64),
    ]
    for _ in range(2):
        for tensor in tensors:
            assert same(reader.read_tensor(written(writer, tensor)), tensor)


@pytest.mark.parametrize("shift", [0, 1, 3])
def test_data_at_any_address_is_read(shift: int) -> None:
    """A container at an unaligned address is copied, then read."""
    writer, reader = TensorWriter(), TensorReader()
    tensor = torch.arange(100, dtype=torch.int64)
    for _ in range(2):
        raw = written(writer, tensor)
        buffer = memoryview(bytearray(len(raw) + shift))
        buffer[shift:] = raw
        assert torch.equal(reader.read_tensor(buffer[shift:]), tensor)


@pytest.mark.parametrize("tensor", [torch.randn(4, dtype=torch.complex64).conj(), torch.randn(3, 3).to_sparse()])
def test_unusual_tensors_go_through_torch(tensor: torch.Tensor) -> None:
    """A lazy conjugate and a sparse tensor are written by torch."""
    found = TensorReader().read_tensor(written(TensorWriter(), tensor))
    assert torch.equal(
        found.to_dense() if found.is_sparse else found, tensor.to_dense() if tensor.is_sparse else tensor
    )


@pytest.mark.parametrize("elements", [1, TEMPLATE_BYTES_MAX // 8, TEMPLATE_BYTES_MAX // 8 + 1])
def test_a_tensor_is_not_copied(elements: int) -> None:
    """The stream gets a reference to the tensor's own memory, also for a slice of a larger storage."""
    tensor = torch.arange(elements + 9)[5:-4]
    stream = Stream()
    TensorWriter().write_tensor(tensor, stream)
    (memory,) = stream.referred
    assert len(memory) == elements * 8
    tensor += 1
    assert memory[:8].cast("q")[0] == 6, "the reference is to the tensor's own memory"
    assert same(TensorReader().read_tensor(written(TensorWriter(), tensor)), tensor)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_a_model_tensor_takes_no_memory() -> None:
    """The model tensor takes no memory, also in torch's deterministic mode, which fills empty tensors."""
    elements = 1 << 24
    torch.set_deterministic_debug_mode("warn")
    try:
        before = resident_bytes()
        model = empty_tensor((elements,), torch.float32, (1,))
    finally:
        torch.set_deterministic_debug_mode("default")
    assert resident_bytes() - before < elements
    assert model.shape == (elements,)


def test_an_envelope_does_not_depend_on_the_models_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The envelope of a kind is the same whatever the model's memory contains. Torch adds data that looks like the end
    of a record to its serialization ID.
    """

    def model_in_used_memory(shape: tuple[int, ...], dtype: torch.dtype, stride: tuple[int, ...]) -> torch.Tensor:
        model = empty_tensor(shape, dtype, stride)
        model.copy_(torch.frombuffer(bytearray(b"PK\x07\x08" * model.numel()), dtype=dtype).view(shape))
        return model

    for elements in (600, TEMPLATE_BYTES_MAX):
        kind = (torch.float32, (elements,), (1,))
        learned = learn_envelope(*kind)
        monkeypatch.setattr(container, "empty_tensor", model_in_used_memory)
        assert learned == learn_envelope(*kind)
        monkeypatch.undo()


def test_a_tensor_with_gaps_is_written_without_them() -> None:
    """Some columns of a matrix are written without the other columns."""
    for width in (4, TEMPLATE_BYTES_MAX):
        tensor = torch.arange(2.0 * width).reshape(2, width).T[: width // 2]
        raw = written(TensorWriter(), tensor)
        assert len(raw) < 4 * width + 4096
        assert torch.equal(torch.load(io.BytesIO(raw), weights_only=True), tensor)


@pytest.mark.parametrize("value", [{"a": 1}, [torch.ones(2)], "text"])
def test_other_objects_are_no_tensor(value: Any) -> None:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    with pytest.raises((ValueError, pickle.UnpicklingError)):
        TensorReader().read_tensor(memoryview(bytearray(buffer.getvalue())))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=400))
def test_random_bytes_are_no_container(raw: bytes) -> None:
    """Random bytes raise ValueError in the parser."""
    with pytest.raises(ValueError, match=r"zip|container"):
        data_range(memoryview(raw))
