"""Settlement: the fate of a staged save, and the rules by which versions replace each other or are dropped.

These are all decisions of the commit protocol that can lose data (docs/protocol.md). They are functions of observations,
so that agents and the exhaustive search in tests/fault/small_worlds run the same code.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from replicated_ckpt.core.lineage import Version


class Answer(Enum):
    """A node's state of a save, as it answers another node that settles the save. A missing answer is none of these."""

    PUBLISHED = "committed"
    """The node has committed the save."""
    DECIDED = "decided"
    """The node has the decision, but cannot publish it, because a newer save is published."""
    WORKING = "working"
    """The save is staged, and ranks of that node still work on it."""
    STAGED = "staged"
    """The save is staged without a decision, and no rank of that node works on it."""
    ABSENT = "unknown"
    """The node has no file of the save. This alone proves nothing: the node's disk may have been restored."""
    ABORTED = "aborted"
    """The save has ended. Its coordinator's node will never decide it, or has seen that no node published it and that
    a newer save is published. Or the node had published it, and retention has removed it."""


_NOT_PUBLISHED = (Answer.STAGED, Answer.ABSENT, Answer.ABORTED)


class Fate(Enum):
    COMPLETE = "complete"
    DROP = "drop"
    IN_DOUBT = "in doubt"
    WORKED_ON = "worked on"


@dataclass(frozen=True)
class Settlement:
    """The decision on a staged save. `sources` have published it; the answers of `waits_for` are missing."""

    fate: Fate
    sources: tuple[str, ...] = ()
    waits_for: tuple[str, ...] = ()


def settle_staged(
    *, own: str, nodes: Iterable[str], coordinator: str, is_worked_on: bool, answers: Mapping[str, Answer]
) -> Settlement:
    """The fate of a save that is staged on node `own` without a decision. `nodes` are the nodes in its intent.

    The save is completed if any node has published it. It is removed only if no node has published it or ever will.
    Each of these facts proves that: a node answers that the save has ended (`ABORTED`); this node is the coordinator's,
    which gets the decision before any other node, and has none; or every other node of the save answers that it did not
    publish the save. A missing answer proves nothing.
    """
    published = tuple(sorted(node for node, answer in answers.items() if answer is Answer.PUBLISHED))
    # First: once any node has published it, dropping a part here could lose the last copy (I1).
    if published:
        return Settlement(Fate.COMPLETE, sources=published)
    # A rank still writes here: removing its files would fail a save that can succeed.
    if is_worked_on:
        return Settlement(Fate.WORKED_ON)
    # The coordinator's node decides first: without a decision here there is none anywhere.
    if coordinator == own or Answer.ABORTED in answers.values():
        return Settlement(Fate.DROP)
    # The coordinator may still decide: its ranks are alive on another node.
    if Answer.WORKING in answers.values():
        return Settlement(Fate.WORKED_ON)
    # ABSENT of a single node decides nothing: its disk may have been restored to an older state.
    quiet = {node for node, answer in answers.items() if answer in _NOT_PUBLISHED}
    waits_for = tuple(sorted({*nodes} - {own} - quiet))
    return Settlement(Fate.IN_DOUBT, waits_for=waits_for) if waits_for else Settlement(Fate.DROP)


def may_publish(staged: Version, published: Version | None, replaces: str) -> bool:
    """Whether a decided save may replace the `published` version (I4).

    Within a lineage the newer save wins. A version of another lineage is replaced only if it is `replaces`, the one that
    was published when this save was opened: the user asked for that, on this node.
    """
    if published is None or published.save_id == staged.save_id:
        return True
    if published.lineage == staged.lineage:
        # A delayed save, for example of a stopped agent, must not replace a newer one.
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
    """Whether a decided save that no node has published may be deleted, because another run's newer save is published.

    `is_seen_nowhere` is true if all nodes of the decided save answer, and none has published it. `published` is the version
    on the coordinator's node of the decided save. `whole` is as in `may_be_dropped`. Two lineages have no order, so the
    clock decides, as in a load. At equal times the published save stays, and the decided one may be deleted.
    """
    if published is None or not any(version.save_id == published.save_id for version in whole):
        return False
    # It can still be published here: then its order decides, not the clock.
    if published.lineage == decided.lineage or may_publish(decided, published, replaces):
        return False
    return is_seen_nowhere and published.created_unix_s >= decided.created_unix_s


def may_be_dropped(old: Version, *, whole: Iterable[Version], published: Version | None) -> bool:
    """Whether a replaced or staged version may be deleted, because the save that replaces it was seen whole (I1).

    `whole` are the versions of the same checkpoint of which every shard was seen intact at nodes that answer. A version of
    another lineage counts only if it is the `published` version of this node.
    """
    return any(
        version.is_newer_than(old)
        or (published is not None and version.save_id == published.save_id and version.lineage != old.lineage)
        for version in whole
        # A version never replaces itself: one copy seen twice must not delete the other.
        if version.save_id != old.save_id
    )
