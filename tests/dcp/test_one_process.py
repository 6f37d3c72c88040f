"""One process without a process group: a local directory is enough, and no agent is started."""

import errno
import gc
import io
import multiprocessing
import os
import pickle
import re
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import ReadItem

from replicated_ckpt import CheckpointManager, ReplicatedReader, ReplicatedWriter, Retention
from replicated_ckpt.agent.state.endpoint import Endpoint, write_endpoint
from replicated_ckpt.config import Ack
from replicated_ckpt.core.integrity.checksum import BLOCK_BYTES, crc32c
from replicated_ckpt.core.manifest import decode_manifest
from replicated_ckpt.dcp.find.survey import Surveyor
from replicated_ckpt.errors import (
    CheckpointExists,
    CheckpointNotCommitted,
    CheckpointNotFound,
    ConfigInvalid,
    ManifestInvalid,
    ReplicatedCkptError,
    ReplicatedCkptWarning,
    ShardLost,
    StoreFull,
)
from replicated_ckpt.stores.files import durable
from replicated_ckpt.stores.local import shard_file
from replicated_ckpt.stores.local.directories.intent import Intent
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.local.versions.readers import lock_version
from replicated_ckpt.stores.local.versions.remove import retire
from replicated_ckpt.stores.peer.client import AgentAddress
from tests.agent.agents import stop_agent
from tests.agent.checkpoints import replaced_saves
from tests.damage import flip

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore::replicated_ckpt.errors.ReplicatedCkptWarning"),
]


