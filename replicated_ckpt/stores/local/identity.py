"""A node's identity: made once, durably, in a file of its store's root."""

import errno
import json
import os
import uuid
from pathlib import Path

from replicated_ckpt.core.layout import MANIFEST_NAME, NODE_NAME
from replicated_ckpt.errors import ConfigInvalid
from replicated_ckpt.stores.files.durable import fsync_directory, make_root, translate_errors, write_file
from replicated_ckpt.stores.files.existence import is_there, list_prefixed
from replicated_ckpt.stores.files.ownership import claim_root
from replicated_ckpt.stores.files.renames import rename_if_free
from replicated_ckpt.stores.local.room_to_start import keep_room_to_start
from replicated_ckpt.wording import plural

_SHOWN_MAX = 3


def ensure_identity(root: Path) -> str:
    """The identity of the store under `root`, made if there is none; racing callers get the same one. It is durable.

    Raises:
        ConfigInvalid, StoreError
    """
    path = root / NODE_NAME
    with translate_errors(str(root), "identify", NODE_NAME):
        if not is_there(path):
            check_place(root)
            _make_directory(root)
            claim_root(root)
            fresh = path.with_name(f".{NODE_NAME}.{uuid.uuid4().hex}")
            write_file(fresh, json.dumps({"node_id": uuid.uuid4().hex[:12]}).encode())
            try:
                _name_if_free(fresh, path)
            finally:
                fresh.unlink(missing_ok=True)
            keep_room_to_start(root)
        fsync_directory(root)  # also the name that another process has just made
    return read_identity(root)


def _name_if_free(fresh: Path, path: Path) -> None:
    """Unless another rank of this node was first: its identity is the node's. A file system may have no hard links."""
    try:
        os.link(fresh, path)
    except FileExistsError:
        return
    except OSError as exc:
        if exc.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        rename_if_free(fresh, path)


def check_place(root: Path) -> None:
    """Where no store was made yet, the root is neither a checkpoint nor the directory above stores.

    The store would take the checkpoints of those for its own.

    Raises:
        ConfigInvalid: it is one of these. OSError
    """
    if is_there(root / NODE_NAME):
        return
    if is_there(root / MANIFEST_NAME):
        hint = f"Pass the directory above as root: {root.parent}, and checkpoint_id={root.name!r}, say."
        raise ConfigInvalid(f"The root {root} is a checkpoint itself.", hint)
    _check_no_stores_within(root)


def _check_no_stores_within(root: Path) -> None:
    within = sorted(str(path) for path in list_prefixed(root, "") if _is_store(path))
    if within:
        hint = f"Name one store, or a directory of its own: {' or '.join(within[:_SHOWN_MAX])}."
        raise ConfigInvalid(f"{root} is no node's store, and holds {plural(len(within), 'store')}.", hint)


def _is_store(path: Path) -> bool:
    try:
        return is_there(path / NODE_NAME)
    except PermissionError:  # another user's, and none of whose checkpoints would be seen
        return False


def _make_directory(root: Path) -> None:
    try:
        make_root(root)
    except (FileExistsError, NotADirectoryError, FileNotFoundError) as exc:
        raise ConfigInvalid(
            f"The root {root} cannot be made: {exc.strerror} ({exc.filename}).",
            "Pass a directory on a disk of this node as root; it is made if it is not there.",
        ) from exc


def find_identity(root: Path) -> str | None:
    """As `read_identity`, and None where none was made: a root that may not be looked into is not taken for that.

    Raises:
        ConfigInvalid: stores lie in it; their checkpoints are not its own.
    """
    with translate_errors(str(root), "identify", NODE_NAME):
        if not is_there(root / NODE_NAME):
            _check_no_stores_within(root)
            return None
    return read_identity(root)


def read_identity(root: Path) -> str:
    """The identity of the store under `root`; never writes.

    Raises:
        ConfigInvalid: node.json is there and holds no identity.
        StoreError: it cannot be read.
    """
    path = root / NODE_NAME
    with translate_errors(str(root), "identify", NODE_NAME):
        raw = path.read_bytes()
    try:
        return str(json.loads(raw)["node_id"])
    except (ValueError, KeyError, TypeError) as exc:
        raise ConfigInvalid(
            f"{path} holds no node identity: {raw[:80]!r}.",
            'Remove the file if the store is a fresh one; else write the id back, {"node_id": "..."}, which '
            "`replicated-ckpt status` shows on the other nodes.",
        ) from exc
