"""A warning points at the user's line: the file and line that called DCP or this package."""

import concurrent.futures
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import replicated_ckpt
from replicated_ckpt import CheckpointManager, ReplicatedReader, ReplicatedWriter, errors
from replicated_ckpt.errors import ReplicatedCkptWarning

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
]


def line_of(marker: str) -> int:
    """The number of the line of this file that ends with this marker."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    (number,) = [index for index, line in enumerate(lines, 1) if line.endswith(f"# <- {marker}")]
    return number


def caught(recorded: "pytest.WarningsRecorder") -> list[tuple[str, int]]:
    """File and line of each of this package's warnings."""
    return [(one.filename, one.lineno) for one in recorded if one.category is ReplicatedCkptWarning]


def test_a_saves_warning_is_at_the_line_that_saves(tmp_path: Path) -> None:
    """The warning about missing copies points at the call of `dcp.save`."""
    writer = ReplicatedWriter(tmp_path)
    with pytest.warns(ReplicatedCkptWarning, match="Start ranks on more nodes") as recorded:
        dcp.save({"x": torch.zeros(2)}, checkpoint_id="a", storage_writer=writer, no_dist=True)  # <- save
    assert caught(recorded) == [(__file__, line_of("save"))]


def test_a_loads_warning_is_at_the_line_that_loads(tmp_path: Path) -> None:
    """The warning about entries that are not loaded points at the call of `dcp.load`."""
    with pytest.warns(ReplicatedCkptWarning, match="copies are wanted"):
        dcp.save(
            {"x": torch.zeros(2), "y": torch.zeros(2)},
            checkpoint_id="a",
            storage_writer=ReplicatedWriter(tmp_path),
            no_dist=True,
        )
    reader = ReplicatedReader(tmp_path)
    with pytest.warns(ReplicatedCkptWarning, match="does not load 1 of 2") as recorded:
        dcp.load({"x": torch.zeros(2)}, checkpoint_id="a", storage_reader=reader, no_dist=True)  # <- load
    assert caught(recorded) == [(__file__, line_of("load"))]


def test_a_managers_warning_is_at_the_line_that_calls_it(tmp_path: Path) -> None:
    """The warning points at the call of `manager.save`, not at a line of the manager."""
    with CheckpointManager(tmp_path) as manager, pytest.warns(ReplicatedCkptWarning, match="copies") as recorded:
        manager.save(1, {"x": torch.zeros(2)})  # <- manager
    assert caught(recorded) == [(__file__, line_of("manager"))]


def test_a_save_in_another_thread_warns_where_its_writer_was_made(tmp_path: Path) -> None:
    """A saving thread has no line of the user's on its stack, as in `dcp.async_save`. The warning points at the line
    that created the writer.
    """
    writer = ReplicatedWriter(tmp_path)  # <- made
    state = {"x": torch.zeros(2)}
    with concurrent.futures.ThreadPoolExecutor(1) as pool, pytest.warns(ReplicatedCkptWarning, match="copies") as found:
        pool.submit(dcp.save, state, checkpoint_id="a", storage_writer=writer, no_dist=True).result()
    assert caught(found) == [(__file__, line_of("made"))]


def test_one_line_warns_once_in_a_run(tmp_path: Path) -> None:
    """Three saves from one line give one warning, by Python's default filter."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        for _ in range(3):
            writer = ReplicatedWriter(tmp_path, overwrite=True)
            dcp.save({"x": torch.zeros(2)}, checkpoint_id="a", storage_writer=writer, no_dist=True)
    assert len([one for one in said if one.category is ReplicatedCkptWarning]) == 1


def test_every_error_is_exported() -> None:
    """Each error class and the warning class is exported as `replicated_ckpt.X`."""
    for name, kind in vars(errors).items():
        if isinstance(kind, type) and kind.__module__ == errors.__name__:
            assert getattr(replicated_ckpt, name) is kind
            assert name in replicated_ckpt.__all__
