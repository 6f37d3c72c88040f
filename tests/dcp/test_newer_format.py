"""A checkpoint in a newer format than this version reads is not reported as absent, nor skipped without a warning."""

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from replicated_ckpt import ManifestVersionUnknown, ReplicatedReader, ReplicatedWriter, Retention
from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.cli.main import main
from replicated_ckpt.core.commit_mark import MAGIC, MARK_BYTES
from replicated_ckpt.core.integrity.checksum import crc32c
from replicated_ckpt.core.layout import MANIFEST_NAME
from replicated_ckpt.core.manifest import Manifest
from replicated_ckpt.core.upkeep.marks import NO_MARKS
from replicated_ckpt.dcp.find.survey import Surveyor
from replicated_ckpt.node.uploads.bucket_retention import retire_in_bucket
from replicated_ckpt.stores.bucket.bucket import Bucket
from replicated_ckpt.stores.bucket.inspection import BucketInspector
from replicated_ckpt.stores.bucket_client.opening import open_client
from replicated_ckpt.stores.bucket_client.url import ObjectTarget
from replicated_ckpt.stores.local.store import LocalStore
from tests.agent.agents import running_agent
from tests.agent.checkpoints import METADATA, checkpointed, shard
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
def test_a_newer_format_is_not_reported_as_absent(tmp_path: Path, checkpoint_id: str) -> None:
    """After a downgrade, a load and a look-up raise ManifestVersionUnknown, so that the job does not start from
    scratch.
    """
    save(tmp_path, 1.0)
    make_newer(tmp_path / "step-1" / MANIFEST_NAME)
    reader = ReplicatedReader(tmp_path, no_dist=True)
    with pytest.raises(ManifestVersionUnknown, match="'step-1'"):
        dcp.load({"w": torch.zeros(8)}, checkpoint_id=checkpoint_id, storage_reader=reader, no_dist=True)
    with pytest.raises(ManifestVersionUnknown, match="'step-1'"):
        reader.exists("step-1") if checkpoint_id == "step-1" else reader.latest()


def test_latest_logs_the_checkpoint_that_it_skips(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """ "latest" loads the newest readable checkpoint, and the log names the newer one."""
    save(tmp_path, 1.0, 2.0)
    make_newer(tmp_path / "step-2" / MANIFEST_NAME)
    state = {"w": torch.zeros(8)}
    with caplog.at_level(logging.WARNING):
        dcp.load(state, checkpoint_id="latest", storage_reader=ReplicatedReader(tmp_path), no_dist=True)
    assert torch.equal(state["w"], torch.ones(8))
    assert [text for text in caplog.messages if "'step-2'" in text and "newer" in text]


@pytest.mark.parametrize("checkpoint_id", ["step-1", "latest"])
def test_a_newer_format_on_a_peer_is_not_reported_as_absent(tmp_path: Path, checkpoint_id: str) -> None:
    """A blank node finds a newer format on a peer: the survey raises ManifestVersionUnknown."""
    here, there = LocalStore(tmp_path / "here"), LocalStore(tmp_path / "there")
    checkpointed([there], 1, {shard(0): [0]}, copies=1)
    make_newer(there.root / "step-1" / MANIFEST_NAME)
    with running_agent(there.root) as known:
        peer = known.endpoint.address("127.0.0.1")
        with pytest.raises(ManifestVersionUnknown, match="'step-1' in node"):
            Surveyor(here, here.node_id(), [peer]).survey(checkpoint_id)


def commit_newer(bucket: Bucket, manifest: Manifest, what: str, scratch: Path) -> None:
    """Commits a save to the bucket. `what` is in a newer format: its manifest or its mark."""
    scratch.write_bytes(manifest.encode())
    if what == "manifest":
        make_newer(scratch)
    bucket.commit(manifest, scratch.read_bytes(), METADATA)
    if what == "mark":
        key = f"{manifest.checkpoint_id}/.metadata"
        raw = bucket.small(key, len(METADATA) + MARK_BYTES)[:-4].replace(MAGIC, MAGIC[:-1] + b"9")
        bucket.client.put(key, raw + crc32c(raw[len(METADATA) :]).to_bytes(4, "little"))


@pytest.mark.parametrize("what", ["manifest", "mark"])
def test_a_newer_format_in_a_bucket_is_neither_damaged_nor_retired(
    tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A newer format in a bucket: a load raises ManifestVersionUnknown, `verify` lists the checkpoint as not checked,
    and retention keeps it.
    """
    (tmp_path / "bucket").mkdir()
    bucket = Bucket(open_client(ObjectTarget.check_supported(f"file://{tmp_path}/bucket", None)))
    manifest = checkpointed([LocalStore(tmp_path / "node")], 1, {shard(0): [0]}, copies=1)
    commit_newer(bucket, manifest, what, tmp_path / "manifest")
    for checkpoint_id in ("step-1", "latest"):
        with pytest.raises(ManifestVersionUnknown, match="'step-1' in file:"):
            Surveyor(LocalStore(tmp_path / "blank"), "a" * 12, [], bucket).survey(checkpoint_id)
    inspector = BucketInspector(bucket)
    assert not [*inspector.inspect()]
    assert (inspector.checkpoint_ids, inspector.newer) == ([], ["step-1"])
    code = main(["verify", "--root", str(tmp_path / "node"), "--object-store", f"file://{tmp_path}/bucket"])
    assert code == ExitCode.FAILED
    assert "not checked: step-1 in file://" in capsys.readouterr().out
    newest = replace(manifest, checkpoint_id="step-2", save_id="2" * 32, sequence=2)
    bucket.commit(newest, newest.encode(), METADATA)
    policy = SimpleNamespace(retention=Retention(keep_last=1), revision=9)
    marks = SimpleNamespace(read=lambda: NO_MARKS)
    service: Any = SimpleNamespace(policies=SimpleNamespace(of=lambda *_: policy), marks=marks)
    retire_in_bucket(service, bucket, newest)
    assert {save.checkpoint_id for save in bucket.saves()} == {"step-1", "step-2"}