def state(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    return {
        "model": {
            "weight": torch.randn(300, 200),
            "strided": torch.randn(60, 60)[:, ::3],
            "turned": torch.randn(9, 7).t(),
        },
        "small": [torch.tensor(1.5), torch.arange(5, dtype=torch.int16), torch.zeros(0)],
        "half": torch.randn(11, dtype=torch.float32).to(torch.bfloat16),
        "complex": torch.randn(4, dtype=torch.complex64),
        "objects": {"text": "hello", "number": seed, "blob": bytes(range(256)) * 20},
    }


def zeroed(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: zeroed(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [zeroed(value) for value in tree]
    return torch.zeros_like(tree) if isinstance(tree, torch.Tensor) else None


def assert_same(found: Any, wanted: Any) -> None:
    if isinstance(wanted, dict):
        for key in wanted:
            assert_same(found[key], wanted[key])
    elif isinstance(wanted, list):
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)
    elif isinstance(wanted, torch.Tensor):
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)
    else:
        assert found == wanted


def loaded(root: Path, checkpoint_id: str, like: dict[str, Any]) -> dict[str, Any]:
    target: dict[str, Any] = zeroed(like)
    dcp.load(target, checkpoint_id=checkpoint_id, storage_reader=ReplicatedReader(root))
    return target


def the_cause(raised: BaseException) -> ReplicatedCkptError:
    assert isinstance(raised, CheckpointException)
    (error,) = (failure[0] for failure in raised.failures.values())
    assert isinstance(error, ReplicatedCkptError)
    return error


def test_every_kind_of_value_comes_back_bit_for_bit(tmp_path: Path) -> None:
    """Tensors of several dtypes, strides and sizes, and objects, load as saved. Stock torch reads the same directory."""
    dcp.save(state(), checkpoint_id="step-1", storage_writer=ReplicatedWriter(tmp_path))
    assert_same(loaded(tmp_path, "step-1", state()), state())
    stock = zeroed(state())
    dcp.load(stock, storage_reader=dcp.FileSystemReader(tmp_path / "step-1"))
    assert_same(stock, state())
    assert not (tmp_path / ".agent" / "endpoint.json").exists()


def test_views_that_overlap_themselves_come_back_right(tmp_path: Path) -> None:
    """An expanded slice, an offset view and an overlapping strided view load with the values that they show."""
    base = torch.arange(4.0)
    saved = {"one": base[2:3].expand(4), "other": base[3:].expand(4), "step": base.as_strided((2, 2), (0, 1), 2)}
    dcp.save(saved, checkpoint_id="step-1", storage_writer=ReplicatedWriter(tmp_path))
    for reader in (ReplicatedReader(tmp_path), dcp.FileSystemReader(tmp_path / "step-1")):
        found = {name: torch.zeros(tensor.shape) for name, tensor in saved.items()}
        dcp.load(found, checkpoint_id=str(tmp_path / "step-1"), storage_reader=reader)
        assert_same(found, saved)


def test_a_save_with_one_copy_warns_and_counts_one(tmp_path: Path) -> None:
    """Two copies are wanted and only one node takes part: the save warns, and its report counts one copy."""
    writer = ReplicatedWriter(tmp_path)
    with pytest.warns(ReplicatedCkptWarning, match="2 copies are wanted"):
        dcp.save(state(), checkpoint_id="step-1", storage_writer=writer)
    assert writer.last_save is not None
    assert (writer.last_save.copies_wanted, writer.last_save.copies_made) == (2, 1)
    assert_same(loaded(tmp_path, "step-1", state()), state())


def test_the_warning_about_copies_has_one_text_per_root(tmp_path: Path) -> None:
    """The warning about missing copies has the same text for all saves of a root. Python's filter then shows it once."""
    writer = ReplicatedWriter(tmp_path)
    texts = set()
    for number in range(3):
        with pytest.warns(ReplicatedCkptWarning, match="2 copies are wanted") as told:
            dcp.save(state(), checkpoint_id=f"step-{number}", storage_writer=writer)
        texts |= {str(warning.message) for warning in told if "copies are wanted" in str(warning.message)}
    assert len(texts) == 1


def test_latest_is_the_last_one_saved_whatever_its_name_and_time(tmp_path: Path) -> None:
    writer = ReplicatedWriter(tmp_path, copies=1)
    for seed, name in enumerate(["z", "b", "a"]):
        dcp.save(state(seed), checkpoint_id=name, storage_writer=writer)
    os.utime(tmp_path / "z" / ".manifest.json", (4e9, 4e9))
    assert_same(loaded(tmp_path, "latest", state()), state(2))
    assert_same(loaded(tmp_path, "b", state()), state(1))


def test_latest_skips_an_incomplete_checkpoint(tmp_path: Path) -> None:
    """ "latest" skips a checkpoint that lost a shard. A load by its id raises ShardLost with the shard."""
    writer = ReplicatedWriter(tmp_path, copies=1)
    for seed in range(2):
        dcp.save(state(seed), checkpoint_id=f"step-{seed}", storage_writer=writer)
    (tmp_path / "step-1" / "__0_0.distcp").unlink()
    assert_same(loaded(tmp_path, "latest", state()), state(0))
    with pytest.raises(CheckpointException) as raised:
        loaded(tmp_path, "step-1", state())
    error = the_cause(raised.value)
    assert isinstance(error, ShardLost)
    assert error.shards == ("__0_0.distcp",)
    assert str(tmp_path) in str(error)
    assert "rank 0 on node" in str(error)
    (tmp_path / "step-0" / "__0_0.distcp").unlink()
    with pytest.raises(ShardLost, match=r"step-1"):
        loaded(tmp_path, "latest", state())


def test_a_flipped_bit_never_reaches_a_tensor(tmp_path: Path) -> None:
    """A flipped bit in a shard: the load raises ShardLost, and the model's tensors stay unchanged."""
    dcp.save(state(), checkpoint_id="step-1", storage_writer=ReplicatedWriter(tmp_path, copies=1))
    path = tmp_path / "step-1" / "__0_0.distcp"
    flip(path)
    target = zeroed(state())
    with pytest.raises(CheckpointException) as raised:
        dcp.load(target, checkpoint_id="step-1", storage_reader=ReplicatedReader(tmp_path))
    assert isinstance(the_cause(raised.value), ShardLost)
    assert "expected CRC32C" in str(the_cause(raised.value))
    assert_same(target["model"], zeroed(state())["model"])


@pytest.mark.parametrize("name", [".metadata", ".manifest.json"])
def test_damaged_metadata_or_manifest_fails_the_load(tmp_path: Path, name: str) -> None:
    """A flipped bit in `.metadata` or the manifest: the load fails, and the error states the damage."""
    dcp.save(state(), checkpoint_id="step-1", storage_writer=ReplicatedWriter(tmp_path, copies=1))
    path = tmp_path / "step-1" / name
    flip(path)
    with pytest.raises((ShardLost, CheckpointException), match=r"CRC32C|manifest of .*step-1.* is damaged"):
        loaded(tmp_path, "step-1", state())


@pytest.mark.parametrize("field", ["relative_path", "offset", "length"])
def test_metadata_that_contradicts_its_manifest_is_refused(tmp_path: Path, field: str) -> None:
    """`.metadata` places an item beyond the end of its shard, or in an unknown shard: the load raises ManifestInvalid."""
    dcp.save(state(), checkpoint_id="step-1", storage_writer=ReplicatedWriter(tmp_path, copies=1))
    folder = tmp_path / "step-1"
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    info = metadata.storage_data[MetadataIndex("model.weight", torch.Size([0, 0]))]
    setattr(info, field, "__7_0.distcp" if field == "relative_path" else 1 << 40)
    raw = pickle.dumps(metadata)
    manifest = decode_manifest((folder / ".manifest.json").read_bytes(), "here")
    planted = replace(manifest, metadata_bytes=len(raw), metadata_crc32c=crc32c(raw))
    (folder / ".metadata").write_bytes(raw)
    (folder / ".manifest.json").write_bytes(planted.encode())
    with pytest.raises(CheckpointException) as raised:
        loaded(tmp_path, "step-1", state())
    assert isinstance(the_cause(raised.value), ManifestInvalid)


def test_an_existing_id_is_refused_or_replaced(tmp_path: Path) -> None:
    """With overwrite=False the second save fails and the first checkpoint still loads. By default the second save
    replaces the first.
    """
    dcp.save(state(0), checkpoint_id="step-1", storage_writer=ReplicatedWriter(tmp_path, copies=1))
    with pytest.raises(CheckpointException) as raised:
        dcp.save(state(1), checkpoint_id="step-1", storage_writer=ReplicatedWriter(tmp_path, copies=1, overwrite=False))
    assert isinstance(the_cause(raised.value), CheckpointExists)
    assert_same(loaded(tmp_path, "step-1", state()), state(0))
    dcp.save(state(1), checkpoint_id="step-1", storage_writer=ReplicatedWriter(tmp_path, copies=1))
    assert_same(loaded(tmp_path, "step-1", state()), state(1))


@pytest.mark.parametrize("is_sparse", [False, True], ids=["read in place", "read whole"])
def test_a_planner_that_returns_another_shape_is_named(tmp_path: Path, is_sparse: bool) -> None:
    """A planner returns a tensor of the wrong shape: the error names the planner and both shapes. With another planner
    the checkpoint loads.
    """

    class Other(dcp.DefaultLoadPlanner):
        def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
            del read_item
            return torch.zeros(1)

    saved, found = ({"w": torch.full((3,), value)} for value in (1.0, 0.0))
    if is_sparse:
        saved, found = ({"w": each["w"].to_sparse()} for each in (saved, found))
    dcp.save(saved, checkpoint_id="step-1", storage_writer=ReplicatedWriter(tmp_path, copies=1))
    reader = ReplicatedReader(tmp_path)
    with pytest.raises(CheckpointException) as raised:
        dcp.load(found, checkpoint_id="step-1", storage_reader=reader, planner=Other())
    error = the_cause(raised.value)
    assert isinstance(error, ConfigInvalid), error
    assert re.search(r"Other asked for \(3,\) of 'w', but .* shape \(1,\)", error.message)
    assert "disk" not in error.hint
    dcp.load(found, checkpoint_id="step-1", storage_reader=reader)
    assert found["w"].to_dense().tolist() == [1.0] * 3


def test_a_failed_save_leaves_nothing_and_the_old_one_loads(tmp_path: Path) -> None:
    """A planner raises during the write: the save fails and leaves no staged files. The earlier checkpoint still loads."""

    class Failing(dcp.DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> "torch.Tensor | io.BytesIO":
            if "strided" in write_item.index.fqn:
                raise OSError("the planner failed")
            return super().resolve_data(write_item)

    writer = ReplicatedWriter(tmp_path, copies=1, overwrite=True)
    dcp.save(state(0), checkpoint_id="step-1", storage_writer=writer)
    with pytest.raises(CheckpointException, match="the planner failed"):
        dcp.save(state(1), checkpoint_id="step-1", storage_writer=writer, planner=Failing())
    assert list((tmp_path / ".staging").iterdir()) == []
    assert_same(loaded(tmp_path, "step-1", state()), state(0))
    dcp.save(state(2), checkpoint_id="step-1", storage_writer=writer)
    assert_same(loaded(tmp_path, "step-1", state()), state(2))


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP])
@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_a_save_to_a_mount_without_file_modes_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, umask: int
) -> None:
    """A save succeeds on a file system that refuses `fchmod`."""

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fchmod", refuse)
    before = os.umask(umask)
    try:
        dcp.save(state(1), checkpoint_id="step-1", storage_writer=ReplicatedWriter(tmp_path, copies=1))
    finally:
        os.umask(before)
    assert_same(loaded(tmp_path, "step-1", state()), state(1))


