"""The next step where a load finds nothing."""

from pathlib import Path
from shlex import quote

from replicated_ckpt.core.layout import LATEST
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
