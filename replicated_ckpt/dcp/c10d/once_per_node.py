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
    """Returns the bytes with this digest: from the file in `directory` if another rank of this node has put them there.

    Else it returns the bytes from `fetch`, and puts them into the file for the other ranks. A file with another digest is
    ignored. In these cases each rank fetches for itself: the directory is another user's or cannot be written, its disk is
    full, or the rank that fetches is stopped. The caller checks fetched bytes. The directory has one such file, which the
    next call with other bytes replaces. With `directory=None` this rank has no node, and fetches. Any number of processes
    may call it at once.

    Raises:
        Whatever `fetch` raises.
    """
    if directory is None or is_of_another(directory):  # another user's files are not trusted
        return fetch()
    path = directory / NAME
    if (raw := _read_left(path, sha256)) is not None:
        return raw
    with _lock_alone(directory) as is_alone:
        # Another rank may have left it while this one waited for the lock.
        if (raw := _read_left(path, sha256)) is not None:
            return raw
        raw = fetch()
        # Without the lock another rank may be writing the same file.
        if is_alone:
            _leave(path, raw)
    return raw


@contextlib.contextmanager
def _lock_alone(directory: Path) -> Iterator[bool]:
    """Whether no other rank is in the block. False: another rank has been in it for too long, or nothing can be locked
    here.

    It locks the directory, because the file in it is replaced. Nothing else locks the directory.
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


def _read_left(path: Path, sha256: str) -> bytes | None:
    try:
        raw = read_private(path)
    except (OSError, StoreDenied):  # none was left, or none that this rank can read: it is fetched
        return None
    # The file of an earlier decision, or one cut off by a full disk, has another digest.
    return raw if hashlib.sha256(raw).hexdigest() == sha256 else None


def _leave(path: Path, raw: bytes) -> None:
    try:
        write_file(path, raw, 0o600, is_flushed=False)  # after a crash no call is left that it could answer
    except OSError as exc:
        log.info("the decision is not shared with the other ranks of this node, which read it by themselves: %s", exc)