def test_a_disk_that_fills_up_is_named_whatever_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk fills up while torch serializes a tensor: the save raises StoreFull with the shard and a hint."""
    real, left = durable.write_vector, [6 << 20]

    def fills_up(fd: int, pieces: Sequence[memoryview]) -> None:
        left[0] -= sum(map(len, pieces))
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(fd, pieces)

    monkeypatch.setattr(shard_file, "write_vector", fills_up)
    sparse, writer = torch.ones(2_000_000).to_sparse(), ReplicatedWriter(tmp_path, direct_io="off")
    with pytest.raises(CheckpointException) as raised:
        dcp.save({"sparse": sparse}, checkpoint_id="step-1", storage_writer=writer)
    error = the_cause(raised.value)
    assert isinstance(error, StoreFull)
    assert error.key == "__0_0.distcp"
    assert "Free space" in str(error)


def test_the_next_save_removes_the_staging_of_a_dead_process(tmp_path: Path) -> None:
    """The staging of a dead process does not count as a checkpoint, and the next save removes it."""
    dcp.save(state(0), checkpoint_id="step-0", storage_writer=ReplicatedWriter(tmp_path, copies=1))
    LocalStore(tmp_path).begin(Intent("a" * 32, "step-1", "dead", overwrite=False))
    with pytest.raises(CheckpointNotCommitted):
        loaded(tmp_path, "step-1", state())
    dcp.save(state(2), checkpoint_id="step-2", storage_writer=ReplicatedWriter(tmp_path, copies=1))
    assert list((tmp_path / ".staging").iterdir()) == []
    assert_same(loaded(tmp_path, "latest", state()), state(2))


def save_and_load_by_itself(root: Path, number: int, start: Barrier) -> None:
    """Saves several checkpoints under its own names, and loads each."""
    start.wait(60)
    for step in range(4):
        saved = {"own": torch.full((100,), number * 100 + step)}
        writer = ReplicatedWriter(root, copies=1)
        dcp.save(saved, checkpoint_id=f"process{number}-{step}", storage_writer=writer)
        assert_same(loaded(root, f"process{number}-{step}", saved), saved)


def test_independent_processes_share_a_store(tmp_path: Path) -> None:
    """Four processes save and load in one store at once, each on its own: none affects the saves of another."""
    forking = multiprocessing.get_context("fork")
    start = forking.Barrier(4)
    processes = [forking.Process(target=save_and_load_by_itself, args=(tmp_path, n, start)) for n in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        process.kill()
    assert [process.exitcode for process in processes] == [0] * 4
    assert list((tmp_path / ".staging").iterdir()) == []


def test_a_lone_process_keeps_a_recent_save_of_the_nodes_agent(tmp_path: Path) -> None:
    """A lone process keeps the staging of a save that the node's agent opened recently, and removes it once it is old."""
    store = LocalStore(tmp_path)
    write_endpoint(store.agent_directory(), Endpoint("0" * 12, "127.0.0.1", 1, "token", 1, "0"))
    store.begin(Intent("a" * 32, "step-1", "alive", overwrite=False))
    dcp.save(state(2), checkpoint_id="step-2", storage_writer=ReplicatedWriter(tmp_path, copies=1))
    assert [intent.save_id for intent in store.list_staged()] == ["a" * 32]
    os.utime(store.intent_path("a" * 32), (0, 0))
    os.utime(store.staging("a" * 32), (0, 0))
    dcp.save(state(3), checkpoint_id="step-3", storage_writer=ReplicatedWriter(tmp_path, copies=1))
    assert store.list_staged() == ()


