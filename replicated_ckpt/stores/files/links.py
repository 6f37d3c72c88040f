"""More names for one file: hard links, and copies where the file system has none."""

import errno
import os
from pathlib import Path

from replicated_ckpt.stores.files.durable import write_file
from replicated_ckpt.stores.files.existence import is_there

_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


def name_small_file(path: Path, target: Path) -> None:
    """Gives a small file one more name, or copies it if the file system has no hard links."""
    if not link_file(path, target):
        write_file(target, path.read_bytes())


def link_file(path: Path, target: Path) -> bool:
    """Gives a file one more name. False: the file system has no hard links. Raises OSError"""
    try:
        if is_there(target) and os.path.samestat(path.lstat(), target.lstat()):
            return True
        path.lstat()
        # A name of an interrupted try: it may be of other bytes, and link(2) does not replace.
        target.unlink(missing_ok=True)
        os.link(path, target, follow_symlinks=False)
    except OSError as exc:
        if exc.errno not in _NO_LINKS:
            raise
        return False
    return True
