"""Steps: look checkpoints up, and save under ids that differ by rank."""

from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from replicated_ckpt import ReplicatedReader
from replicated_ckpt.errors import ReplicatedCkptError
from tests.steps.context import Context
from tests.steps.state import failure


def ask(context: Context, /, names: list[str], **reader: Any) -> dict[str, Any]:
    """The results of `latest` and `exists`, and of a look at this node's disk."""
    on_own_disk = [(context.root / name).exists() for name in names]
    asked = ReplicatedReader(context.root, **reader)
    return {
        "latest": asked.latest(),
        "exists": [asked.exists(name) for name in names],
        "on own disk": on_own_disk,  # before any agent brings a copy back
    }


def ask_alone(context: Context, rank: int) -> str | None:
    """One rank calls `latest`. The others do not."""
    return context.reader(no_dist=True).latest() if context.rank == rank else None


def ask_in_vain(context: Context, /, **reader: Any) -> dict[str, str]:
    """The error of `latest`."""
    try:
        found = ReplicatedReader(context.root, **reader).latest()
    except ReplicatedCkptError as exc:
        return {"type": type(exc).__name__, "message": str(exc)}
    raise AssertionError(f"latest() answered {found!r}")


def ask_by_own_name(context: Context) -> str:
    """Every rank looks up another id."""
    try:
        context.reader().exists(f"step-{context.rank}")
    except ReplicatedCkptError as exc:
        return type(exc).__name__
    return "no error"


def save_under_the_coordinators_id(context: Context, ids: list[str | None]) -> str:
    """Rank r passes the r-th id. Returns the id that its writer has saved to."""
    writer = context.writer(checkpoint_id_from="coordinator")
    dcp.save({"a": torch.arange(8)}, checkpoint_id=ids[context.rank], storage_writer=writer)
    report = writer.last_save
    assert report is not None
    return report.checkpoint_id


def save_names(context: Context, names: list[str]) -> None:
    """Saves a vector under each name."""
    dcp.save({name: torch.ones(4) for name in names}, checkpoint_id="step-1", storage_writer=context.writer())


def load_own_names(context: Context, /, names: list[list[str]], **reader: Any) -> None:
    """Rank r loads the r-th names."""
    wanted = {name: torch.zeros(4) for name in names[context.rank]}
    dcp.load(wanted, checkpoint_id="step-1", storage_reader=context.reader(**reader))
    assert all(torch.equal(tensor, torch.ones(4)) for tensor in wanted.values())


def load_coordinated_by(context: Context, rank: int) -> float:
    """The deprecated call, with a coordinator other than rank 0."""
    wanted = {"a": torch.zeros(4)}
    reader = context.reader()
    reader.reset("step-1")
    dcp.load_state_dict(wanted, reader, coordinator_rank=rank)
    return float(wanted["a"].sum())


def save_coordinated_by(context: Context, rank: int) -> dict[str, Any]:
    """The deprecated call, with a coordinator other than rank 0. Returns this rank's error."""
    try:
        dcp.save_state_dict({"a": torch.ones(4)}, context.writer(), coordinator_rank=rank)
    except CheckpointException as exc:
        return failure(exc)
    raise AssertionError("it was saved, under no id")


def load_under_ids(context: Context, ids: list[str | None], set_before: str | None = None) -> dict[str, Any]:
    """Rank r passes the r-th id to `dcp.load`, or none if it is None. Returns this rank's error, and its values
    afterwards.
    """
    wanted = {"a": torch.zeros(4)}
    reader = context.reader()
    if set_before is not None:
        reader.reset(set_before)
    try:
        dcp.load(wanted, checkpoint_id=ids[context.rank], storage_reader=reader)
    except CheckpointException as exc:
        return failure(exc)
    return {"types": [], "sum": float(wanted["a"].sum())}


def catch_missing(context: Context) -> dict[str, Any]:
    """A program for stock storage loads a missing checkpoint. Then one rank alone reads metadata."""
    try:
        dcp.load({"a": torch.zeros(4)}, checkpoint_id="step-9", storage_reader=context.reader())
    except CheckpointException as exc:
        caught = failure(exc)
    reader = context.reader()
    reader.reset("step-1")
    names = list(reader.read_metadata().state_dict_metadata) if context.rank == 1 else []
    return {"types": caught["types"], "names": names}
