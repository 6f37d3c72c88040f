"""Where a node keeps the columns of large `.metadata` files: in the agent's directory, named by size and CRC32C of those.

Checkpoints of one layout have equal `.metadata`, so what the first load of a layout leaves serves all later ones.
"""

import contextlib
import fcntl
import logging
import os
from pathlib import Path

from torch.distributed.checkpoint.metadata import Metadata

from replicated_ckpt.dcp.metadata.columns import ColumnsInvalid, decode_columns, encode_columns
from replicated_ckpt.dcp.planning.kept_layouts import holds_paths_only
from replicated_ckpt.errors import MetadataUnsafe, ReplicatedCkptError
from replicated_ckpt.stores.files.durable import write_file
from replicated_ckpt.stores.files.existence import is_directory, is_there
from replicated_ckpt.stores.files.locks import HeldLock
from replicated_ckpt.stores.files.ownership import is_of_another, read_private

log = logging.getLogger(__name__)

SIZE_MIN_BYTES = 64 << 10
"""Of a `.metadata` that has columns: some 400 chunks. A smaller one is read in a fortieth of a second."""
KEPT_MAX = 2
"""How many columns a node keeps: those that were made last."""
LOCK_NAME = "columns.lock"
"""A file of its own: agents settle saves under a lock of the directory, and columns take seconds to make."""
_SUFFIX = ".columns"


class ColumnsFile:
    """The columns of one `.metadata` in a directory of this user's. Nothing depends on them: what fails is logged."""

    @classmethod
    def of(cls, directory: Path, size_bytes: int, crc: int) -> "ColumnsFile | None":
        """None: the `.metadata` is small, or the agent's directory is missing, or another user's."""
        try:
            is_fit = size_bytes >= SIZE_MIN_BYTES and is_directory(directory) and not is_of_another(directory)
        except OSError as exc:
            log.warning("the columns in %s are not used: %s", directory, exc)
            return None
        return cls(directory, size_bytes, crc) if is_fit else None

    def __init__(self, directory: Path, size_bytes: int, crc: int) -> None:
        self._directory = directory
        self._path = directory / f"metadata-{crc:08x}-{size_bytes}{_SUFFIX}"
        self._of = size_bytes, crc
        self._is_bad = False

    def read(self) -> Metadata | None:
        """What the `.metadata` says, or None: there are no columns, or none to be believed."""
        try:
            return decode_columns(read_private(self._path), *self._of, str(self._path))
        except FileNotFoundError:
            return None
        except (ColumnsInvalid, ReplicatedCkptError, OSError) as exc:
            log.warning("%s is not used, and .metadata is read in its place: %s", self._path, exc)
            self._is_bad = isinstance(exc, ColumnsInvalid | MetadataUnsafe)
            return None

    def keep(self, metadata: Metadata) -> None:
        """Makes the columns, unless another rank of the node does. The oldest are removed."""
        if metadata.planner_data is not None and not holds_paths_only(metadata.planner_data):
            return
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            lock = HeldLock(os.open(self._directory / LOCK_NAME, flags, 0o600))
            try:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(lock.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    self._keep(metadata)
            finally:
                lock.release()
        except OSError as exc:
            log.warning("a load from %s reads the whole .metadata again next time: %s", self._directory, exc)

    def _keep(self, metadata: Metadata) -> None:
        raw = encode_columns(metadata, *self._of) if self._is_bad or not is_there(self._path) else None
        if raw is None:
            return
        write_file(self._path, raw, 0o600)
        there = sorted(self._directory.glob(f"*{_SUFFIX}"), key=lambda path: path.stat().st_mtime_ns)
        for path in there[:-KEPT_MAX]:
            path.unlink(missing_ok=True)
