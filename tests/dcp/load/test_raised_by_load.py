"""Errors of `dcp.load` before its first step are caught by handlers for stock's exceptions and by handlers for this
package's.
"""

import pickle
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from replicated_ckpt import ReplicatedReader, ReplicatedWriter
from replicated_ckpt.dcp.c10d.picklable_error import pack_error, unpack_error
from replicated_ckpt.dcp.runtime.user_code import as_checkpoint_exception
from replicated_ckpt.errors import CheckpointNotFound, ConfigInvalid, ShardLost
from replicated_ckpt.stores.local.versions.readers import is_read
from tests.stopwatch import Stopwatch

pytestmark = [
    pytest.mark.filterwarnings("ignore:`load_state_dict` is deprecated"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore::replicated_ckpt.errors.ReplicatedCkptWarning"),
]
AT_ONCE_S = 5.0


def test_a_missing_checkpoint_is_caught_as_stocks_and_as_ours(tmp_path: Path) -> None:
    """`except CheckpointException` and `except CheckpointNotFound` both catch the error. `failures` contains the
    package's error with its hint.
    """
    state = {"a": torch.zeros(2)}
    with pytest.raises(CheckpointException) as stock:
        dcp.load(dict(state), checkpoint_id=str(tmp_path / "none"))
    assert set(stock.value.failures) == {0}
    for kind in (CheckpointException, CheckpointNotFound):
        with pytest.raises(kind, match=r"step-1.*Hint") as caught:
            dcp.load(dict(state), checkpoint_id="step-1", storage_reader=ReplicatedReader(tmp_path))
        assert isinstance(caught.value, CheckpointException)
        ((rank, (error, trace)),) = caught.value.failures.items()
        assert (rank, type(error), bool(trace)) == (0, CheckpointNotFound, True)


def test_an_error_of_both_classes_survives_pickle_and_post() -> None:
    """The combined error keeps its classes, message and attributes through pickle. A rank posts it as the package's
    plain error.
    """
    plain = ShardLost("step-1", {"__0_0.distcp": "node-a"}, ["node-b"])
    both = as_checkpoint_exception(plain, 3)
    assert as_checkpoint_exception(both, 4) is both
    for error in (both, pickle.loads(pickle.dumps(both))):
        assert isinstance(error, ShardLost)
        assert isinstance(error, CheckpointException)
        assert (str(error), error.shards, error.hint) == (str(plain), plain.shards, plain.hint)
        assert {rank: str(one) for rank, (one, _) in error.failures.items()} == {3: str(plain)}
    assert type(unpack_error(pack_error(both))) is ShardLost


def test_a_load_without_an_id_ends_at_once_with_one_error(tmp_path: Path, stopwatch: Stopwatch) -> None:
    """A load without an id fails at once, and the hint explains how to pass one. The deprecated call does the same."""
    dcp.save({"a": torch.ones(2)}, checkpoint_id="step-1", storage_writer=ReplicatedWriter(tmp_path))
    for load in (dcp.load, partial(dcp.load_state_dict, no_dist=True)):
        started = stopwatch.now()
        with pytest.raises(CheckpointException) as caught:
            load({"a": torch.zeros(2)}, storage_reader=ReplicatedReader(tmp_path))
        assert stopwatch.now() - started < AT_ONCE_S
        ((error, _),) = caught.value.failures.values()
        assert isinstance(error, ConfigInvalid)
        assert "no checkpoint_id" in error.message
        assert "dcp.load(..., checkpoint_id=" in error.hint
        assert 'reader.reset("step-10")' in error.hint


def test_metadata_is_read_by_one_rank_of_a_running_group(tmp_path: Path, stopwatch: Stopwatch) -> None:
    """Outside a load, `read_metadata` on one rank does not wait for the other rank."""
    dcp.save({"a": torch.ones(2)}, checkpoint_id="step-1", storage_writer=ReplicatedWriter(tmp_path))
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
    try:
        started = stopwatch.now()
        reader = ReplicatedReader(tmp_path)
        reader.reset("step-1")
        assert set(reader.read_metadata().state_dict_metadata) == {"a"}
        assert stopwatch.now() - started < AT_ONCE_S
    finally:
        dist.destroy_process_group()


def test_a_load_that_fails_while_it_plans_keeps_nothing(tmp_path: Path) -> None:
    """After a load failed in planning, retention may remove the checkpoint, although the reader and the error still
    exist.
    """
    dcp.save({"a": torch.ones(2)}, checkpoint_id="step-1", storage_writer=ReplicatedWriter(tmp_path))
    (tmp_path / "step-1" / "__0_0.distcp").unlink()
    reader = ReplicatedReader(tmp_path)
    with pytest.raises(CheckpointException, match="no intact copy") as caught:
        dcp.load({"a": torch.zeros(2)}, checkpoint_id="step-1", storage_reader=reader)
    assert isinstance(caught.value.failures[0][0], ShardLost)
    assert not is_read(tmp_path / "step-1" / ".manifest.json")
    assert reader.last_load is None
