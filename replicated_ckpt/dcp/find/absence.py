"""Errors and warnings of loads that find no checkpoint, or skip one, with the next step."""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from shlex import quote

from replicated_ckpt.core.inventory import SaveFound
from replicated_ckpt.core.layout import MANIFEST_NAME, METADATA_NAME, OBJECT_NODE
from replicated_ckpt.core.manifest import Manifest
from replicated_ckpt.core.reading.newest import Newest, is_newest
from replicated_ckpt.core.upkeep.unclaimed_files import UnclaimedFiles
from replicated_ckpt.errors import (
    CheckpointNotCommitted,
    CheckpointNotFound,
    ManifestVersionUnknown,
    PeerProtocolError,
    ReplicatedCkptError,
    ShardLost,
    StoreDenied,
    StoreUnavailable,
)
from replicated_ckpt.stores.bucket.bucket import Bucket
from replicated_ckpt.stores.local.store import NO_NODE, EmptyStore, LocalStore
from replicated_ckpt.stores.local.versions.publish import is_checkpoint
from replicated_ckpt.wording import MOVED, NOT_REACHED, OBJECT_STORE, list_some, plural

log = logging.getLogger(__name__)

THERE_ARE_OTHERS = " There are others:"
_SHOWN_MAX = 3


def hint_if_not_found(store: LocalStore, checkpoint_id: str, *, are_all_asked: bool) -> str | None:
    """The hint if a search found nothing; None if the error's own hint fits."""
    root, is_bucket_alone = store.root, isinstance(store, EmptyStore)
    # A common mistake: the checkpoint's own directory as root.
    if is_checkpoint(root):
        return f"{root} is itself a checkpoint: pass the directory above as root, and checkpoint_id={root.name!r}."
    # The error lists places that did not answer: to bring them back is the first step.
    if not are_all_asked:
        return None
    named = "the bucket" if is_bucket_alone else f"the root {root}"
    if not is_newest(checkpoint_id):
        listed = "" if is_bucket_alone else f" (`replicated-ckpt ls --root {quote(str(root))}` lists them)"
        return (
            f"Check the id{listed}. Check that {named} is the root of the save, and that its nodes take part in the "
            "load."
        )
    return (
        "On a first run nothing is saved yet: start without a load (reader.latest() and a manager's restore "
        f"return None). Otherwise, check that {named} is the root of the save."
    )


def name_own_store(store: LocalStore, own_node: str) -> dict[str, str]:
    """This node's store as a searched place, by node id. Empty: this process has no store."""
    who = f"node {own_node}" if own_node != NO_NODE else "no node's store yet"
    return {} if isinstance(store, EmptyStore) else {own_node: f"{who} at {store.root} (own store)"}


def describe_lost(manifest: Manifest, save: SaveFound, searched: Sequence[str]) -> ShardLost:
    """The error for "latest" if no save is complete. It names every lost shard of one save."""
    owners = {name: manifest.owner_of(name) for name in save.list_missing(manifest.shard_sizes)}
    return ShardLost(save.checkpoint_id, owners, with_bucket_not_asked(searched, manifest), is_latest=True)


def with_bucket_not_asked(searched: Sequence[str], manifest: Manifest) -> list[str]:
    """The places that were searched for a shard; and the bucket of its save, if the load was given no bucket."""
    url = manifest.bucket_url
    if not url or any(place.startswith(url) for place in searched):
        return [*searched]
    return [*searched, f"{url!r}: not asked: the save names it, but this load was not given object_store={url!r}"]


def describe_unreadable(damaged: Mapping[str, str], searched: Sequence[str], *, is_latest: bool) -> ShardLost:
    """The error for checkpoints whose files fail their checks. It names the first. `damaged`: the bad file, by
    checkpoint.
    """
    checkpoint_id, name = next(iter(damaged.items()))
    return ShardLost(checkpoint_id, {name: "every node of the save"}, searched, is_latest)


def describe_absence(
    store: LocalStore,
    checkpoint_id: str,
    searched: Sequence[str],
    unreached: Sequence[str],
    others: Collection[str] = (),
) -> ReplicatedCkptError:
    """The error of a load that found no save of its id.

    `unreached`: nodes and buckets that did not answer, and may have such a checkpoint. `others`: other checkpoints that
    were found.
    """
    where = "; ".join(searched)
    # A save that was begun is not absent: a job would otherwise take its loss for a first run, and start anew.
    if any(intent.checkpoint_id == checkpoint_id for intent in store.list_staged()):
        return CheckpointNotCommitted(
            f"Checkpoint {checkpoint_id!r} was begun, but never committed. Searched: {where}.",
            unreached=unreached,
        )
    newest = Newest.parse(checkpoint_id)
    what = f"No checkpoint {checkpoint_id!r}" if newest is None else newest.describe_absence()
    there = f"{THERE_ARE_OTHERS} {list_some(sorted(map(repr, others)), _SHOWN_MAX)}." if newest and others else ""
    hint = hint_if_not_found(store, checkpoint_id, are_all_asked=not unreached)
    return CheckpointNotFound(f"{what} was found.{there} Searched: {where}.", hint, unreached=unreached)


