"""A checkpoint that a newer version of the package wrote is not said to be absent, nor passed over in silence."""

import logging
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from replicated_ckpt import ManifestVersionUnknown, ReplicatedReader, ReplicatedWriter
from replicated_ckpt.core.layout import MANIFEST_NAME
from tests.damage import make_newer

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore::replicated_ckpt.errors.ReplicatedCkptWarning"),
]


def save(root: Path, *values: float) -> None:
    for value in values:
        state = {"w": torch.full((8,), value)}
        dcp.save(state, checkpoint_id=f"step-{value:.0f}", storage_writer=ReplicatedWriter(root), no_dist=True)


@pytest.mark.parametrize("checkpoint_id", ["step-1", "latest"])
def test_it_is_no_absence(tmp_path: Path, checkpoint_id: str) -> None:
    """A job that is started with the older version again does not take it for a first start."""
    save(tmp_path, 1.0)
    make_newer(tmp_path / "step-1" / MANIFEST_NAME)
    reader = ReplicatedReader(tmp_path, no_dist=True)
    with pytest.raises(ManifestVersionUnknown, match="'step-1'"):
        dcp.load({"w": torch.zeros(8)}, checkpoint_id=checkpoint_id, storage_reader=reader, no_dist=True)
    with pytest.raises(ManifestVersionUnknown, match="'step-1'"):
        reader.exists("step-1") if checkpoint_id == "step-1" else reader.latest()


def test_latest_says_what_it_passes_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The newest that can be read is loaded."""
    save(tmp_path, 1.0, 2.0)
    make_newer(tmp_path / "step-2" / MANIFEST_NAME)
    state = {"w": torch.zeros(8)}
    with caplog.at_level(logging.WARNING):
        dcp.load(state, checkpoint_id="latest", storage_reader=ReplicatedReader(tmp_path), no_dist=True)
    assert torch.equal(state["w"], torch.ones(8))
    assert [text for text in caplog.messages if "'step-2'" in text and "newer" in text]
