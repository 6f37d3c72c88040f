"""Steps: ask whether a checkpoint is there, and save under ids that differ by rank."""

from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from replicated_ckpt import ReplicatedReader
from replicated_ckpt.errors import ReplicatedCkptError
from tests.multiprocess.context import Context


def ask(context: Context, names: list[str], **reader: Any) -> dict[str, Any]:
    """What `latest` and `exists` answer, and what a look at the own disk would."""
    on_own_disk = [(context.root / name).exists() for name in names]
    asked = ReplicatedReader(context.root, **reader)
    return {
        "latest": asked.latest(),
        "exists": [asked.exists(name) for name in names],
        "on own disk": on_own_disk,  # before any agent brings a copy back
    }


def ask_alone(context: Context, rank: int) -> str | None:
    """One rank asks, the others don't."""
    return context.reader(no_dist=True).latest() if context.rank == rank else None


def ask_in_vain(context: Context, **reader: Any) -> dict[str, str]:
    """What `latest` raises."""
    try:
        found = ReplicatedReader(context.root, **reader).latest()
    except ReplicatedCkptError as exc:
        return {"type": type(exc).__name__, "message": str(exc)}
    raise AssertionError(f"latest() answered {found!r}")


def ask_by_own_name(context: Context) -> str:
    """Every rank asks for another id."""
    try:
        context.reader().exists(f"step-{context.rank}")
    except ReplicatedCkptError as exc:
        return type(exc).__name__
    return "no error"


def save_under_the_coordinators_id(context: Context, ids: list[str | None]) -> str:
    """Rank r passes the r-th id; returns what its writer says that was saved."""
    writer = context.writer(checkpoint_id_from="coordinator")
    dcp.save({"a": torch.arange(8)}, checkpoint_id=ids[context.rank], storage_writer=writer)
    report = writer.last_save
    assert report is not None
    return report.checkpoint_id


def save_names(context: Context, names: list[str]) -> None:
    """Saves a vector under each name."""
    dcp.save({name: torch.ones(4) for name in names}, checkpoint_id="step-1", storage_writer=context.writer())


def load_own_names(context: Context, names: list[list[str]], **reader: Any) -> None:
    """Rank r asks for the r-th names."""
    wanted = {name: torch.zeros(4) for name in names[context.rank]}
    dcp.load(wanted, checkpoint_id="step-1", storage_reader=context.reader(**reader))
    assert all(torch.equal(tensor, torch.ones(4)) for tensor in wanted.values())
