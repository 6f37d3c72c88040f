"""The checkpoints of a CheckpointManager, which are named `step-<step>`, and the notes that a user saved with them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, SupportsIndex

import torch.distributed as dist

from replicated_ckpt.config import check_number
from replicated_ckpt.core.manifest import RefusedNotes, encode_notes, metrics_of
from replicated_ckpt.core.reading.newest import Newest, is_of_form
from replicated_ckpt.dcp.find.listing import Listed
from replicated_ckpt.errors import ConfigInvalid

_FORM = "step-{}"
NEWEST_STEP = str(Newest("", _FORM))
"""A manager's "latest": only ids of its own form count, whatever else lies in its root."""


def check_step(step: SupportsIndex) -> int:
    """The step as an int: numpy's integers and tensors of one integer are steps, too.

    Raises:
        ConfigInvalid: it is not a whole number from 0.
    """
    return check_number("step", step, least=0)


def id_of(step: SupportsIndex) -> str:
    """The checkpoint id of a step. Raises ConfigInvalid: as `check_step`."""
    return _FORM.format(check_step(step))


def find_step(checkpoint_id: str) -> int | None:
    """The step of a checkpoint; None: it is not a manager's."""
    return step_of(checkpoint_id) if is_of_form(_FORM, checkpoint_id) else None


def step_of(checkpoint_id: str) -> int:
    """The step of a manager's checkpoint."""
    return int(checkpoint_id.removeprefix(_FORM.format("")))


@dataclass(frozen=True)
class StepNotes:
    """Notes of a step. `saved_unix_s` is when it was saved, by the clock of rank 0's node; a metric may be NaN."""

    step: int
    saved_unix_s: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)


def notes_of_rank(metrics: Mapping[str, Any] | None, metadata: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The notes of this rank for a save. Only rank 0's are stored. If they cannot be stored, the save fails on all ranks.

    Raises ConfigInvalid: they cannot be stored, and this process is alone.
    """
    is_alone = not dist.is_available() or not dist.is_initialized()
    # Notes of other ranks are not stored, and must not fail the save.
    if not is_alone and dist.get_rank():
        return {}
    try:
        return encode_notes(metrics, metadata)
    except ConfigInvalid as exc:
        if is_alone:
            raise
        # Raised on rank 0 alone, the error would leave the others waiting in the save: the commit raises it on all ranks.
        return RefusedNotes(exc)


def notes_of(step: int, listed: Listed) -> StepNotes:
    return StepNotes(step, listed.created_unix_s, metrics_of(listed.notes), dict(listed.notes.get("metadata", {})))
