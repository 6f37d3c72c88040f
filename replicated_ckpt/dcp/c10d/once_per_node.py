"""One rank of each node fetches bytes that all ranks read, and puts them into the directory of its node's agent."""

import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

from replicated_ckpt.errors import ReplicatedCkptError, StoreDenied
from replicated_ckpt.stores.files.durable import write_file
from replicated_ckpt.stores.files.locks import exclusive
from replicated_ckpt.stores.files.ownership import is_of_another, read_private

log = logging.getLogger(__name__)

WAIT_S = 2.0
"""How long another rank of the node may take to fetch the bytes. After that this rank fetches them itself."""
NAME = "decision"


def read_once_per_node(directory: Path | None, sha256: str, fetch: Callable[[], bytes]) -> bytes:
    """Returns the bytes with this digest, from the file in `directory` if another rank of this node has written it.

    Otherwise this rank calls `fetch`, and writes the file for the other ranks. A file with another digest is ignored and
    replaced. The caller checks fetched bytes. Any number of processes may call this at once.

    Every rank fetches for itself if `directory` is None, belongs to another user or cannot be written, if its disk is full,
    or if the rank that fetches is stopped.

    Raises:
        Whatever `fetch` raises.
    """
    if directory is None or is_of_another(directory):  # another user's files are not trusted
        return fetch()
    path = directory / NAME
    if (raw := _read_shared(path, sha256)) is not None:
        return raw
    with _lock_alone(directory) as is_alone:
        # Another rank may have written it while this one waited for the lock.
        if (raw := _read_shared(path, sha256)) is not None:
            return raw
        raw = fetch()
        # Without the lock another rank may be writing the same file.
        if is_alone:
            _write_shared(path, raw)
    return raw


@contextlib.contextmanager
def _lock_alone(directory: Path) -> Iterator[bool]:
    """Yields whether this rank has the lock. False: another rank has held it for WAIT_S, or nothing can be locked here.

    The lock is on the directory, because the file in it is replaced. Nothing else locks the directory.
    """
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(exclusive(directory, WAIT_S))
        # A stopped rank, or a file system without locks, costs time only.
        except (OSError, ReplicatedCkptError) as exc:
            log.info("this rank reads the decision by itself: %s", exc)
            yield False
        else:
            yield True


def _read_shared(path: Path, sha256: str) -> bytes | None:
    try:
        raw = read_private(path)
    except (OSError, StoreDenied):  # there is no file that this rank can read, so it fetches
        return None
    # The file of an earlier decision, or one cut off by a full disk, has another digest.
    return raw if hashlib.sha256(raw).hexdigest() == sha256 else None


def _write_shared(path: Path, raw: bytes) -> None:
    try:
        write_file(path, raw, 0o600, is_flushed=False)  # after a crash no rank needs it
    except OSError as exc:
        log.info("the decision is not shared with the other ranks of this node, which read it by themselves: %s", exc)
