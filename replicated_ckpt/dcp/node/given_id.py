"""The checkpoint id that a program passes, as a name under a root."""

import os
from contextlib import suppress
from pathlib import PurePath

from replicated_ckpt.core.layout import checkpoint_id_under
from replicated_ckpt.environment import check_encodable


def id_under(root: str, given: str | os.PathLike[str]) -> str:
    """As `checkpoint_id_under`, for a name that this process can give to a directory.

    Programs written for stock storage pass a path: a relative one that leads below the root from the working directory, as
    `ckpt/step-5` does with the root `ckpt`, means that place. So does an absolute one that goes by a symbolic link.

    Raises:
        ConfigInvalid: it is no such name.
    """
    text = os.fspath(given)
    check_encodable("checkpoint_id", text)
    path = PurePath(text)
    above = _root_from_here(root)
    if path.is_absolute():
        # An unprintable path is refused below: it must not reach the file system first.
        above = _find_root(root, path) if text.isprintable() else None
    if above is not None and above in path.parents:
        text = str(path.relative_to(above))
    return checkpoint_id_under(root, text)


def _root_from_here(root: str) -> PurePath | None:
    """The root as a relative path; None: it does not lie below the working directory."""
    with suppress(FileNotFoundError):  # the working directory was removed
        path = PurePath(os.path.relpath(root))
        return path if path.parts and path.parts[0] != ".." else None
    return None


def _find_root(root: str, path: PurePath) -> PurePath | None:
    """The directory above `path` that is the root, whatever links either goes by."""
    real = os.path.realpath(root)
    return next((above for above in path.parents if os.path.realpath(above) == real), None)
