"""`rckpt://`: other readers load the surviving copies through fsspec."""

import shutil
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FsspecReader

from replicated_ckpt import ReplicatedWriter
from replicated_ckpt.errors import CheckpointNotFound, ConfigInvalid, ShardLost
from tests.agent.agents import HOME
from tests.harness.cluster import Cluster, call
from tests.steps import reports

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
    pytest.mark.filterwarnings("ignore::replicated_ckpt.errors.ReplicatedCkptWarning"),
    pytest.mark.timeout(120),
]
SHARD = "__0_0.distcp"


@pytest.fixture(autouse=True)
def _registered() -> None:
    """Registers the file system as the entry point of an installed package does."""
    declared = tomllib.loads((HOME / "pyproject.toml").read_text())["project"]["entry-points"]["fsspec.specs"]
    module, _, name = declared["rckpt"].partition(":")
    fsspec.register_implementation("rckpt", getattr(import_module(module), name), clobber=True)


def save(root: Path) -> dict[str, Any]:
    state = {"x": torch.arange(1 << 20), "text": "t"}
    dcp.save(state, checkpoint_id="run/step-1", storage_writer=ReplicatedWriter(root), no_dist=True)
    return state


def load(url: str, state: dict[str, Any]) -> None:
    dcp.load(state, storage_reader=FsspecReader(url), no_dist=True)


def test_torchs_reader_loads_an_rckpt_url(tmp_path: Path) -> None:
    """Tensors and objects load, files are listed, and writing raises."""
    saved, url = save(tmp_path), f"rckpt://{tmp_path}/run/step-1"
    state: dict[str, Any] = {"x": torch.zeros(1 << 20, dtype=torch.int64), "text": ""}
    load(url, state)
    assert torch.equal(state["x"], saved["x"])
    assert state["text"] == "t"
    fs, path = fsspec.url_to_fs(url)
    assert {Path(name).name for name in fs.ls(path, detail=False)} == {".metadata", SHARD}
    with fsspec.open(f"{url}/{SHARD}") as file:
        raw = file.read()
    assert (tmp_path / "run" / "step-1" / SHARD).read_bytes().startswith(raw)
    assert len(raw) == fs.size(f"{path}/{SHARD}") > 8 << 20
    assert not fs.exists(f"{path}/__7_0.distcp")
    with pytest.raises(OSError, match="read-only"):
        fs.open(f"{path}/{SHARD}", "wb")


def test_a_damaged_byte_is_never_read(tmp_path: Path) -> None:
    """Without another copy the read raises ShardLost, as a load does."""
    save(tmp_path)
    file = tmp_path / "run" / "step-1" / SHARD
    raw = bytearray(file.read_bytes())
    raw[1 << 20] ^= 1
    file.write_bytes(raw)
    with fsspec.open(f"rckpt://{tmp_path}/run/step-1/{SHARD}") as opened, pytest.raises(ShardLost, match=SHARD):
        opened.read()


def test_a_missing_checkpoint_or_store_is_an_error(tmp_path: Path) -> None:
    """An unknown checkpoint raises CheckpointNotFound. A directory outside of any store raises ConfigInvalid."""
    save(tmp_path / "root")
    with pytest.raises(CheckpointNotFound, match="step-9"):
        fsspec.open(f"rckpt://{tmp_path}/root/step-9/.metadata").open()
    with pytest.raises(ConfigInvalid, match="lies in no store"):
        fsspec.open(f"rckpt://{tmp_path}/elsewhere/step-9/.metadata").open()


def test_it_reads_from_a_node_that_survives(tmp_path: Path) -> None:
    """This node has lost its files of the checkpoint: the other node's agent serves the copies."""
    with Cluster(tmp_path / "cluster", 2, quick_exit=True) as cluster:
        cluster.run(call(reports.save_and_load_slowed, slow=0, hows=["none"]), nodes=[0, 1])
        root = cluster.nodes[0].root
        shutil.rmtree(root / "step-0")
        state = {f"rank {rank}": torch.zeros(reports.ELEMENTS, dtype=torch.int64) for rank in range(2)}
        load(f"rckpt://{root}/step-0", state)
        assert all(torch.equal(state[f"rank {rank}"], torch.full((reports.ELEMENTS,), rank)) for rank in range(2))
