"""The bucket's policy drops the optimizer of older checkpoints: loads afterwards, and after an interruption."""

import itertools
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException

from replicated_ckpt import OptimizerDropped, ReplicatedReader, ReplicatedWriter, Retention, failpoints
from replicated_ckpt.cli.main import main
from replicated_ckpt.core.parts import Part, part_of_shard
from replicated_ckpt.stores.bucket.bucket import SLIM_MANIFEST_NAME, Bucket
from replicated_ckpt.stores.bucket.bucket_removal import slim_in_bucket
from replicated_ckpt.stores.bucket.inspection import BucketInspector
from replicated_ckpt.stores.bucket_client.opening import open_client
from replicated_ckpt.stores.bucket_client.url import ObjectTarget
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.local.versions.remove import slim
from tests.agent.agents import HOME, stop_agent, wait_for
from tests.dcp.load.test_dropped import check_weights, error_of, state
from tests.marks import mark_long

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def bucket_at(url: str) -> Bucket:
    return Bucket(open_client(ObjectTarget.check_supported(url, None)))


def with_optimizer(bucket: Bucket) -> list[str]:
    """The checkpoints whose optimizer is in the bucket."""
    return sorted(
        save.checkpoint_id
        for save in bucket.saves()
        if any(part_of_shard(name) is Part.OPTIMIZER for name in save.sizes)
    )


def check_intact(bucket: Bucket) -> None:
    assert list(BucketInspector(bucket).inspect()) == []


def save(root: Path, steps: range, url: str, **options: Any) -> None:
    writer = ReplicatedWriter(root, copies=1, object_store=url, **options)
    for step in steps:
        dcp.save(state(step), checkpoint_id=f"step-{step}", storage_writer=writer)
        writer.wait()


def load_weights(reader: Any, **named: Any) -> dict[str, Any]:
    found = {name: value for name, value in state(7).items() if name != "optim"}
    dcp.load(found, storage_reader=reader, **named)
    return found


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_bucket_keeps_the_weights(root: Path, tmp_path: Path, *, overwrite: bool) -> None:
    """The bucket drops older checkpoints' optimizers, also below a save's own prefix. The node keeps them, and a new
    agent does not upload them again.
    """
    url = f"file://{tmp_path}/bucket"
    (tmp_path / "bucket").mkdir()
    if overwrite:
        save(root, range(1, 2), url)
    save(root, range(1, 4), url, overwrite=overwrite, object_retention=Retention(keep_last=9, full_last=1))
    bucket = bucket_at(url)
    wait_for(lambda: with_optimizer(bucket) == ["step-3"], 20, "only step-3 with its optimizer")
    check_intact(bucket)
    alone = ReplicatedReader(object_store=url, expect_partial=True)
    for step in (1, 2, 3):
        check_weights(load_weights(alone, checkpoint_id=f"step-{step}"), step)
        check_weights(load_weights(FileSystemReader(tmp_path / "bucket" / f"step-{step}"), no_dist=True), step)
    with pytest.raises(CheckpointException) as failed:
        dcp.load(state(7), checkpoint_id="step-1", storage_reader=alone)
    error = error_of(failed.value)
    assert isinstance(error, OptimizerDropped)
    both = ReplicatedReader(root, object_store=url)
    found = state(7)
    dcp.load(found, checkpoint_id="step-1", storage_reader=both)  # the node has the optimizer
    assert torch.equal(found["optim"]["state"]["weight"]["exp_avg"], state(1)["optim"]["state"]["weight"]["exp_avg"])
    stop_agent(root)
    save(root, range(4, 5), url, object_retention=Retention(keep_last=9, full_last=1))
    wait_for(lambda: with_optimizer(bucket) == ["step-4"], 20, "only step-4 with its optimizer")
    check_intact(bucket)


def test_the_node_keeps_the_weights(root: Path, tmp_path: Path) -> None:
    """The node has dropped an optimizer that the bucket still has: a load reads the optimizer from the bucket."""
    url = f"file://{tmp_path}/bucket"
    (tmp_path / "bucket").mkdir()
    save(root, range(1, 3), url, retention=Retention(keep_last=9, full_last=1))
    wait_for(lambda: LocalStore(root).catalog.manifest("step-1").is_slim, 20, "the weights of step-1 alone")
    stop_agent(root)
    found = state(7)
    dcp.load(found, checkpoint_id="step-1", storage_reader=ReplicatedReader(root, object_store=url))
    assert torch.equal(found["optim"]["state"]["weight"]["exp_avg"], state(1)["optim"]["state"]["weight"]["exp_avg"])
    check_weights(found, 1)
    save(root, range(3, 4), url)
    assert with_optimizer(bucket_at(url)) == ["step-1", "step-2", "step-3"]
    check_intact(bucket_at(url))


