"""How far a conversion is, and what it did in the end."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from replicated_ckpt.dcp.convert.entries.source import Contents

CountBytes = Callable[[int], None]
"""Is told how many bytes more were converted."""


@dataclass(frozen=True)
class Progress:
    """How far a conversion is. `step` is "writing" or "verifying"."""

    step: str
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class Converted:
    """What a conversion did. `skipped` are keys that the format has no place for."""

    checkpoint_id: str
    place: str
    tensors: int
    objects: int
    size_bytes: int
    seconds: float
    skipped: tuple[str, ...] = ()

    @classmethod
    def of(cls, contents: Contents, checkpoint_id: str, place: str, seconds: float, skipped: tuple[str, ...]) -> Self:
        counts = (len(contents.tensors), len(contents.objects), contents.size_bytes)
        return cls(checkpoint_id, place, *counts, seconds, skipped)


class Reporter:
    """Adds up what was converted, and tells it."""

    def __init__(self, total_bytes: int, progress: Callable[[Progress], None] | None) -> None:
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._progress = progress

    def more(self, count: int) -> None:
        """So many bytes more were read and written."""
        self._done_bytes += count
        self._tell("writing", self._done_bytes)

    def verifying(self) -> None:
        """All was written, and is read back now."""
        self._tell("verifying", self._total_bytes)

    def _tell(self, step: str, done_bytes: int) -> None:
        if self._progress is not None:
            self._progress(Progress(step, done_bytes, self._total_bytes))
