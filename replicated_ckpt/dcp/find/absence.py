"""What a load that finds nothing to read says, and the next step."""

from collections.abc import Sequence
from pathlib import Path
from shlex import quote

from replicated_ckpt.core.inventory import SaveFound
from replicated_ckpt.core.layout import LATEST
from replicated_ckpt.core.manifest import Manifest
from replicated_ckpt.errors import ShardLost
from replicated_ckpt.stores.local.store import NOWHERE
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
    return ShardLost(save.checkpoint_id, owners, with_unasked_bucket(searched, manifest), is_latest=True)


def with_unasked_bucket(searched: Sequence[str], manifest: Manifest) -> list[str]:
    """The places that were searched for a shard, and the bucket that its save was to go to if the load was given none."""
    url = manifest.bucket_url
    if not url or any(place.startswith(url) for place in searched):
        return [*searched]
    return [*searched, f"{url}: not asked, where the save was to go, too: this load was not given object_store={url!r}"]
