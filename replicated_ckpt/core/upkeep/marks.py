"""Marks on checkpoints: how often each was restored since the run's last save, and which ones users have rejected."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import index
from typing import Any

from replicated_ckpt.core.layout import SEQUENCE_FLOOR_MAX, is_lineage, is_save_id

REJECTIONS_MAX = 1024
"""Limit for one node. A full node takes no more from peers; a further one of its own user pushes out the oldest."""
RUNS_MAX = 256
"""Limit of the runs whose restores one node counts. A further one pushes out the run that was restored longest ago."""
_COUNTED_MAX = 64
RESTORES_MAX = 1 << 20
_REVISION_MAX = 1 << 53
LEARNED_MAX = 1 << 32
"""Largest number of changes that is accepted from a peer: this node's own user can always change the mark again."""


@dataclass(frozen=True)
class Restores:
    """How often "latest" has restored each save of a run, by save id, since the run's newest save.

    `newest` is the sequence of that save. A later save begins a new count on every node, also on one that was away.
    """

    newest: int
    count_by_save: Mapping[str, int]

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Restores":
        """Raises ValueError, KeyError, TypeError, AttributeError: the fields are invalid."""
        told = list(fields["count_by_save"].items())[:_COUNTED_MAX]
        counts = {str(save_id): index(count) for save_id, count in told}
        found = cls(index(fields["newest"]), counts)
        is_valid = all(is_save_id(save_id) and 0 < count <= RESTORES_MAX for save_id, count in counts.items())
        if not is_valid or not 0 <= found.newest <= SEQUENCE_FLOOR_MAX:
            raise ValueError(f"not a valid count of restores: {found!r}"[:500])
        return found


@dataclass(frozen=True)
class Marks:
    """The marks of one node, or of several together.

    `rejections`: by save id, how often the mark was set or cleared. An odd number: the save is rejected. The number only
    grows, so the largest one of several nodes is the latest. `restores`: by lineage.
    """

    rejections: Mapping[str, int] = field(default_factory=dict)
    restores: Mapping[str, Restores] = field(default_factory=dict)

    def is_rejected(self, save_id: str) -> bool:
        return self.rejections.get(save_id, 0) % 2 == 1

    def count_restores(self, lineage: str, newest: int, save_id: str) -> int:
        """How often this save was restored since the run's newest save, the one with the sequence `newest`."""
        found = self.restores.get(lineage)
        return found.count_by_save.get(save_id, 0) if found is not None and found.newest == newest else 0

    def to_json(self) -> dict[str, Any]:
        restores = {
            lineage: {"newest": found.newest, "count_by_save": dict(found.count_by_save)}
            for lineage, found in self.restores.items()
        }
        return {"rejections": dict(self.rejections), "restores": restores}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Marks":
        """Raises ValueError, KeyError, TypeError, AttributeError: the fields are invalid. The caller names the source."""
        told = list(fields["rejections"].items())[-REJECTIONS_MAX:]
        rejections = {str(save_id): index(revision) for save_id, revision in told}
        runs = list(fields["restores"].items())[-RUNS_MAX:]
        restores = {str(lineage): Restores.from_json(found) for lineage, found in runs}
        is_valid = all(is_save_id(save_id) and 0 < number <= _REVISION_MAX for save_id, number in rejections.items())
        if not is_valid or not all(map(is_lineage, restores)):
            raise ValueError("not valid marks of checkpoints")
        return cls(rejections, restores)


NO_MARKS = Marks()


def next_revision(revision: int, *, is_rejected: bool) -> int:
    """The number of changes of a mark after it is set or cleared; unchanged if the mark is in that state already.

    Raises:
        ValueError: the number would exceed its limit, because an agent has sent a false one.
    """
    found = revision if revision % 2 == is_rejected else revision + 1
    if found > _REVISION_MAX:
        raise ValueError("no number is left")
    return found


def merge_marks(told: Iterable[Marks]) -> Marks:
    """The marks of several nodes together. Their order does not matter."""
    rejections: dict[str, int] = {}
    restores: dict[str, Restores] = {}
    for marks in told:
        for save_id, revision in marks.rejections.items():
            rejections[save_id] = max(revision, rejections.get(save_id, 0))
        for lineage, found in marks.restores.items():
            restores[lineage] = merge_restores(restores.get(lineage, found), found)
    return Marks(rejections, restores)


def merge_restores(one: Restores, other: Restores) -> Restores:
    """The counts since the later save; of two counts since the same save, the larger one of each checkpoint."""
    if one.newest != other.newest:
        return max(one, other, key=lambda found: found.newest)
    saves = dict.fromkeys((*one.count_by_save, *other.count_by_save))
    counts = {save_id: max(one.count_by_save.get(save_id, 0), other.count_by_save.get(save_id, 0)) for save_id in saves}
    return Restores(one.newest, dict(list(counts.items())[-_COUNTED_MAX:]))