def test_an_interruption_leaves_one_or_the_other(root: Path, tmp_path: Path) -> None:
    """After an interruption the weights are committed and intact. The next try removes the optimizer, and a removal
    leaves no file.
    """
    url = f"file://{tmp_path}/bucket"
    (tmp_path / "bucket").mkdir()
    save(root, range(1, 2), url)
    bucket, manifest = bucket_at(url), LocalStore(root).catalog.manifest("step-1")

    def fail(name: str) -> None:
        raise failpoints.FailpointReached(name)

    with failpoints.arm("upload.slim-marked", fail), pytest.raises(failpoints.FailpointReached):
        slim_in_bucket(bucket, "step-1", manifest.save_id)
    assert with_optimizer(bucket) == ["step-1"]
    check_intact(bucket)
    check_weights(load_weights(ReplicatedReader(object_store=url, expect_partial=True), checkpoint_id="latest"), 1)
    assert slim_in_bucket(bucket, "step-1", manifest.save_id)
    assert with_optimizer(bucket) == []
    assert not (tmp_path / "bucket" / "step-1" / SLIM_MANIFEST_NAME).exists()
    check_intact(bucket)
    assert not slim_in_bucket(bucket, "step-1", "0" * 32)
    there = bucket.save_of("step-1")
    assert there is not None
    bucket.remove(there)
    assert not list((tmp_path / "bucket").rglob("*.*"))


SLIM = """
import sys
from replicated_ckpt.stores.bucket.bucket import Bucket
from replicated_ckpt.stores.bucket.bucket_removal import slim_in_bucket
from replicated_ckpt.stores.bucket_client.opening import open_client
from replicated_ckpt.stores.bucket_client.url import ObjectTarget
bucket = Bucket(open_client(ObjectTarget.check_supported(sys.argv[1], None)))
saves = list(bucket.saves())
print("begun", flush=True)
for save in saves:
    slim_in_bucket(bucket, save.checkpoint_id, save.save_id)
"""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kills", mark_long([3, 200], keep=[3]))
def test_kills_while_the_bucket_is_slimmed(tmp_path: Path, kills: int) -> None:
    """After SIGKILL at random moments every checkpoint's weights load, and later tries remove the rest of each
    optimizer.
    """
    drawn, done, steps = random.Random(kills), 0, range(1, 7)
    environment = {**os.environ, "PYTHONPATH": str(HOME)}
    for number in itertools.count():
        if done >= kills:
            break
        root, folder = tmp_path / f"node{number}", tmp_path / f"bucket{number}"
        folder.mkdir()
        url = f"file://{folder}"
        save(root, steps, url)
        stop_agent(root)
        bucket, is_over = bucket_at(url), False
        while not is_over:
            words = [sys.executable, "-c", SLIM, url]
            with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                assert process.stdout.readline() == "begun\n"
                time.sleep(drawn.uniform(0.0, 0.05))
                is_over = process.poll() == 0
                process.kill()
            done += not is_over
            check_intact(bucket)
            for step in (steps[0], steps[-1]):
                check_weights(load_weights(FileSystemReader(folder / f"step-{step}"), no_dist=True), step)
        assert with_optimizer(bucket) == []


def test_a_slimmed_save_is_uploaded(root: Path, tmp_path: Path) -> None:
    """`upload` of a checkpoint whose optimizer the node has dropped: the bucket has the weights, intact."""
    url = f"file://{tmp_path}/bucket"
    (tmp_path / "bucket").mkdir()
    writer = ReplicatedWriter(root, copies=1)
    dcp.save(state(1), checkpoint_id="step-1", storage_writer=writer)
    manifest = LocalStore(root).catalog.manifest("step-1")
    assert slim(root, "step-1", manifest.save_id)
    assert main(["upload", "step-1", "--root", str(root), "--to", url]) == 0
    check_intact(bucket_at(url))
    check_weights(load_weights(ReplicatedReader(object_store=url, expect_partial=True), checkpoint_id="step-1"), 1)
    check_weights(load_weights(FileSystemReader(tmp_path / "bucket" / "step-1"), no_dist=True), 1)
