"""Steps: a run in which most of the state does not change, and the bytes that its saves send."""

import http.client
import shutil
import warnings
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp

from replicated_ckpt.dcp.planning.cached_plan import CachedSavePlanner
from tests.steps.context import Context

FROZEN = 2 << 20
"""Elements of a rank's encoder: 8 MiB."""
TRAINED = 100_000
NO_OPTIONS: Mapping[str, Any] = {}


def state_at(
    rank: int, step: int, *, is_replicated: bool = False, frozen: int = FROZEN, trained: int = TRAINED
) -> dict[str, torch.Tensor]:
    """The state of a rank at a step. The encoder changes once, at step 100."""
    owner = 0 if is_replicated else rank
    torch.manual_seed(owner + (1000 if step >= 100 else 0))
    encoder, head = torch.rand(frozen), torch.rand(trained)
    name = "all" if is_replicated else f"rank{rank}"
    return {f"model.encoder.{name}": encoder, f"model.head.{name}": head + step, f"optim.head.{name}": head * step}


def save_frozen(
    context: Context,
    /,
    steps: Sequence[int],
    *,
    is_async: bool = False,
    state: Mapping[str, Any] = NO_OPTIONS,
    **options: Any,
) -> list[dict[str, Any]]:
    """Saves the state at each step. Returns for each save the bytes that this rank sent to agents, and its report's
    numbers.
    """
    writer, planner, sent = context.writer(**options), context.kept.setdefault("planner", CachedSavePlanner()), 0
    send = http.client.HTTPConnection.send

    def count(connection: http.client.HTTPConnection, data: Any) -> None:
        nonlocal sent
        sent += len(data)
        send(connection, data)

    found = []
    with mock.patch.object(http.client.HTTPConnection, "send", count):
        for step in steps:
            sent, values = 0, state_at(context.rank, step, **state)
            how = {"checkpoint_id": f"run/step-{step}", "storage_writer": writer, "planner": planner}
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                if is_async:
                    dcp.async_save(values, **how).result(timeout=60)  # type: ignore[union-attr]
                else:
                    dcp.save(values, **how)
            report = writer.last_save
            assert report is not None
            warned = [str(one.message) for one in caught if "replicated" in type(one.message).__name__.lower()]
            numbers = {"written": report.bytes_written, "linked": report.bytes_linked, "made": report.copies_made}
            found.append({"sent": sent, "warned": warned, **numbers})
    return found


def load_frozen(
    context: Context, /, steps: Sequence[int], ranks: int, *, state: Mapping[str, Any] = NO_OPTIONS
) -> dict[str, bool]:
    """For each step, whether the states of all ranks that saved load bit for bit."""
    found = {}
    for step in steps:
        expected: dict[str, torch.Tensor] = {}
        for rank in range(ranks):
            expected |= state_at(rank, step, **state)
        loaded = {name: torch.zeros_like(value) for name, value in expected.items()}
        dcp.load(loaded, checkpoint_id=f"run/step-{step}", storage_reader=context.reader())
        found[str(step)] = all(torch.equal(loaded[name], value) for name, value in expected.items())
    return found


def lose_checkpoints(context: Context, /, nodes: Sequence[int]) -> None:
    """Removes all checkpoints of the run from the disks of these nodes."""
    if context.node in nodes:
        shutil.rmtree(context.root / "run")
