"""Export of a checkpoint of stock torch, which has no manifest, and no checksums but those of its zip containers."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from replicated_ckpt import export_checkpoint
from replicated_ckpt.dcp.convert import items_source
from replicated_ckpt.errors import ReplicatedCkptWarning, ShardLost
from tests.damage import flip

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch")


def stock(root: Path) -> dict[str, torch.Tensor]:
    state = {f"layer{index}": torch.randn(300, 50 + index) for index in range(4)}
    dcp.save(dict(state), storage_writer=dcp.FileSystemWriter(root / "step-1"))
    return state


def test_a_stock_checkpoint_is_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All values are exported, although the export reads items in pieces."""
    monkeypatch.setattr(items_source, "PIECE_BYTES", 4096)
    state = stock(tmp_path / "root")
    with pytest.warns(ReplicatedCkptWarning, match="stock torch wrote it"):
        export_checkpoint("step-1", tmp_path / "model.pt", format="torch", root=tmp_path / "root")
    found = torch.load(tmp_path / "model.pt")
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


def test_a_flipped_bit_is_not_exported(tmp_path: Path) -> None:
    """The CRC32 of the zip container detects it, and nothing is written."""
    stock(tmp_path / "root")
    shard = tmp_path / "root" / "step-1" / "__0_0.distcp"
    flip(shard)
    with pytest.warns(ReplicatedCkptWarning), pytest.raises(ShardLost, match="__0_0"):
        export_checkpoint("step-1", tmp_path / "model.pt", format="torch", root=tmp_path / "root")
    assert not (tmp_path / "model.pt").exists()
