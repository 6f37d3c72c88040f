"""The trial of conditional writes at the first use of a bucket: whether one of several concurrent writers succeeds."""

import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
import torch.distributed.checkpoint as dcp

from replicated_ckpt import ReplicatedWriter
from replicated_ckpt.errors import ReplicatedCkptWarning
from replicated_ckpt.stores.bucket_client.directory import DirectoryClient
from replicated_ckpt.stores.bucket_client.opening import TRIED_NAME, WRITERS, Trial, open_client, try_conditions
from replicated_ckpt.stores.bucket_client.url import ObjectTarget
from replicated_ckpt.testing.memory import MemoryClient
from tests.agent.agents import stop_agent, wait_for
from tests.buckets.servers import Server
from tests.buckets.weak import WeakStore

TARGET = ObjectTarget("memory://bucket/run")


class LateClient(MemoryClient):
    """Checks a condition first and writes later, as SeaweedFS did (its issue 8800): all of several writers succeed."""

    def put_over(self, key: str, data: bytes, version: str) -> bool:
        if self.version(key) != version:
            return False
        time.sleep(0.05)
        self.put(key, data)
        return True


def test_writers_that_all_succeed_are_counted_once() -> None:
    """The trial counts the successful writers and names the bucket. Once the bucket has its outcome, no client tries
    again.
    """
    client = LateClient(TARGET)
    trial = try_conditions(client)
    assert trial is not None
    assert 1 < trial.created <= WRITERS == trial.writers
    assert f"to {TARGET.url} do not exclude each other: of 8 writers" in trial.describe_weakness(TARGET.url)
    trial.keep(client)
    assert client.objects.keys() == {TRIED_NAME}
    assert try_conditions(client) is None


def check_exclusion(server: Server) -> None:
    bucket = server.make_bucket(f"b-{uuid4().hex[:12]}")
    client = open_client(ObjectTarget.check_supported(f"s3://{bucket}/run", server.storage_options()))
    trial = try_conditions(client)
    assert trial == Trial(WRITERS, created=1, replaced=1)
    assert not trial.describe_weakness(client.target.url)
    assert not client.list_keys("").sizes


def test_one_of_several_writers_succeeds(moto: Server) -> None:
    """On a server that enforces conditions, the trial finds no weakness and leaves no object."""
    check_exclusion(moto)


def test_one_of_several_writers_succeeds_on_a_real_server(radosgw: Server) -> None:
    """The same on Ceph, which refuses a concurrent writer and a later one with different codes."""
    check_exclusion(radosgw)


def test_a_directory_is_not_tried(tmp_path: Path) -> None:
    """A `file://` bucket has no conditional writes: the trial is skipped, and writes no file."""
    assert try_conditions(DirectoryClient(ObjectTarget(f"file://{tmp_path}/bucket"))) is None
    assert not list(tmp_path.iterdir())


@pytest.fixture
def roots(tmp_path: Path) -> Iterator[list[Path]]:
    """Two nodes' stores; their agents end with the test."""
    found = [tmp_path / "one", tmp_path / "two"]
    yield found
    for root in found:
        stop_agent(root)


def save_and_record(root: Path, checkpoint_id: str, **where: Any) -> list[str]:
    """Saves in this process. Returns the warnings about conditional writes."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ReplicatedCkptWarning)
        writer = ReplicatedWriter(root, copies=1, **where)
        dcp.save({"x": torch.ones(3)}, checkpoint_id=checkpoint_id, storage_writer=writer)
    return [str(one.message) for one in caught if "conditional writes" in str(one.message)]


@pytest.mark.fault
def test_the_first_save_to_a_weak_bucket_warns_once(weak_store: WeakStore, roots: list[Path]) -> None:
    """Rank 0's first save warns and names the bucket. Saves after an agent's restart or from another node do not warn."""
    url = f"s3://{weak_store.make_bucket('weak')}/run"
    where = {"object_store": url, "storage_options": weak_store.storage_options()}
    warned: list[str] = []
    for step in range(5):  # on a machine under load, the first answer can be late
        if warned := save_and_record(roots[0], f"step-{step}", **where):
            break
    (said,) = warned
    assert f"conditional writes to {url} do not exclude each other: of 8 writers at once, 8 created" in said
    wait_for(lambda: f"run/{TRIED_NAME}" in weak_store.objects_by_bucket["weak"], 30, "the outcome in the bucket")
    stop_agent(roots[0])
    assert not save_and_record(roots[0], "step-10", **where)
    assert not save_and_record(roots[1], "step-11", **where)
