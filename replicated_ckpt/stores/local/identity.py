"""A node's identity: made once, durably, in a file of its store's root."""

import errno
import json
import os
import uuid
from pathlib import Path

from replicated_ckpt.core.layout import MANIFEST_NAME, METADATA_NAME, NODE_NAME, STAGING_DIR
from replicated_ckpt.errors import ConfigInvalid
from replicated_ckpt.stores.files.durable import (
    fsync_directory,
    make_root,
    rename_if_free,
    translate_errors,
    write_file,
)
from replicated_ckpt.stores.files.existence import is_directory, is_there
from replicated_ckpt.stores.files.ownership import claim_root
from replicated_ckpt.stores.local.directories.roots import check_is_apart, read_identity
from replicated_ckpt.stores.local.versions.full_disk import keep_room_to_start

FRESH_IDENTITY = f".{NODE_NAME}."
"""Prefix of the temporary name under which an identity is written first."""


def ensure_identity(root: Path) -> str:
    """The durable identity of the store under `root`, made if there is none. Racing callers get the same one.

    A staging area is made only after the identity is durable. Without one, the identity may be new, and is fsynced here.

    Raises:
        ConfigInvalid, StoreError
    """
    path = root / NODE_NAME
    with translate_errors(str(root), "identify", NODE_NAME):
        is_durable = is_there(path) and is_directory(root / STAGING_DIR)
        if not is_there(path):
            check_place(root)
            _make_directory(root)
            claim_root(root)
            fresh = path.with_name(f"{FRESH_IDENTITY}{uuid.uuid4().hex}.{os.getpid()}.tmp")
            write_file(fresh, json.dumps({"node_id": uuid.uuid4().hex[:12]}).encode(), is_name_flushed=False)
            try:
                _name_if_free(fresh, path)
            finally:
                fresh.unlink(missing_ok=True)
            # Now, while there is room: later the disk may be full.
            keep_room_to_start(root)
        # Also if another process made the file: it may have been killed before its fsync.
        if not is_durable:
            fsync_directory(root)
    return read_identity(root)


def _name_if_free(fresh: Path, path: Path) -> None:
    """Names the file unless another rank of this node was first. Without hard links it renames the file."""
    try:
        os.link(fresh, path)
    except FileExistsError:
        return
    except OSError as exc:
        if exc.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        rename_if_free(fresh, path)


def check_place(root: Path) -> None:
    """Checks that a new root is not a checkpoint, lies in no other store, and has no store in it.

    Of two nested stores, the outer one would treat the inner one's checkpoints as its own.

    Raises:
        ConfigInvalid: the root is one of these. OSError
    """
    if is_there(root / NODE_NAME):
        return
    if is_there(root / MANIFEST_NAME):
        hint = f"Pass the directory above as root: {root.parent}, and an id such as checkpoint_id={root.name!r}."
        raise ConfigInvalid(f"The root {root} is itself a checkpoint.", hint)
    check_is_apart(root)


def _make_directory(root: Path) -> None:
    try:
        make_root(root)
    except (FileExistsError, NotADirectoryError, FileNotFoundError) as exc:
        raise ConfigInvalid(
            f"The root {root} cannot be created: {exc.strerror} ({exc.filename}).",
            "Pass a directory on a disk of this node as root; it is created if missing.",
        ) from exc


def find_identity(root: Path) -> str | None:
    """As `read_identity`, but returns None if no identity was made. A root that this user may not read raises an error.

    Raises:
        ConfigInvalid: the root lies inside a store, or above one, whose checkpoints are not its own.
    """
    with translate_errors(str(root), "identify", NODE_NAME):
        if not is_there(root / NODE_NAME):
            # A root that is itself a checkpoint is no error here: a reader just finds nothing in it.
            if not any(is_there(root / name) for name in (MANIFEST_NAME, METADATA_NAME)):
                check_is_apart(root)
            return None
    return read_identity(root)
