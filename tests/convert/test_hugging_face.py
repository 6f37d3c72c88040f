"""Torch's storage for Hugging Face files and this package read each other's files, and refuse the parts of a single
rank.
"""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys as load_by_names

from replicated_ckpt import ReplicatedReader, export_checkpoint, import_checkpoint
from replicated_ckpt.errors import ConfigInvalid
from tests.convert.states import blank, checkpoint

save_file = pytest.importorskip("safetensors.torch").save_file
if not hasattr(dcp, "HuggingFaceStorageWriter"):  # public from torch 2.8 on
    pytest.skip("this torch has no public storage for Hugging Face files", allow_module_level=True)
pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*1 node:replicated_ckpt.errors.ReplicatedCkptWarning"),
]

DISTRIBUTED = {"save_distributed": True}
writes_distributed = pytest.mark.skipif(
    not DISTRIBUTED.keys() <= inspect.signature(dcp.HuggingFaceStorageWriter).parameters.keys(),
    reason="this torch writes Hugging Face files only whole",  # 2.8
)


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(11)
    return {"layer.weight": torch.randn(6, 3), "layer.bias": torch.randn(6).bfloat16(), "emb": torch.randn(5, 2)}


def save_with_torch(state: dict[str, Any], folder: Path, **options: Any) -> None:
    dcp.save(dict(state), storage_writer=dcp.HuggingFaceStorageWriter(str(folder), **options), no_dist=True)


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


@pytest.mark.parametrize("shard_size_limit", [1 << 30, 50])
def test_torch_reads_what_we_export(tmp_path: Path, shard_size_limit: int) -> None:
    """HuggingFaceStorageReader reads the output of `--to safetensors`, of one file or several."""
    state = checkpoint(tmp_path / "root", weights())
    export_checkpoint(
        "step-1", tmp_path / "hf", format="safetensors", root=tmp_path / "root", shard_size_limit=shard_size_limit
    )
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) == (1 if shard_size_limit > 100 else 3)
    found = blank(state)
    dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path / "hf")), no_dist=True)
    assert_same(found, state)


@pytest.mark.parametrize(
    "options", [{}, pytest.param(DISTRIBUTED | {"enable_consolidation": True}, marks=writes_distributed)]
)
def test_we_import_what_torch_writes(tmp_path: Path, options: dict[str, Any]) -> None:
    """A checkpoint of HuggingFaceStorageWriter, whole or consolidated, is imported and loads."""
    state = weights()
    save_with_torch(state, tmp_path / "hf", **options)
    import_checkpoint(tmp_path / "hf", "step-7", format="safetensors", root=tmp_path / "root", copies=1)
    found = blank(state)
    dcp.load(found, checkpoint_id="step-7", storage_reader=ReplicatedReader(tmp_path / "root"), no_dist=True)
    assert_same(found, state)


@writes_distributed
@pytest.mark.parametrize("is_renamed", [False, True])
def test_the_file_of_one_rank_is_refused(tmp_path: Path, is_renamed: bool) -> None:
    """The error names the file of a single rank, and the option that consolidates the ranks' files."""
    save_with_torch(weights(), tmp_path / "hf", **DISTRIBUTED)
    (written,) = (tmp_path / "hf").iterdir()
    if is_renamed:  # only the offsets show that the file is a part
        raw = written.read_bytes().replace(rb"\"saved_offsets\": [0, 0]", rb"\"saved_offsets\": [3, 0]")
        written.unlink()
        written = written.with_name("model.safetensors")
        written.write_bytes(raw)
    with pytest.raises(ConfigInvalid, match="one rank's parts") as raised:
        import_checkpoint(tmp_path / "hf", "step-7", format="safetensors", root=tmp_path / "root", copies=1)
    assert str(written) in str(raised.value)
    assert "enable_consolidation" in raised.value.hint
    assert not (tmp_path / "root" / "step-7").exists()


def test_keys_are_loaded_without_a_state_dict(tmp_path: Path) -> None:
    """`_load_state_dict_from_keys` loads everything, or the named keys, without a state dict to load into."""
    state = checkpoint(tmp_path / "root", weights())
    root = tmp_path / "root"
    assert_same(load_by_names(storage_reader=ReplicatedReader(root), checkpoint_id="step-1"), state)
    reader = ReplicatedReader(root, expect_partial=True)
    some = load_by_names({"emb"}, storage_reader=reader, checkpoint_id="step-1")
    assert_same(some, {"emb": state["emb"]})


class Tied(torch.nn.Module):
    """A model whose output layer shares its weight with the embedding, like many language models."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 3)
        self.lm_head = torch.nn.Linear(3, 7, bias=False)
        self.lm_head.weight = self.embed.weight


def test_a_missing_name_of_a_tied_weight(tmp_path: Path) -> None:
    """`save_pretrained` writes one of the two names. A load of both raises for the missing one, or fills both with a
    partial load.
    """
    saved, loaded = Tied(), Tied()
    save_file({"embed.weight": saved.embed.weight.detach().clone()}, tmp_path / "model.safetensors")
    import_checkpoint(tmp_path / "model.safetensors", "step-0", format="safetensors", root=tmp_path / "root", copies=1)
    reader = ReplicatedReader(tmp_path / "root")
    with pytest.raises(CheckpointException, match=r"Missing key in checkpoint state_dict: lm_head\.weight"):
        dcp.load(loaded.state_dict(), checkpoint_id="step-0", storage_reader=reader, no_dist=True)
    planner = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(loaded.state_dict(), checkpoint_id="step-0", storage_reader=reader, planner=planner, no_dist=True)
    assert torch.equal(loaded.lm_head.weight, saved.lm_head.weight)
    assert loaded.lm_head.weight is loaded.embed.weight