def test_reset_sets_the_id_for_callers_that_pass_none(tmp_path: Path) -> None:
    """`reset` sets the id of the next save, or of the next loads, for callers that cannot pass `checkpoint_id` to DCP."""
    writer, reader = ReplicatedWriter(tmp_path, copies=1), ReplicatedReader(tmp_path)
    for seed, name in enumerate(("step-1", "step-2")):
        writer.reset(name)
        dcp.save(state(seed), storage_writer=writer)
    for seed, name in enumerate(("step-1", "step-2")):
        target = zeroed(state())
        reader.reset(name)
        dcp.load(target, storage_reader=reader)
        assert_same(target, state(seed))
    with pytest.raises(CheckpointException, match="no checkpoint_id"):
        dcp.save(state(), storage_writer=writer)


def test_a_pickled_writer_keeps_its_arguments(tmp_path: Path) -> None:
    """A pickled writer keeps its arguments and drops its last report. The copy can save."""
    arguments: dict[str, Any] = {"copies": 3, "overwrite": True, "domain": "rack-7"}
    writer = ReplicatedWriter(tmp_path, **arguments)
    dcp.save(state(0), checkpoint_id="step-1", storage_writer=writer)
    sent = pickle.loads(pickle.dumps(writer))
    assert sent.config == writer.config
    assert sent.last_save is None
    dcp.save(state(1), checkpoint_id="step-1", storage_writer=sent)
    assert_same(loaded(tmp_path, "step-1", state()), state(1))


