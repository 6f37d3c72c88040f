"""A node's identity: made once, durably, in a file of its store's root."""

import json
import os
import uuid
from pathlib import Path

from replicated_ckpt.core.layout import MANIFEST_NAME, NODE_NAME
from replicated_ckpt.errors import ConfigInvalid
from replicated_ckpt.stores.files.durable import fsync_directory, make_root, translate_errors, write_file
from replicated_ckpt.stores.files.existence import is_there
from replicated_ckpt.stores.files.ownership import check_root
from replicated_ckpt.stores.local.room_to_start import keep_room_to_start


def ensure_identity(root: Path) -> str:
    """The identity of the store under `root`, made if there is none; racing callers get the same one. It is durable.

    Raises:
        ConfigInvalid, StoreError
    """
    path = root / NODE_NAME
    with translate_errors(str(root), "identify", NODE_NAME):
        if not is_there(path):
            _check_is_no_checkpoint(root)
            _make_directory(root)
            check_root(root)
            fresh = path.with_name(f".{NODE_NAME}.{uuid.uuid4().hex}")
            write_file(fresh, json.dumps({"node_id": uuid.uuid4().hex[:12]}).encode())
            try:
                os.link(fresh, path)
            except FileExistsError:
                pass  # another rank of this node was first; its identity is the node's
            finally:
                fresh.unlink()
            keep_room_to_start(root)
        fsync_directory(root)  # also the name that another process has just made
    return read_identity(root)


def _check_is_no_checkpoint(root: Path) -> None:
    if is_there(root / MANIFEST_NAME):
        hint = f"Pass the directory above as root: {root.parent}, and checkpoint_id={root.name!r}, say."
        raise ConfigInvalid(f"The root {root} is a checkpoint itself.", hint)


def _make_directory(root: Path) -> None:
    try:
        make_root(root)
    except (FileExistsError, NotADirectoryError, FileNotFoundError) as exc:
        raise ConfigInvalid(
            f"The root {root} cannot be made: {exc.strerror} ({exc.filename}).",
            "Pass a directory on a disk of this node as root; it is made if it is not there.",
        ) from exc


def find_identity(root: Path) -> str | None:
    """As `read_identity`, and None where none was made: a root that may not be looked into is not taken for that."""
    with translate_errors(str(root), "identify", NODE_NAME):
        try:
            (root / NODE_NAME).stat()
        except (FileNotFoundError, NotADirectoryError):
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
