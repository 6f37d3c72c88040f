"""Nothing outside a root is read or written for somebody else, whatever symbolic links lie inside it."""

import os
from pathlib import Path


def leads_out(root: Path, checkpoint_id: str) -> bool:
    """Whether a symbolic link on the way to a checkpoint leads out of the root, or nowhere."""
    inside, real = Path(os.path.realpath(root)), Path(os.path.realpath(root / checkpoint_id))
    if not real.is_relative_to(inside):
        return True
    return any(path.is_symlink() for path in (real, *real.parents) if path != inside and path.is_relative_to(inside))
