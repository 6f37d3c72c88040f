"""Loads from the bucket alone that fail midway: the error has the event in the bucket and the next step."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from replicated_ckpt import ReplicatedReader, ReplicatedWriter
from replicated_ckpt.dcp.load.load_attempt import LoadAttempt
from replicated_ckpt.errors import ShardLost
from replicated_ckpt.stores.bucket.bucket import Bucket
from replicated_ckpt.stores.bucket_client.opening import open_client
from replicated_ckpt.stores.bucket_client.url import ObjectTarget
from tests.buckets.faulty_bucket import Fault, faulty_bucket
from tests.buckets.servers import Server
from tests.marks import long
from tests.object_tier.test_one_node import assert_loads, blank, save

pytestmark = [
    pytest.mark.fault,
    pytest.mark.timeout(100),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


def error_of(reader: ReplicatedReader, checkpoint_id: str = "step-1") -> ShardLost:
    with pytest.raises(CheckpointException) as raised:
        dcp.load(blank(), checkpoint_id=checkpoint_id, storage_reader=reader)
    ((error, _),) = raised.value.failures.values()
    assert isinstance(error, ShardLost)
    return error


def once_before(monkeypatch: pytest.MonkeyPatch, step: str, act: Callable[[], None]) -> None:
    """Runs `act` once, before `step` of the next load."""
    goes_on, acts = getattr(LoadAttempt, step), [act]

    def act_and_go_on(attempt: LoadAttempt, *arguments: Any, **named: Any) -> Any:
        while acts:
            acts.pop()()
        return goes_on(attempt, *arguments, **named)

    monkeypatch.setattr(LoadAttempt, step, act_and_go_on)


@pytest.mark.parametrize("checkpoint_id", ["step-1", long("latest")])
@pytest.mark.parametrize("step", [long("read_metadata"), "read_items"])
def test_a_checkpoint_that_was_overwritten_meanwhile_is_to_be_loaded_again(
    root: Path, where: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch, step: str, checkpoint_id: str
) -> None:
    """Another save replaces the checkpoint during a load: the hint is to load again, and the next load returns the
    replacement.
    """
    writer = ReplicatedWriter(root, overwrite=True, **where)
    for number in (1, 2):
        save(writer, "step-1", number)
        writer.wait()

    def overwrite() -> None:
        save(writer, "step-1", 3)
        writer.wait()

    once_before(monkeypatch, step, overwrite)
    error = error_of(ReplicatedReader(**where), checkpoint_id)
    assert "another job has replaced or removed it there since: save" in str(error)
    assert error.hint == "Load again: the next load finds the replacement."
    assert_loads(ReplicatedReader(**where), checkpoint_id, 3)


def test_a_checkpoint_that_was_removed_meanwhile_is_reported_as_removed(
    root: Path, where: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint is removed during a load, as by retention: the error reports the removal, and the next load of
    `latest` finds a newer one.
    """
    writer = ReplicatedWriter(root, **where)
    save(writer, "step-1", 1)
    writer.wait()

    def remove() -> None:
        save(writer, "step-2", 2)
        writer.wait()
        client = open_client(ObjectTarget.check_supported(where["object_store"], where["storage_options"]))
        bucket = Bucket(client)
        found = bucket.save_of("step-1")
        assert found is not None
        bucket.remove(found)
        client.close()

    once_before(monkeypatch, "read_items", remove)
    error = error_of(ReplicatedReader(**where), "latest")
    assert "since: no checkpoint of that id is there" in str(error)
    assert error.hint.startswith("Load again:")
    assert_loads(ReplicatedReader(**where), "latest", 2)


def test_credentials_that_expire_meanwhile_are_not_a_shard_that_is_lost(
    root: Path, moto: Server, where: Mapping[str, Any]
) -> None:
    """Credentials expire during a load: the hint asks for valid credentials, not for another node."""
    with faulty_bucket(moto) as faulty:
        where = {**where, "storage_options": faulty.storage_options()}
        writer = ReplicatedWriter(root, **where)
        save(writer, "step-1", 1)
        writer.wait()
        faulty.add(Fault("status", method="GET", key="distcp", skip=1, status=400, code="ExpiredToken"))
        error = error_of(ReplicatedReader(**where))
        assert "the object store: not reached (read 'step-1/__0_0.distcp'" in str(error)
        assert "ExpiredToken" in str(error)
        assert error.hint.startswith("Check that the object store answers and accepts the credentials, and load again")
        faulty.clear()
        assert_loads(ReplicatedReader(**where), "step-1", 1)