def test_partial_loads_read_only_what_they_need(tmp_path: Path) -> None:
    """A load of one tensor reads only that item and its bytes."""
    dcp.save(state(), checkpoint_id="step-1", storage_writer=ReplicatedWriter(tmp_path, copies=1))
    reader = ReplicatedReader(tmp_path)
    target = {"model": {"weight": torch.zeros(300, 200)}}
    dcp.load(target, checkpoint_id="step-1", storage_reader=reader)
    assert torch.equal(target["model"]["weight"], state()["model"]["weight"])
    assert reader.last_load is not None
    assert reader.last_load.items == 1
    assert 240_000 <= reader.last_load.bytes_local <= 2 * BLOCK_BYTES
    assert reader.last_load.bytes_peer == 0


class RetiringPlanner(dcp.DefaultLoadPlanner):
    """Retires the checkpoint at the first item, as an agent's policy would. `is_gone`: whether that removed it."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self._root = root
        self.is_gone: bool | None = None

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        if self.is_gone is None:
            (found,) = LocalStore(self._root).catalog.holdings("node", "step-1")
            self.is_gone = retire(self._root, "step-1", found.save_id)
        found_tensor: torch.Tensor = super().resolve_tensor(read_item)
        return found_tensor


def test_a_checkpoint_that_is_read_is_not_removed(tmp_path: Path) -> None:
    """A checkpoint is not removed while a rank reads it from its own disk, and can be removed after the load."""
    writer = ReplicatedWriter(tmp_path, copies=1)
    dcp.save({"a": torch.arange(9)}, checkpoint_id="step-1", storage_writer=writer)
    planner, found = RetiringPlanner(tmp_path), {"a": torch.zeros(9, dtype=torch.int64)}
    dcp.load(found, checkpoint_id="step-1", storage_reader=ReplicatedReader(tmp_path), planner=planner)
    assert planner.is_gone is False
    (held,) = LocalStore(tmp_path).catalog.holdings("node", "step-1")
    assert retire(tmp_path, "step-1", held.save_id)


def test_a_version_replaced_during_a_read_is_removed_by_a_later_save(tmp_path: Path) -> None:
    """A process without an agent replaced a checkpoint during a read: its next save after the read removes the old
    version.
    """
    writer, store = ReplicatedWriter(tmp_path, copies=1, overwrite=True), LocalStore(tmp_path)
    state = {"a": torch.arange(9)}
    dcp.save(state, checkpoint_id="last", storage_writer=writer)
    (held,) = store.catalog.holdings("node", "last")
    reading = lock_version(store.catalog, "last", held.save_id)
    assert reading is not None
    dcp.save(state, checkpoint_id="last", storage_writer=writer)
    assert replaced_saves(store) == [held.save_id]
    reading.release()
    dcp.save(state, checkpoint_id="last", storage_writer=writer)
    assert replaced_saves(store) == []


def test_small_values_are_stored_together(tmp_path: Path) -> None:
    """Small values among large tensors are stored together: a load of all of them reads at most one block."""
    names = [f"layer{index}" for index in range(6)]
    large: dict[str, Any] = {f"{name}.weight": torch.full((300_000,), 1.0) for name in names}
    small: dict[str, Any] = {f"{name}.step": torch.tensor(float(index)) for index, name in enumerate(names)}
    state = {key: value for pair in zip(large.items(), small.items(), strict=True) for key, value in pair}
    dcp.save({**state, "lr": 0.5}, checkpoint_id="step-1", storage_writer=ReplicatedWriter(tmp_path, copies=1))
    target: dict[str, Any] = {**{name: torch.zeros(()) for name in small}, "lr": None}
    reader = ReplicatedReader(tmp_path)
    dcp.load(target, checkpoint_id="step-1", storage_reader=reader)
    assert target == {**small, "lr": 0.5}
    assert reader.last_load is not None
    assert reader.last_load.bytes_local <= BLOCK_BYTES
    found = {name: torch.zeros(300_000) for name in large}
    dcp.load(found, checkpoint_id="step-1", storage_reader=reader)
    assert all(torch.equal(found[name], large[name]) for name in large)


def test_a_load_without_a_checkpoint_says_where_it_looked(tmp_path: Path) -> None:
    """Without a checkpoint a load raises CheckpointNotFound with the searched root, and creates nothing."""
    root = tmp_path / "never"
    for asked in ("step-1", "latest"):
        with pytest.raises(CheckpointNotFound, match=str(root)):
            loaded(root, asked, state())
    assert not root.exists()


@pytest.mark.parametrize("given_id", [None, "step-1"])
def test_a_load_after_a_failed_one_searches_again(tmp_path: Path, given_id: str | None) -> None:
    """A load found no checkpoint, and a save then created it: the next load of the same reader finds it."""
    reader, target = ReplicatedReader(tmp_path), zeroed(state())
    reader.reset("step-1")
    with pytest.raises(CheckpointException, match="No checkpoint 'step-1'"):
        dcp.load(target, checkpoint_id=given_id, storage_reader=reader)
    dcp.save(state(), checkpoint_id="step-1", storage_writer=ReplicatedWriter(tmp_path, copies=1))
    dcp.load(target, storage_reader=reader)
    assert_same(target, state())


def test_a_reader_keeps_no_metadata_of_what_it_has_loaded(tmp_path: Path) -> None:
    """After a load the reader holds no checkpoint metadata, which each garbage collection would have to traverse."""

    def count_chunks() -> int:
        gc.collect()
        return sum(type(each) is ChunkStorageMetadata for each in gc.get_objects())

    dcp.save(state(), checkpoint_id="step-1", storage_writer=ReplicatedWriter(tmp_path, copies=1))
    reader, before = ReplicatedReader(tmp_path), count_chunks()
    dcp.load(zeroed(state()), checkpoint_id="step-1", storage_reader=reader)
    assert count_chunks() == before
    assert reader.last_load is not None


def test_latest_and_exists(tmp_path: Path) -> None:
    """`latest` returns None at first, then the newest complete checkpoint. `exists` is true for an incomplete one.
    `latest` raises if all are incomplete.
    """
    reader = ReplicatedReader(tmp_path)
    assert (reader.latest(), reader.exists("step-0")) == (None, False)
    LocalStore(tmp_path).begin(Intent("a" * 32, "step-0", "dead", overwrite=False))
    assert (reader.latest(), reader.exists("step-0")) == (None, False), "a staged save is no checkpoint"
    for seed in range(2):
        dcp.save(state(seed), checkpoint_id=f"step-{seed}", storage_writer=ReplicatedWriter(tmp_path, copies=1))
    assert (reader.latest(), reader.exists(tmp_path / "step-0")) == ("step-1", True)
    (tmp_path / "step-1" / "__0_0.distcp").unlink()
    assert (reader.latest(), reader.exists("step-1")) == ("step-0", True)
    (tmp_path / "step-0" / "__0_0.distcp").unlink()
    with pytest.raises(ShardLost, match="step-1"):
        reader.latest()


def test_an_unreachable_participant_is_listed_as_unreached(tmp_path: Path) -> None:
    """CheckpointNotFound lists an unreachable node that takes part in the load, but not one that is only known from
    before.
    """
    gone = AgentAddress("b" * 12, "127.0.0.1", 9, "token")
    for expected, unreached in (([gone.node_id], 1), ([], 0)):
        with pytest.raises(CheckpointNotFound) as raised:
            Surveyor(LocalStore(tmp_path), "a" * 12, [gone], None, expected).survey("latest")
        assert len(raised.value.unreached) == unreached
        assert len(pickle.loads(pickle.dumps(raised.value)).unreached) == unreached


@pytest.mark.parametrize(
    "arguments",
    [
        {"copies": 0},
        {"copies": 99},
        {"ack": "never"},
        {"ack": "object"},
        {"on_degraded": "ignore"},
        {"checkpoint_id_from": "rank 3"},
        {"domain": ""},
        {"object_store": "bucket/x"},
        {"object_store": "s3://key:secret@bucket/x"},
        {"object_every": 0},
        {"object_every": 2},
        {"storage_options": {"key": "x"}},
        {"overwrite": "false"},
        {"overlap": 1},
        {"retention": 3},
        {"on_save": 3},
    ],
)
def test_arguments_that_cannot_work_are_refused_at_once(tmp_path: Path, arguments: dict[str, Any]) -> None:
    """The writer's constructor raises ConfigInvalid that names the argument, and writes nothing."""
    with pytest.raises(ConfigInvalid, match=next(iter(arguments))):
        ReplicatedWriter(tmp_path / "root", **arguments)
    assert not (tmp_path / "root").exists()


