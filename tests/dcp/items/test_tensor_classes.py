"""Tensors of a user's class: the save warns, the load fails with a line of code that allows the class, and after that
line they load.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from replicated_ckpt import ReplicatedReader, ReplicatedWriter
from replicated_ckpt.dcp.objects import weights_only
from replicated_ckpt.errors import ObjectUnsafe, ReplicatedCkptWarning

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
LINE = f"`import {__name__}; torch.serialization.add_safe_globals([{__name__}.Scaled])`"


class Scaled(torch.Tensor):
    """A tensor subclass, as of a quantization library."""


class Named(torch.nn.Parameter):
    """A subclass of Parameter is saved as a plain tensor."""


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name in ("_seen", "_warned"):
        monkeypatch.setattr(weights_only, name, set())
    before = torch.serialization.get_safe_globals()
    state = {"scaled": torch.arange(5.0).as_subclass(Scaled), "named": Named(torch.ones(3))}
    with pytest.warns(ReplicatedCkptWarning, match="'scaled' in this checkpoint will not be loaded") as warned:
        dcp.save(state, checkpoint_id="step-1", storage_writer=ReplicatedWriter(tmp_path, copies=1), no_dist=True)
    assert [LINE in str(one.message) for one in warned if one.category is ReplicatedCkptWarning] == [True]
    yield tmp_path
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(before)


def load(root: Path, *, trust_pickles: bool = False) -> torch.Tensor:
    state = {"scaled": torch.zeros(5), "named": torch.zeros(3)}
    reader = ReplicatedReader(root, trust_pickles=trust_pickles)
    dcp.load(state, checkpoint_id="step-1", storage_reader=reader, no_dist=True)
    assert torch.equal(state["named"], torch.ones(3))
    return state["scaled"]


def test_a_class_that_nothing_allows_is_named(saved: Path) -> None:
    """The load raises ObjectUnsafe with the entry, and the hint has the line that allows the class. After that line the
    tensor loads.
    """
    with pytest.raises(CheckpointException) as raised:
        load(saved)
    error = raised.value.failures[0][0]
    assert isinstance(error, ObjectUnsafe)
    assert "'scaled' in shard __0_0.distcp" in error.message
    assert LINE in str(error.hint)
    torch.serialization.add_safe_globals([Scaled])
    assert torch.equal(load(saved), torch.arange(5.0))


def test_trusted_pickles_are_loaded(saved: Path) -> None:
    assert torch.equal(load(saved, trust_pickles=True), torch.arange(5.0))


def test_an_entry_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """A meta tensor, and a tensor of a local class, fail the save. The error names the entry."""

    class Local(torch.Tensor):
        pass

    said = {
        "is on the meta device": torch.empty(3, device="meta"),
        "The entry": torch.ones(3).as_subclass(Local),
    }
    for text, odd in said.items():
        state = {"model": {"odd": odd, "even": torch.ones(3)}, "none": torch.empty(0, device="meta")}
        with pytest.raises(CheckpointException, match=rf"(?s)'model.odd' {text}|{text} 'model.odd'"):
            dcp.save(state, checkpoint_id="step-1", storage_writer=ReplicatedWriter(tmp_path, copies=1), no_dist=True)
    assert not (tmp_path / "step-1").exists()


@pytest.mark.parametrize(
    ("saved", "held"),
    [
        (torch.eye(3).to_sparse(), torch.zeros(3, 3).to_sparse()),
        (torch.eye(3).to_sparse(), torch.ones(3, 3).to_sparse().requires_grad_()),
        (
            torch.quantize_per_tensor(torch.ones(3), 0.1, 3, torch.qint8),
            torch.quantize_per_tensor(torch.zeros(3), 0.5, 0, torch.qint8),
        ),
    ],
    ids=["sparse", "sparse, trained", "quantized"],
)
def test_indices_and_scales_load_in_place(tmp_path: Path, saved: torch.Tensor, held: torch.Tensor) -> None:
    """Sparse indices and quantization scales load in place. Torch sets them on the target of a copy itself, not on its
    views.
    """
    dcp.save({"t": saved}, checkpoint_id="step-1", storage_writer=ReplicatedWriter(tmp_path, copies=1), no_dist=True)
    state = {"t": held}
    with torch.device("meta"):  # the load does not create tensors on torch's default device
        dcp.load(state, checkpoint_id="step-1", storage_reader=ReplicatedReader(tmp_path), no_dist=True)
    assert state["t"] is held
    found = held.detach()
    assert (found.dequantize() if found.is_quantized else found.to_dense()).tolist() == (
        saved.dequantize() if saved.is_quantized else saved.to_dense()
    ).tolist()
