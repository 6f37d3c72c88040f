"""Every dtype of torch: the package saves and loads what stock torch saves and loads."""

import io
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException

from replicated_ckpt import ReplicatedReader, ReplicatedWriter
from replicated_ckpt.dcp.tensors.item_writer import TensorWriter
from tests.dcp.items.test_container import Stream

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions.*"),
    pytest.mark.filterwarnings("ignore::replicated_ckpt.errors.ReplicatedCkptWarning"),
]
DTYPES = sorted((found for found in vars(torch).values() if isinstance(found, torch.dtype)), key=str)
SMALL, LARGE = 256, 3 << 20  # within one window, and across several


def numbers_as(dtype: torch.dtype, size_bytes: int, *, fill: int | None = None) -> torch.Tensor:
    raw = torch.randint(0, 2 if dtype == torch.bool else 255, (size_bytes,), dtype=torch.uint8)
    return (raw if fill is None else torch.full_like(raw, fill)).view(dtype)


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.view(torch.uint8).tolist())


def is_saved(tensor: torch.Tensor, writer: ReplicatedWriter | FileSystemWriter) -> bool:
    try:
        dcp.save({"t": tensor}, checkpoint_id="a", storage_writer=writer)
    except (CheckpointException, RuntimeError, TypeError):
        return False
    return True


def loaded(target: torch.Tensor, reader: ReplicatedReader | FileSystemReader) -> bytes | None:
    try:
        dcp.load({"t": target}, checkpoint_id="a", storage_reader=reader)
    except (CheckpointException, RuntimeError, TypeError):
        return None
    return bits(target)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_that_stock_saves_are_saved_and_load(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each dtype the package saves if and only if stock saves. It loads the same bits, or fails where stock fails,
    too.
    """
    monkeypatch.chdir(tmp_path)
    tensor = numbers_as(dtype, SMALL)
    stock = is_saved(tensor, FileSystemWriter("a"))
    assert is_saved(tensor, ReplicatedWriter(tmp_path / "ours")) == stock
    if stock:
        by_stock = loaded(numbers_as(dtype, SMALL, fill=0), FileSystemReader("a"))
        by_ours = loaded(numbers_as(dtype, SMALL, fill=0), ReplicatedReader(tmp_path / "ours"))
        assert by_ours == bits(tensor) or (by_ours, by_stock) == (None, None)


@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8, torch.qint32], ids=str)
@pytest.mark.parametrize("size_bytes", [SMALL, LARGE])
def test_numbers_viewed_as_quantized_load_into_quantized_tensors(
    dtype: torch.dtype, size_bytes: int, tmp_path: Path
) -> None:
    """Stock saves a `tensor.view(torch.qint8)` but cannot load it. The package does both, and its container loads with
    stock torch.
    """
    tensor = numbers_as(dtype, size_bytes)
    dcp.save({"t": tensor}, checkpoint_id="a", storage_writer=ReplicatedWriter(tmp_path))
    assert loaded(numbers_as(dtype, size_bytes, fill=0), ReplicatedReader(tmp_path)) == bits(tensor)
    stream, stock = Stream(), io.BytesIO()
    TensorWriter().write_tensor(tensor, stream)
    torch.save(tensor, stock)
    ours = torch.load(io.BytesIO(stream.getvalue()), weights_only=True)
    assert ours.dtype == torch.load(io.BytesIO(stock.getvalue()), weights_only=True).dtype == dtype
    assert bytes(ours.int_repr().view(torch.uint8).tolist()) == bits(tensor)


def test_numbers_without_a_scale_do_not_load_into_a_quantized_tensor(tmp_path: Path) -> None:
    """Numbers saved without a scale do not load into a quantized tensor with a scale. The load fails, as with stock,
    and the target stays unchanged.
    """
    dcp.save({"t": numbers_as(torch.qint8, SMALL)}, checkpoint_id="a", storage_writer=ReplicatedWriter(tmp_path))
    target = torch.quantize_per_tensor(torch.zeros(SMALL), 0.5, 0, torch.qint8)
    with pytest.raises(CheckpointException, match="uantized"):
        dcp.load({"t": target}, checkpoint_id="a", storage_reader=ReplicatedReader(tmp_path))
    assert not target.int_repr().any()