def test_options_may_be_numpy_integers(tmp_path: Path) -> None:
    """Options may be numpy integers. They are stored as int."""
    one: Any = np.int64(1)
    policy = Retention(keep_last=one, keep_every=one)
    with CheckpointManager(tmp_path, every=one, copies=one, object_every=one, retention=policy) as manager:
        manager.save(1, state(1))
        used = manager.last_save
        numbers = (policy.keep_last, policy.keep_every, manager.config.every, used and used.copies_wanted)
        assert [(type(number), number) for number in numbers] == [(int, 1)] * 4
    stop_agent(tmp_path)


@pytest.mark.parametrize("root", [None, 3, "", "~/ckpt", "s3://bucket/x"])
def test_a_root_is_a_directory(root: Any) -> None:
    """The constructor refuses a root that is no path, a URL, or an unexpanded `~`."""
    hint = "os.path.expanduser" if root == "~/ckpt" else "a bucket belongs in object_store="
    with pytest.raises(ConfigInvalid, match=f"root.*{hint}"):
        ReplicatedWriter(root)


@pytest.mark.parametrize(
    "arguments", [{"lineage": 3}, {"storage_options": {"key": "x"}}, {"on_load": 3}, {"trust_pickles": "false"}]
)
def test_a_readers_arguments_that_cannot_work_are_refused(tmp_path: Path, arguments: dict[str, Any]) -> None:
    """The reader's constructor raises ConfigInvalid that names the argument."""
    with pytest.raises(ConfigInvalid, match=next(iter(arguments))):
        ReplicatedReader(tmp_path, **arguments)


