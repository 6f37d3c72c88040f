"""Roots of stores: each has a node.json with an identity, and no root lies inside another."""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from replicated_ckpt.core.layout import NODE_NAME, PARTS_MAX
from replicated_ckpt.errors import ConfigInvalid, StoreError
from replicated_ckpt.stores.files.durable import SHORTAGES, translate_errors
from replicated_ckpt.stores.files.existence import is_plain_file
from replicated_ckpt.wording import plural

_SHOWN_MAX = 3


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
            'If the store is new, remove the file. Otherwise write the id back, {"node_id": "..."}, which '
            "`replicated-ckpt status` shows on the other nodes.",
        ) from exc


def check_is_apart(root: Path) -> None:
    """Raises ConfigInvalid: the root of a new store lies inside a store, or above one. OSError"""
    outer, within = find_store_above(root), find_stores_within(root)
    if outer is not None:
        real = Path(os.path.realpath(root))
        beside = outer.with_name(f"{outer.name}-{real.name}")
        raise ConfigInvalid(
            describe_store_above(root, outer),
            f"Give each store its own directory, such as {beside}. For checkpoints of the store at {outer}, pass that "
            f"as root, and an id such as checkpoint_id='{real.relative_to(outer)}/step-1'.",
        )
    if within:
        hint = f"Name one store, or another directory: {' or '.join(map(str, within[:_SHOWN_MAX]))}."
        raise ConfigInvalid(describe_stores_within(root, within), hint)


def describe_store_above(root: Path, outer: Path) -> str:
    return f"The root {root} lies in another store, whose root is {outer}."


def describe_stores_within(root: Path, within: Sequence[Path]) -> str:
    return f"{root} is not a node's store, and holds {plural(len(within), 'store')}."


def find_store_above(root: Path) -> Path | None:
    """The store in which a directory lies. Raises OSError"""
    return next((place for place in Path(os.path.realpath(root)).parents if is_store(place)), None)


def find_stores_within(root: Path) -> list[Path]:
    """The stores below a directory, where checkpoints of its own would lie. Raises OSError"""
    return sorted(_walk_to_stores(root, 1))


def _walk_to_stores(directory: Path, depth: int) -> Iterator[Path]:
    try:
        with os.scandir(directory) as entries:
            below = [
                Path(entry.path) for entry in entries if entry.name[0] != "." and entry.is_dir(follow_symlinks=False)
            ]
    except (FileNotFoundError, NotADirectoryError, PermissionError):  # checkpoints in there would be invisible, too
        return
    for path in below:
        if is_store(path):
            yield path
        elif depth < PARTS_MAX:
            yield from _walk_to_stores(path, depth + 1)


def is_store(directory: str | Path) -> bool:
    """Whether a directory is a store's root. A directory with an unreadable node.json counts as one.

    A directory that cannot be searched does not count: it is closed to this user, or the disk has lost it.

    Raises:
        OSError: the process is out of descriptors or memory.
    """
    try:
        return is_plain_file(f"{directory}/{NODE_NAME}") and bool(read_identity(Path(directory)))
    except ConfigInvalid:  # some other file of that name
        return False
    except OSError as exc:
        if exc.errno in SHORTAGES:
            raise
        return False
    except StoreError:
        return True
