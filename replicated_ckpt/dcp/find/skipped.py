"""What may be newer than the save that a load takes: saves with missing files, and saves on nodes that are silent."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from replicated_ckpt.core.inventory import SaveFound
from replicated_ckpt.core.layout import MANIFEST_NAME, METADATA_NAME, OBJECT_NODE
from replicated_ckpt.core.manifest import Manifest
from replicated_ckpt.core.upkeep.unclaimed_files import UnclaimedFiles
from replicated_ckpt.searched import NOT_REACHED
from replicated_ckpt.wording import list_some, plural

_SHOWN_MAX = 3


@dataclass(frozen=True)
class SkippedSave:
    """A save that a load skips, with its manifest; None: no holder has one that passes its checks."""

    save: SaveFound
    raw: str = ""
    manifest: Manifest | None = None

    @property
    def missing(self) -> tuple[str, ...]:
        """The files of which no intact copy was found."""
        if self.manifest is None:
            return (MANIFEST_NAME,)
        return self.save.list_missing(self.manifest.shard_sizes, self.save.damaged_copies) or (METADATA_NAME,)


def find_unread(unclaimed: Iterable[UnclaimedFiles], known: Collection[str]) -> list[str]:
    """The checkpoints of this package of which no node that answered has a manifest that passes its checks."""
    return sorted({one.checkpoint_id for one in unclaimed if one.is_ours} - {*known})


def describe_skipped(
    chosen: SaveFound, newer: Sequence[SkippedSave], places: Sequence[str], unread: Sequence[str] = ()
) -> str:
    """For the warning of a load: which newer saves it skips, and why; "" if none.

    `newer`: the newest first. `unread`: those that may be newer, as `find_unread` returns them.
    """
    if not (newer or unread):
        return ""
    absent = [place.partition(NOT_REACHED)[0] for place in places if NOT_REACHED in place]
    sentences = [f"{_name(chosen)} is loaded, the newest complete checkpoint."]
    if newer:
        missing = list_some(newer[0].missing, _SHOWN_MAX)
        others = f", nor of {plural(len(newer) - 1, 'other newer checkpoint')}" if newer[1:] else ""
        sentences.append(f"Of {_name(newer[0].save)} no intact copy was found of {missing}{others}.")
    if unread:
        named = list_some([*map(repr, unread)], _SHOWN_MAX)
        sentences.append(f"Possibly newer, but without a valid manifest: {named}.")
    if absent:
        sentences.append(f"Not reached: {list_some(absent, _SHOWN_MAX)}.")
    sentences.append(
        "To load the newer one, bring back the nodes with the rest, and load again before the next save. "
        "`replicated-ckpt ls --root ROOT` lists what is missing."
    )
    return " ".join(sentences)


def describe_silent(chosen: SaveFound, manifest: Manifest, own_node: str, searched: Mapping[str, str]) -> str:
    """For the same warning: none of the save's other nodes was reached, and they may have gone on without this one.

    Also if the bucket did not answer: it may have newer saves of nodes that are lost. `searched`: by node, each place that
    was searched. "" if a node has answered, even a replacement for a lost one, or if no other node of the save was asked.
    other node of the save was asked.
    """
    bucket = searched.get(OBJECT_NODE, "")
    if NOT_REACHED in bucket:
        return (
            f"{_name(chosen)} is the newest checkpoint on the nodes. Not reached: {bucket.partition(NOT_REACHED)[0]}, "
            "which may have newer ones. If so, load again before the next save."
        )
    others = {node: place for node, place in searched.items() if node not in (own_node, OBJECT_NODE)}
    asked = [others[node.node_id] for node in manifest.nodes if node.node_id in others]
    # Any node that answered would have listed a newer save, or a sequence beyond it.
    if not asked or any(NOT_REACHED not in place for place in others.values()):
        return ""
    silent = list_some([place.partition(NOT_REACHED)[0] for place in asked], _SHOWN_MAX)
    return (
        f"{_name(chosen)} is the newest checkpoint that was found, but none of its other nodes was reached: "
        f"{silent}. They may have saved newer ones without this node. If so, bring one of them back, and load "
        "again before the next save."
    )


def _name(save: SaveFound) -> str:
    return f"{save.checkpoint_id!r} (save {save.save_id[:8]}, sequence {save.sequence})"
