"""Nothing outside a root is read or written for somebody else, whatever symbolic links lie inside it."""

import os
from pathlib import Path


def leads_out(root: Path, checkpoint_id: str) -> bool:
    """Whether a symbolic link on the way to a checkpoint leads out of the root. One that stays inside does no harm."""
    inside = os.path.realpath(root)
    return os.path.commonpath([inside, os.path.realpath(root / checkpoint_id)]) != inside
