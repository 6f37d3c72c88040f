"""Nothing outside a root is read or written for another user, whatever symbolic links lie inside it."""

import os
from pathlib import Path

from replicated_ckpt.stores.files.existence import is_link


def leads_out(root: Path, checkpoint_id: str) -> bool:
    """Whether a symbolic link on the way to a checkpoint leads out of the root, or nowhere."""
    inside, real = os.path.realpath(root), os.path.realpath(root / checkpoint_id)
    if os.path.commonpath((inside, real)) != inside:
        return True
    at, end = Path(real), Path(inside)
    while at != end:
        if is_link(at):  # what links lead around in a circle is left as it is
            return True
        at = at.parent
    return False
