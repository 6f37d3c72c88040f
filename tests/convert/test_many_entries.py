"""Conversions of many entries: each entry is read once, together with its neighbours, and looked up once."""

from pathlib import Path
from typing import Any

import pytest
import torch

from replicated_ckpt import ReplicatedReader, export_checkpoint, import_checkpoint
from replicated_ckpt.cli.main import main
from replicated_ckpt.dcp.convert import source
from replicated_ckpt.dcp.convert.source import Progress
from tests.convert.states import assert_equal, checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
LAYERS = 12


def layers() -> dict[str, Any]:
    """Layers with a large tensor, a small one and a number each."""
    state: dict[str, Any] = {}
    for n in range(LAYERS):
        state[f"layer{n}"] = {"weight": torch.full((1 << 16,), n), "bias": torch.full((9,), n), "step": n}
    return state


def reads_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Records the number of ranges of each read of a checkpoint."""
    counts: list[int] = []
    read_data = ReplicatedReader.read_data

    def counted(self: ReplicatedReader, plan: Any, planner: Any) -> Any:
        counts.append(len(plan.items))
        return read_data(self, plan, planner)

    monkeypatch.setattr(ReplicatedReader, "read_data", counted)
    return counts


def test_each_entry_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries are read window by window, in the order of the shard. The progress ends at 100 %."""
    monkeypatch.setattr(source, "WINDOW_BYTES", 2 << 20)  # four layers
    state, progress = layers(), list[Progress]()
    torch.save(state, tmp_path / "model.pth")
    root = tmp_path / "root"
    import_checkpoint(tmp_path / "model.pth", "step-1", format="torch", root=root, copies=1, progress=progress.append)
    assert main(["verify", "step-1", "--root", str(root)]) == 0
    assert [each.step for each in progress].count("verifying") == 1
    assert max(each.done_bytes for each in progress) == progress[-1].total_bytes
    reads = reads_of(monkeypatch)
    for format_ in ("torch", "dcp"):
        export_checkpoint("step-1", tmp_path / format_, format=format_, root=root, progress=progress.append)
        assert max(each.done_bytes for each in progress) == progress[-1].total_bytes
    assert_equal(torch.load(tmp_path / "torch"), state)
    assert sum(reads) == 2 * 3 * LAYERS
    assert len(reads) <= 2 * 5, "too many reads, such as one for each object"


def test_the_keys_that_are_left_out_are_found_in_one_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The set of all keys is built once, not once for each key."""
    checkpoint(tmp_path / "root", layers())
    looks: list[str] = []
    look = source.Contents.__getattribute__

    def counted(self: source.Contents, name: str) -> Any:
        looks.append(name)
        return look(self, name)

    monkeypatch.setattr(source.Contents, "__getattribute__", counted)
    done = export_checkpoint("step-1", tmp_path / "model", format="safetensors", root=tmp_path / "root")
    assert done.skipped == tuple(f"layer{n}.step" for n in range(LAYERS))
    assert looks.count("order") < LAYERS
