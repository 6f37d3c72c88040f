"""The guard of "latest": it skips checkpoints that users have rejected, or that were restored too often without a save."""

from collections.abc import Iterator

from replicated_ckpt.core.inventory import SaveFound
from replicated_ckpt.core.layout import SEQUENCE_FLOOR_MAX
from replicated_ckpt.core.upkeep.marks import Marks
from replicated_ckpt.errors import CheckpointRejected
from replicated_ckpt.wording import list_some, plural

WARN_AT = 3
"""Restores of one checkpoint without a later save from which on rank 0 warns."""
_SHOWN_MAX = 3
_REJECT = "To have every load skip it: `manager.reject(STEP)`, or `replicated-ckpt reject {} --root ROOT`."


class Guard:
    """Decides for each whole save of a run, the newest first, whether "latest" skips it.

    `newest`: the largest sequence of the run. `max_tries`: a save that was restored so often since the run's newest save is
    skipped; None: none is. A save of another run is never taken in place of a skipped one.
    """

    def __init__(self, marks: Marks, newest: int, max_tries: int | None) -> None:
        self._marks, self._max_tries = marks, max_tries
        self._newest = min(newest, SEQUENCE_FLOOR_MAX)
        self._rejected: list[SaveFound] = []
        self.tried: list[SaveFound] = []

    def count(self, save: SaveFound) -> int:
        """How often the save was restored, a restore that begins now included."""
        return 1 + self._marks.count_restores(save.version.lineage, self._newest, save.save_id)

    def skips(self, save: SaveFound) -> bool:
        skipped = [*self._rejected, *self.tried]
        if skipped and save.version.lineage != skipped[0].version.lineage:
            return True
        if self._marks.is_rejected(save.save_id):
            self._rejected.append(save)
            return True
        if self._max_tries is not None and self.count(save) > self._max_tries:
            self.tried.append(save)
            return True
        return False

    def raise_if_rejected(self) -> None:
        """For a search that found nothing else. Raises CheckpointRejected: whole saves were skipped, all as rejected."""
        if self._rejected:
            raise CheckpointRejected([save.checkpoint_id for save in self._rejected])

    def describe(self, chosen: SaveFound, *, is_restore: bool) -> str:
        """The warning of a load of this save; "": nothing was skipped, and it was not restored often."""
        return " ".join(self._describe(chosen, is_restore=is_restore))

    def _describe(self, chosen: SaveFound, *, is_restore: bool) -> Iterator[str]:
        name, count = chosen.checkpoint_id, self.count(chosen)
        if self._rejected:
            names = list_some([repr(save.checkpoint_id) for save in self._rejected], _SHOWN_MAX)
            yield f"{name!r} is loaded, as a user has rejected {names}."
        if any(save.save_id == chosen.save_id for save in self.tried):
            yield (
                f"{name!r} is loaded again, although it was restored {plural(count - 1, 'time')} without a later save: "
                f"every older complete checkpoint was, too (max_tries={self._max_tries})."
            )
        elif self.tried:
            tried = self.tried[0]
            yield (
                f"{name!r} is loaded, as {tried.checkpoint_id!r} was restored {plural(self.count(tried) - 1, 'time')} "
                f"without a later save (max_tries={self._max_tries}). {_REJECT.format(tried.checkpoint_id)}"
            )
        elif is_restore and count >= WARN_AT:
            yield (
                f"{name!r} has now been restored {plural(count, 'time')} without a later save. If the job fails on it each "
                f"time, `manager.restore(state, max_tries={WARN_AT})` loads an older one. {_REJECT.format(name)}"
            )


def describe_rejected(save: SaveFound) -> str:
    """The warning of a load of a rejected checkpoint by its name."""
    name = save.checkpoint_id
    return (
        f'{name!r} is loaded by its name, although a user has rejected it: "latest" skips it. To end that: '
        f"`replicated-ckpt reject {name} --undo --root ROOT`, or `manager.reject(STEP, undo=True)`."
    )
