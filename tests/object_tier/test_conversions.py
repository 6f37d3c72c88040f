"""Export and import with a bucket: from the bucket alone, into the bucket, and beside it."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

from replicated_ckpt import ReplicatedReader, ReplicatedWriter, export_checkpoint, import_checkpoint
from replicated_ckpt.cli.main import main
from replicated_ckpt.errors import ConfigInvalid, StoreError
from tests.agent.agents import stop_agent
from tests.buckets.servers import Server
from tests.convert.states import assert_equal, blank, contents

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def uploaded(root: Path, where: Mapping[str, Any]) -> dict[str, Any]:
    """Saves, uploads, and removes the node's store. Returns the saved state."""
    state = contents()
    state["large"] = state["large"][:2, :70_000].clone()  # moto reads a whole object for each range
    writer = ReplicatedWriter(root, copies=1, **where)
    dcp.save(state, checkpoint_id="step-1", storage_writer=writer)
    writer.wait()
    stop_agent(root)
    shutil.rmtree(root)
    return state


@pytest.mark.long
def test_a_bucket_alone_is_enough(root: Path, where: Mapping[str, Any], tmp_path: Path) -> None:
    """Without a node, export writes a local file and, in each format, into the bucket. It leaves no temporary object,
    and replaces no export.
    """
    state = uploaded(root, where)
    export_checkpoint("latest", tmp_path / "m.pth", format="torch", **where)
    assert_equal(torch.load(tmp_path / "m.pth"), state)
    bucket = where["object_store"].removesuffix("/runs/one")
    options = {**where, "to_options": where["storage_options"]}
    export_checkpoint("step-1", f"{bucket}/out/m.pth", format="torch", **options)
    export_checkpoint("step-1", f"{bucket}/out/hf", format="safetensors", shard_size_limit=300, **options)
    with pytest.raises(ConfigInvalid, match="exists"):
        export_checkpoint("step-1", f"{bucket}/out/hf", format="safetensors", **options)
    import s3fs

    there = s3fs.S3FileSystem(**where["storage_options"], skip_instance_cache=True, use_listings_cache=False)
    out = f"{bucket}/out"
    with there.open(f"{out}/m.pth") as file:
        assert_equal(torch.load(file), state)
    assert sorted(name.rpartition("/")[2] for name in there.ls(out)) == ["hf", "m.pth"]
    there.get(f"{out}/hf", str(tmp_path / "hf"), recursive=True)
    import_checkpoint(tmp_path / "hf", "step-2", format="safetensors", root=root, copies=1)
    state = {"large": state["large"], "model.0.weight": state["model"]["0.weight"]}
    loaded = blank(state)
    dcp.load(loaded, checkpoint_id="step-2", storage_reader=ReplicatedReader(root, expect_partial=True))
    assert_equal(loaded, state)


def test_an_import_goes_to_the_bucket(root: Path, where: Mapping[str, Any], tmp_path: Path) -> None:
    """When `import_checkpoint` returns, the checkpoint is committed in the bucket."""
    torch.save({"a": torch.arange(9)}, tmp_path / "m.pth")
    import_checkpoint(tmp_path / "m.pth", "step-1", format="torch", root=root, copies=1, **where)
    stop_agent(root)
    shutil.rmtree(root)
    state = {"a": torch.zeros(9, dtype=torch.int64)}
    dcp.load(state, checkpoint_id="step-1", storage_reader=ReplicatedReader(**where))
    assert state["a"].tolist() == list(range(9))


def test_credentials_come_from_the_environment(
    where: Mapping[str, Any], moto: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment's credentials serve the bucket that is read and the one that is written. No message contains
    them.
    """
    dcp.save(
        {"a": torch.arange(9)},
        storage_writer=FsspecWriter(f"{where['object_store']}/theirs", **where["storage_options"]),
    )
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", moto.key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", moto.secret)
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto.endpoint_url)
    command = ["export", "theirs", "--to", "torch", str(tmp_path / "m.pth"), "--object-store", where["object_store"]]
    assert main(command) == 0
    assert torch.load(tmp_path / "m.pth")["a"].tolist() == list(range(9))
    with pytest.raises(StoreError, match="nobody-has-this-one") as raised:
        export_checkpoint("theirs", "s3://nobody-has-this-one/m.pth", format="torch", **where)
    assert moto.secret not in str(raised.value)
