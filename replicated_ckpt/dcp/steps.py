"""The checkpoints of a CheckpointManager: their names, `step-<step>` and no others, and what a user kept with them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, SupportsIndex

import torch.distributed as dist

from replicated_ckpt.config import check_number
from replicated_ckpt.core.notes import RefusedNotes, encode_notes, metrics_of
from replicated_ckpt.dcp.find.listing import Listed
from replicated_ckpt.errors import ConfigInvalid


def check_step(step: SupportsIndex) -> int:
    """The step as an int: numpy's integers and tensors of one integer are steps, too.

    Raises:
        ConfigInvalid: it is no whole number from 0.
    """
    return check_number("step", step, least=0)


def id_of(step: SupportsIndex) -> str:
    """Raises ConfigInvalid: as `check_step`."""
    return f"step-{check_step(step)}"


def find_step(checkpoint_id: str) -> int | None:
    """The step of a checkpoint; None: it is not a manager's."""
    match = re.fullmatch(r"step-(0|[1-9][0-9]*)", checkpoint_id)
    return None if match is None else int(match[1])


def step_of(checkpoint_id: str) -> int:
    """The step of what a load without a step would read. Raises ConfigInvalid: it is not a manager's."""
    step = find_step(checkpoint_id)
    if step is None:
        raise ConfigInvalid(
            f"The newest checkpoint that can be restored is {checkpoint_id!r}, which no CheckpointManager has saved.",
            "Give each job a root (and a prefix of the bucket) of its own, or load this one with dcp.load. A manager's own"
            " steps are in all_steps(), and restored by their number.",
        )
    return step


@dataclass(frozen=True)
class StepNotes:
    """Notes of a step. `saved_unix_s` is when it was saved, by the clock of rank 0's node; a metric may be NaN."""

    step: int
    saved_unix_s: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)


def notes_of_rank(metrics: Mapping[str, Any] | None, metadata: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """What this rank keeps with a save: rank 0's counts. What that cannot keep fails the save, so that all ranks learn it.

    Raises ConfigInvalid: it cannot be kept, and this process is alone.
    """
    is_alone = not dist.is_available() or not dist.is_initialized()
    if not is_alone and dist.get_rank():
        return {}
    try:
        return encode_notes(metrics, metadata)
    except ConfigInvalid as exc:
        if is_alone:
            raise
        return RefusedNotes(exc)


def notes_of(step: int, listed: Listed) -> StepNotes:
    return StepNotes(step, listed.created_unix_s, metrics_of(listed.notes), dict(listed.notes.get("metadata", {})))