def test_a_file_is_no_store(tmp_path: Path) -> None:
    """The root is a file: `latest` and a load raise ConfigInvalid."""
    (tmp_path / "file").write_text("x")
    reader = ReplicatedReader(tmp_path / "file")
    with pytest.raises(ConfigInvalid, match="is a file"):
        reader.latest()
    with pytest.raises(CheckpointException) as raised:
        dcp.load(state(), checkpoint_id="step-1", storage_reader=reader)
    assert isinstance(the_cause(raised.value), ConfigInvalid)


def test_the_directory_above_stores_is_no_store(tmp_path: Path) -> None:
    """The root contains the stores of two nodes: loads and saves are refused, and the stores stay as they are."""
    roots, saved = [tmp_path / "node-0", tmp_path / "node-1"], {"a": torch.ones(2)}
    for root in roots:
        dcp.save(saved, checkpoint_id="step-1", storage_writer=ReplicatedWriter(root))
    reader, writer = ReplicatedReader(tmp_path), ReplicatedWriter(tmp_path)
    with pytest.raises(ConfigInvalid, match="is not a node's store, and holds 2 stores"):
        reader.latest()
    with pytest.raises(CheckpointException, match="holds 2 stores"):
        dcp.load({"a": torch.zeros(2)}, checkpoint_id="latest", storage_reader=reader)
    with pytest.raises(CheckpointException, match="holds 2 stores"):
        dcp.save(saved, checkpoint_id="step-2", storage_writer=writer)
    assert sorted(tmp_path.iterdir()) == roots
    assert all(torch.equal(loaded(root, "latest", saved)["a"], saved["a"]) for root in roots)