class NewerSaves:
    """Checkpoints that only a newer version of the package can read. They are skipped with a warning."""

    def __init__(self) -> None:
        self._told_by_id: dict[str, str] = {}

    @property
    def ids(self) -> Collection[str]:
        return self._told_by_id.keys()

    def record_newer(self, place: str, *checkpoint_ids: str) -> None:
        for one in checkpoint_ids:
            if one not in self._told_by_id:
                told = f"Checkpoint {one!r} in {place} has a format that only a newer version of replicated_ckpt reads"
                self._told_by_id[one] = told
                log.warning("%s: it is not loaded", told)

    def note_refusal(self, error: Exception, place: str, checkpoint_id: str) -> None:
        """As `record_newer`, if the manifest was refused for its newer format."""
        if isinstance(error, ManifestVersionUnknown):
            self.record_newer(place, checkpoint_id)

    def describe_all(self) -> tuple[str, ...]:
        """A sentence for each of them, with its place."""
        return tuple(self._told_by_id.values())

    def raise_first(self, searched: Sequence[str], is_wanted: Callable[[str], bool]) -> None:
        """Raises ManifestVersionUnknown if one of these is wanted. Called if the search found nothing else."""
        for checkpoint_id, told in self._told_by_id.items():
            if is_wanted(checkpoint_id):
                raise ManifestVersionUnknown(f"{told}. Searched: {'; '.join(searched)}.")


def describe_answer(node: str, error: ReplicatedCkptError | OSError) -> str:
    """A place that was searched, as ShardLost lists it; a place without a usable answer counts as not reached.

    A bucket that refuses the credentials, or another agent at a node's address, shows nothing about the shard. `node` is
    the node's id, or its label.
    """
    named = node if node.startswith("node ") else f"node {node}"
    place, why = OBJECT_STORE if node == OBJECT_NODE else named, getattr(error, "message", str(error))
    # Unreachable is not missing: the shard may still lie there.
    is_reached = not isinstance(error, StoreUnavailable | StoreDenied | PeerProtocolError)
    return f"{place}: {why}" if is_reached else f"{place}{NOT_REACHED} ({why})"


def describe_move(bucket: Bucket, checkpoint_id: str, save_id: str) -> tuple[str, ...]:
    """Describes how the bucket lost a save that it had when the load began. Empty: it still has the save, or cannot be
    read.
    """
    try:
        there = bucket.save_of(checkpoint_id)
    # Another error is being reported: this only adds to it.
    except ReplicatedCkptError:
        return ()
    if there is not None and there.save_id == save_id:
        return ()
    now = "no checkpoint of that id is there" if there is None else f"save {there.save_id} is there"
    return (f"{OBJECT_STORE}: it had save {save_id}, and {MOVED}: {now}",)


@dataclass(frozen=True)
class SkippedSave:
    """A save that a load skips, with its manifest. The manifest is None if no holder has one that passes its checks."""

    save: SaveFound
    raw: str = ""
    manifest: Manifest | None = None

    @property
    def missing(self) -> tuple[str, ...]:
        """The files without an intact copy."""
        if self.manifest is None:
            return (MANIFEST_NAME,)
        return self.save.list_missing(self.manifest.shard_sizes, self.save.damaged_copies) or (METADATA_NAME,)


def find_unread(unclaimed: Iterable[UnclaimedFiles], known: Collection[str]) -> list[str]:
    """The checkpoints of this package for which no answering node has a manifest that passes its checks."""
    return sorted({one.checkpoint_id for one in unclaimed if one.is_ours} - {*known})


def describe_skipped(
    chosen: SaveFound, newer: Sequence[SkippedSave], places: Sequence[str], unread: Sequence[str] = ()
) -> str:
    """The text of a load's warning: which newer saves it skips, and why; "" if none.

    `newer`: the skipped saves, the newest first. `unread`: ids that may have newer saves, from `find_unread`.
    """
    if not (newer or unread):
        return ""
    absent = [place.partition(NOT_REACHED)[0] for place in places if NOT_REACHED in place]
    sentences = [f"{_name(chosen)} is loaded, the newest complete checkpoint."]
    if newer:
        missing = list_some(newer[0].missing, _SHOWN_MAX)
        others = f"; {plural(len(newer) - 1, 'other newer checkpoint')} incomplete, too" if newer[1:] else ""
        sentences.append(f"Newer, but without an intact copy of {missing}: {_name(newer[0].save)}{others}.")
    if unread:
        named = list_some([*map(repr, unread)], _SHOWN_MAX)
        sentences.append(f"Possibly newer, but without a valid manifest: {named}.")
    if absent:
        sentences.append(f"Not reached: {list_some(absent, _SHOWN_MAX)}.")
    sentences.append(
        "To load the newer one, bring back the nodes with the missing files, and load again before the next save. "
        "`replicated-ckpt ls --root ROOT` lists what is missing."
    )
    return " ".join(sentences)


def describe_silent(chosen: SaveFound, manifest: Manifest, own_node: str, searched: Mapping[str, str]) -> str:
    """The warning that places which did not answer may have newer saves: the bucket, or all other nodes of the save.

    `searched`: by node, each searched place. "" if the bucket is not such a place, and another node answered (even a
    replacement for a lost one) or no other node of the save was asked.
    """
    bucket = searched.get(OBJECT_NODE, "")
    if NOT_REACHED in bucket:
        return (
            f"{_name(chosen)} is the newest checkpoint on the nodes. Not reached: {bucket.partition(NOT_REACHED)[0]}, "
            "which may have newer ones. If so, load again before the next save."
        )
    others = {node: place for node, place in searched.items() if node not in (own_node, OBJECT_NODE)}
    asked = [others[node.node_id] for node in manifest.nodes if node.node_id in others]
    # A node that answered would have listed a newer save, or reported its sequence.
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
