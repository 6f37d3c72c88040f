"""Settlement: what becomes of a save that is staged on a node, and what may replace or outlive what.

These are all the decisions of the commit protocol that can lose something (docs/protocol.md). They are functions of what
was seen, so that the agents and the search of small worlds run the same code.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from replicated_ckpt.core.lineage import Version


class Answer(Enum):
    """What a node says of a save when it is asked to help settle it. No answer is none of these."""

    PUBLISHED = "committed"
    """It has committed the save."""
    DECIDED = "decided"
    """The decision lies there, and the node cannot publish it: a newer save has the name."""
    WORKING = "working"
    """The save is staged there, and ranks still work on it."""
    STAGED = "staged"
    """The save is staged there without a decision, and no rank of that node works on it."""
    ABSENT = "unknown"
    """Nothing of it is there. That a coordinator's node has it no more tells nothing: it may have been put back since."""
    ABORTED = "aborted"
    """The save is over: this node, its coordinator's, never decides it, or has seen that no node published it and that a
    newer save has its name; or this node had published it, and retention has removed it."""


_NOT_PUBLISHED = (Answer.STAGED, Answer.ABSENT, Answer.ABORTED)


class Fate(Enum):
    COMPLETE = "complete"
    DROP = "drop"
    IN_DOUBT = "in doubt"
    WORKED_ON = "worked on"


@dataclass(frozen=True)
class Settlement:
    """What to do with a staged save. `sources` have published it; `waits_for` are the nodes whose answer is missing."""

    fate: Fate
    sources: tuple[str, ...] = ()
    waits_for: tuple[str, ...] = ()


def settle_staged(
    *, own: str, nodes: Iterable[str], coordinator: str, is_worked_on: bool, answers: Mapping[str, Answer]
) -> Settlement:
    """What becomes of a save that is staged on node `own` without a decision. `nodes` are those that its intent names.

    It is completed if any node has published it. It is dropped only if it can never have been, and never will be,
    published anywhere: the coordinator's node, which has the decision before any other, says that it has given the save
    up; or every node of the save says that it did not publish. Or where a node says that retention has removed it. A node
    that does not answer says nothing.
    """
    published = tuple(sorted(node for node, answer in answers.items() if answer is Answer.PUBLISHED))
    if published:
        return Settlement(Fate.COMPLETE, sources=published)
    if is_worked_on:
        return Settlement(Fate.WORKED_ON)
    if coordinator == own or Answer.ABORTED in answers.values():
        return Settlement(Fate.DROP)
    if Answer.WORKING in answers.values():
        return Settlement(Fate.WORKED_ON)
    quiet = {node for node, answer in answers.items() if answer in _NOT_PUBLISHED}
    waits_for = tuple(sorted({*nodes} - {own} - quiet))
    return Settlement(Fate.IN_DOUBT, waits_for=waits_for) if waits_for else Settlement(Fate.DROP)


def may_publish(staged: Version, published: Version | None, replaces: str) -> bool:
    """Whether a decided save may take a name under which `published` lies now.

    Of one lineage the newer save has the name. Of another lineage only the save that lay there when this one was opened
    gives way, `replaces`: the user has asked for that, on this node.
    """
    if published is None or published.save_id == staged.save_id:
        return True
    if published.lineage == staged.lineage:
        return staged.is_newer_than(published)
    return published.save_id == replaces


def is_without_a_name(
    decided: Version,
    *,
    published: Version | None,
    replaces: str,
    whole: Iterable[Version],
    is_seen_nowhere: bool,
) -> bool:
    """Whether a save that is decided, and that no node has published, may go: a newer one of another run has the name.

    `is_seen_nowhere`: all of its nodes answer, and none has published it. `published` has the name on its coordinator's
    node, and `whole` are as in `may_be_dropped`. As these two have no order, the clock tells which is newer, as in a load.
    Of one moment, the one that has the name stays.
    """
    if published is None or not any(version.save_id == published.save_id for version in whole):
        return False
    if published.lineage == decided.lineage or may_publish(decided, published, replaces):
        return False
    return is_seen_nowhere and published.created_unix_s >= decided.created_unix_s


def may_be_dropped(old: Version, *, whole: Iterable[Version], published: Version | None) -> bool:
    """Whether a version that was replaced, or is staged, may go: the save that took its place was seen whole.

    `whole` are the versions of the same checkpoint of which every shard was seen intact at a node that answers. Of another
    lineage only the one counts that has the name on this node, `published`.
    """
    return any(
        version.is_newer_than(old)
        or (published is not None and version.save_id == published.save_id and version.lineage != old.lineage)
        for version in whole
        if version.save_id != old.save_id
    )
