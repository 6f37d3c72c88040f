"""What a user kept with one step, as CheckpointManager gives it back."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from replicated_ckpt.core.notes import metrics_of
from replicated_ckpt.dcp.find.listing import Listed


@dataclass(frozen=True)
class StepNotes:
    """Notes of a step. `saved_unix_s` is when it was saved, by the clock of rank 0's node; a metric may be NaN."""

    step: int
    saved_unix_s: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)


def notes_of(step: int, listed: Listed) -> StepNotes:
    return StepNotes(step, listed.created_unix_s, metrics_of(listed.notes), dict(listed.notes.get("metadata", {})))
