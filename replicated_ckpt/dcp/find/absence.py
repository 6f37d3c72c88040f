"""What a load that finds nothing to read says, and the next step."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote

from replicated_ckpt.core.inventory import SaveFound
from replicated_ckpt.core.layout import LATEST
from replicated_ckpt.core.manifest import Manifest
from replicated_ckpt.errors import CheckpointNotCommitted, CheckpointNotFound, ShardLost
from replicated_ckpt.stores.local.store import NOWHERE, LocalStore
from replicated_ckpt.stores.local.versions.replaceable import is_checkpoint


def hint_where_none_is(root: Path, checkpoint_id: str, *, are_all_asked: bool) -> str | None:
    """None: what the error says by itself fits."""
    if is_checkpoint(root):
        return f"{root} is a checkpoint itself: pass the directory above as root, and checkpoint_id={root.name!r}."
    if not are_all_asked:
        return None
    named = "the bucket" if str(root) == NOWHERE else f"the root {root}"
    if checkpoint_id != LATEST:
        listed = "" if str(root) == NOWHERE else f" (`replicated-ckpt ls --root {quote(str(root))}` lists them)"
        return f"Check the id{listed}, that {named} is the one that was saved to, and that its nodes take part in the load."
    return (
        f"In a first run nothing was saved yet: go on without a load (reader.latest() is None then, and a manager's "
        f"restore returns None). Else {named} is not the one that was saved to."
    )


def describe_lost(manifest: Manifest, save: SaveFound, searched: Sequence[str]) -> ShardLost:
    """The error of "latest" that names every shard of a save that no store holds whole."""
    sizes = {name: entry.size_bytes for name, entry in manifest.shards.items()}
    owners = {name: manifest.owner_of(name) for name in save.lacking(sizes)}
    return ShardLost(save.checkpoint_id, owners, searched, is_latest=True)


def describe_unreadable(damaged: Mapping[str, str], searched: Sequence[str], *, is_latest: bool) -> ShardLost:
    """What was found is there and not to be believed: the first of it, named. `damaged`: the bad file, by checkpoint."""
    checkpoint_id, name = next(iter(damaged.items()))
    return ShardLost(checkpoint_id, {name: "every node of the save"}, searched, is_latest)


def describe_absence(
    store: LocalStore, checkpoint_id: str, searched: Sequence[str], unreached: Sequence[str]
) -> CheckpointNotFound:
    """The error of a load that found no save of its id. `unreached`: the places that may have one, and did not answer."""
    where = "; ".join(searched)
    if any(intent.checkpoint_id == checkpoint_id for intent in store.list_staged()):
        return CheckpointNotCommitted(
            f"Checkpoint {checkpoint_id!r} was begun and never committed. Searched: {where}.",
            unreached=unreached,
        )
    what = "No checkpoint at all" if checkpoint_id == LATEST else f"No checkpoint {checkpoint_id!r}"
    hint = hint_where_none_is(store.root, checkpoint_id, are_all_asked=not unreached)
    return CheckpointNotFound(f"{what} was found. Searched: {where}.", hint, unreached=unreached)