@pytest.mark.parametrize(
    ("options", "reached", "beyond"),
    [
        ({"ack": "local"}, ["local"], ["peer-memory", "peer", "object"]),
        ({"ack": "peer"}, ["local", "peer-memory", "peer"], ["object", "never"]),
    ],
    ids=str,
)
def test_a_wait_for_an_unreachable_ack_level_is_refused(
    tmp_path: Path, options: dict[str, Any], reached: list[Ack], beyond: list[Ack]
) -> None:
    """`wait` for an ack level that this writer never reaches raises ConfigInvalid. For any other level it returns."""
    writer = ReplicatedWriter(tmp_path, copies=1, **options)
    dcp.save(state(), checkpoint_id="step-1", storage_writer=writer)
    for level in reached:
        assert set(writer.wait(5, ack=level)) <= {"step-1"}
    for level in beyond:
        with pytest.raises(ConfigInvalid, match="wait"):
            writer.wait(5, ack=level)


@pytest.mark.parametrize("given_id", [None, "../x", "/elsewhere/step-1", ".hidden"])
def test_ids_that_cannot_work_are_refused(tmp_path: Path, given_id: str | None) -> None:
    """A save and a load refuse a missing id, a hidden one, or one outside the root."""
    with pytest.raises(CheckpointException) as raised:
        dcp.save(state(), checkpoint_id=given_id, storage_writer=ReplicatedWriter(tmp_path))
    assert isinstance(the_cause(raised.value), ConfigInvalid)
    # Without an id, DCP does not reset the reader, and quotes the error in its own.
    with pytest.raises((ConfigInvalid, CheckpointException), match="checkpoint_id"):
        dcp.load(state(), checkpoint_id=given_id, storage_reader=ReplicatedReader(tmp_path))


def test_a_save_that_is_never_planned_leaves_no_store(tmp_path: Path) -> None:
    """The writer creates nothing on disk before the ranks plan the save."""
    writer = ReplicatedWriter(tmp_path / "root", copies=1)
    writer.reset("step-1")
    writer.set_up_storage_writer(is_coordinator=True)
    assert not (tmp_path / "root").exists()
