"""The choice of a load: the run, if several saved here, and which of its saves "latest" skips."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from replicated_ckpt.config import NEWEST_LINEAGE, REFUSE_LINEAGES
from replicated_ckpt.core.inventory import LineageFound, SaveFound, lineages_found
from replicated_ckpt.core.layout import SEQUENCE_FLOOR_MAX
from replicated_ckpt.core.reading.newest import Newest
from replicated_ckpt.core.upkeep.marks import Marks
from replicated_ckpt.core.upkeep.policy import scope_of
from replicated_ckpt.errors import CheckpointRejected, LineagesMet
from replicated_ckpt.wording import list_some, plural

_TIME_MAX_S = 1e11  # the latest time that can be printed safely: a hostile manifest may have any number


@dataclass(frozen=True)
class LineageChoice:
    """The saves that a load may read, and the lineages among which this one was chosen.

    `saves` has the saves of the chosen lineage, newest first; then the saves that no run of this package made. `lineages`
    has all lineages in the directory of the chosen lineage's newest checkpoint, with the chosen one first. `sequence_max`
    is the largest sequence of the chosen lineage in that directory, including checkpoints whose names do not fit.
    """

    saves: tuple[SaveFound, ...]
    lineages: tuple[LineageFound, ...] = ()
    sequence_max: int = 0


def choose_lineage(
    checkpoint_id: str, saves: Sequence[SaveFound], wanted: str, newest: Newest | None = None
) -> LineageChoice:
    """Chooses the lineage that saved last by the clock, or the lineage `wanted`. `newest`: only saves that fit it count.

    Raises:
        LineagesMet: there are several lineages and `wanted` is "refuse", or none of them is the lineage `wanted`.
    """
    fitting = [save for save in saves if newest is None or newest.fits(save.checkpoint_id)]
    found = lineages_found(fitting)
    chosen = next((each for each in found if wanted in (NEWEST_LINEAGE, REFUSE_LINEAGES, each.lineage)), None)
    if chosen is None:
        if found:
            raise LineagesMet(checkpoint_id, tuple(map(describe_lineage, found)), f"none of these runs is {wanted!r}")
        return LineageChoice(tuple(fitting))
    scope = scope_of(chosen.newest_id)
    in_scope = lineages_found(save for save in fitting if scope_of(save.checkpoint_id) == scope)
    lineages = (chosen, *(each for each in in_scope if each.lineage != chosen.lineage))
    if wanted == REFUSE_LINEAGES and len(lineages) > 1:
        raise LineagesMet(
            checkpoint_id, tuple(map(describe_lineage, lineages)), 'the reader refuses to choose (lineage="refuse")'
        )
    ours = [save for save in fitting if save.version.lineage == chosen.lineage]
    others = (save for save in fitting if save.version.lineage != chosen.lineage)
    # Stock torch's saves have no lineage and no sequence. They are the last resort of any run.
    unmanaged = [save for save in others if not save.version.lineage and not save.sequence]
    # All names count: the next save must also be newer than those that "latest" does not match.
    beside = (save for save in saves if scope_of(save.checkpoint_id) == scope)
    sequence_max = max(save.sequence for save in beside if save.version.lineage == chosen.lineage)
    return LineageChoice((*ours, *unmanaged), lineages, sequence_max)


def note_newest_run(
    choice: LineageChoice, checkpoint_id: str, beside: Sequence[SaveFound], wanted: str
) -> LineageChoice:
    """The choice of a load by name. Adds the run with the newest checkpoint in the directory of ids, if it is another one.

    `beside` has the newest saves of each run in that directory.

    Raises:
        LineagesMet: another run has the newest checkpoint, and `wanted` is "refuse".
    """
    runs, known = lineages_found(beside), {each.lineage: each for each in choice.lineages}
    # Without a lineage on either side there is no second run to warn of.
    if not known or not runs or runs[0].lineage == choice.lineages[0].lineage:
        return choice
    told = {each.lineage: each for each in runs if each.lineage in known or each is runs[0]}
    lineages = (*(known | told).values(),)
    if wanted == REFUSE_LINEAGES:
        raise LineagesMet(
            checkpoint_id, tuple(map(describe_lineage, lineages)), 'the reader refuses to choose (lineage="refuse")'
        )
    return replace(choice, lineages=lineages)


def describe_lineage(found: LineageFound) -> str:
    """A description of a lineage: its name, its newest checkpoint with the time of that save, and its nodes."""
    made = datetime.fromtimestamp(min(found.created_unix_s, _TIME_MAX_S), UTC)
    nodes = ", ".join(found.nodes)
    return f"lineage {found.lineage!r}, newest {found.newest_id!r} of {made:%Y-%m-%d %H:%M:%S} UTC, on node {nodes}"


def describe_lineages(lineages: Sequence[LineageFound]) -> str:
    """The warning of a load: which run was chosen, and which were not."""
    chosen, *others = map(describe_lineage, lineages)
    return (
        f"Checkpoints of several runs lie in one directory of ids. Loaded: {chosen}. Not loaded: "
        f"{'; '.join(others)}. To load another run, pass ReplicatedReader(lineage=...); give each run its own "
        "directory."
    )


WARN_AT = 3
"""Rank 0 warns if a checkpoint was restored at least this many times without a later save."""
_SHOWN_MAX = 3
_REJECT = "To have every load skip it: `manager.reject(STEP)`, or `replicated-ckpt reject {} --root ROOT`."


class Guard:
    """Decides for each whole save of a run, the newest first, whether "latest" skips it.

    `newest`: the largest sequence of the run. `max_tries`: a save that was restored this many times since the run's newest
    save is skipped; None: any number is allowed. A save of another run never takes the place of a skipped one.
    """

    def __init__(self, marks: Marks, newest: int, max_tries: int | None) -> None:
        self._marks, self._max_tries = marks, max_tries
        self._newest = min(newest, SEQUENCE_FLOOR_MAX)
        self._rejected: list[SaveFound] = []
        self.tried: list[SaveFound] = []

    def count(self, save: SaveFound) -> int:
        """How often the save was restored, including the restore that begins now."""
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
        """Raises CheckpointRejected if whole saves were skipped as rejected. Called if the search found nothing else."""
        if self._rejected:
            raise CheckpointRejected([save.checkpoint_id for save in self._rejected])

    def describe(self, chosen: SaveFound, *, is_restore: bool) -> str:
        """The warning of a load of this save; "": nothing was skipped, and it was not restored often."""
        return " ".join(self._describe(chosen, is_restore=is_restore))

    def _describe(self, chosen: SaveFound, *, is_restore: bool) -> Iterator[str]:
        name, count = chosen.checkpoint_id, self.count(chosen)
        if self._rejected:
            names = list_some([repr(save.checkpoint_id) for save in self._rejected], _SHOWN_MAX)
            yield f"{name!r} is loaded, because a user has rejected {names}."
        if any(save.save_id == chosen.save_id for save in self.tried):
            yield (
                f"{name!r} is loaded again, although it was restored {plural(count - 1, 'time')} without a later save: "
                f"every older complete checkpoint was, too (max_tries={self._max_tries})."
            )
        elif self.tried:
            tried = self.tried[0]
            yield (
                f"{name!r} is loaded, because {tried.checkpoint_id!r} was restored {plural(self.count(tried) - 1, 'time')} "
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
