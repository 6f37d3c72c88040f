"""The run that a load reads, if one directory of ids has checkpoints of several."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from replicated_ckpt.config import NEWEST_LINEAGE, REFUSE_LINEAGES
from replicated_ckpt.core.inventory import LineageFound, SaveFound, lineages_found
from replicated_ckpt.core.reading.newest import Newest
from replicated_ckpt.core.upkeep.policy import scope_of
from replicated_ckpt.errors import LineagesMet

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
    """Chooses the lineage that saved last by the clock, or the lineage `wanted`. With `newest`, only its saves count.

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
    # No lineage and no sequence: stock torch wrote it, as into a bucket. It is the last resort of any run.
    unmanaged = [save for save in others if not save.version.lineage and not save.sequence]
    # Of all names: a save that follows must be newer than those that "latest" does not match, too.
    beside = (save for save in saves if scope_of(save.checkpoint_id) == scope)
    sequence_max = max(save.sequence for save in beside if save.version.lineage == chosen.lineage)
    return LineageChoice((*ours, *unmanaged), lineages, sequence_max)


def note_newest_run(
    choice: LineageChoice, checkpoint_id: str, beside: Sequence[SaveFound], wanted: str
) -> LineageChoice:
    """The choice of a load by name. If another run has the newest checkpoint in the directory of ids, it is added.

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
    """For the warning of a load: which run was chosen, and which were not."""
    chosen, *others = map(describe_lineage, lineages)
    return (
        f"Checkpoints of several runs lie in one directory of ids. Loaded: {chosen}. Not loaded: "
        f"{'; '.join(others)}. To load another run, pass ReplicatedReader(lineage=...); give each run its own "
        "directory."
    )
