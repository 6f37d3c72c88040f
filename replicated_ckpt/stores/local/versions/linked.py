"""Links: a shard of a committed save becomes a shard of an open one, as a hard link to the same file.

No committed file is ever written in place, and no file with two names is recycled. So either save may be removed, and
the other keeps its bytes.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from replicated_ckpt import failpoints
from replicated_ckpt.core.layout import STAGING_DIR, ShardName, is_checkpoint_id, is_save_id
from replicated_ckpt.errors import ObjectCorrupt, ObjectMissing
from replicated_ckpt.stores.files.durable import fsync_directory, translate_errors
from replicated_ckpt.stores.files.existence import closing_fd
from replicated_ckpt.stores.files.locks import exclusive
from replicated_ckpt.stores.local.directories.catalog import Catalog
from replicated_ckpt.stores.local.directories.committed import open_directory
from replicated_ckpt.stores.local.directories.looked import crc_of_footer


@dataclass(frozen=True)
class CommittedShard:
    """A shard of a committed save, with its size and the CRC32C of its file."""

    checkpoint_id: str
    save_id: str
    name: str
    size_bytes: int
    crc32c: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Raises ValueError, KeyError, TypeError: the fields are no such shard."""
        checkpoint_id, save_id, name = fields["checkpoint_id"], str(fields["save_id"]), str(fields["name"])
        # All three become parts of a path.
        if not isinstance(checkpoint_id, str) or not is_checkpoint_id(checkpoint_id):
            raise ValueError(f"{str(checkpoint_id)[:80]!r} is no checkpoint id")
        if not is_save_id(save_id) or ShardName.parse(name) is None:
            raise ValueError(f"{save_id[:80]!r} and {name[:80]!r} are no save and shard")
        return cls(checkpoint_id, save_id, name, int(fields["size_bytes"]), int(fields["crc32c"]))


def link_shard(
    catalog: Catalog, path: Path, source: CommittedShard, is_bad: Callable[[os.stat_result], bool], *, durable: bool
) -> None:
    """Makes the staged `path` a hard link to the file of a committed shard. If `durable`, it survives a power loss.

    `is_bad`: whether damage was found in this file.

    Raises:
        ObjectMissing: the shard is not here, or was removed. ObjectCorrupt: it is damaged, or has other bytes.
            StoreError: the file system has no hard links, or `path` exists.
    """
    root, label = str(catalog.root), f"{source.checkpoint_id}/{source.name}"
    with translate_errors(root, "link", label):
        # No version is removed meanwhile: a file that was moved to the recycled ones may be written over.
        with exclusive(catalog.root / STAGING_DIR):
            entry = catalog.manifest_of(source.checkpoint_id, source.save_id).shards.get(source.name)
            if entry is None or (entry.size_bytes, entry.crc32c) != (source.size_bytes, source.crc32c):
                raise ObjectMissing(root, "link", label, f"it is not of save {source.save_id}")
            with (
                open_directory(catalog.root, source.checkpoint_id) as directory,
                closing_fd(directory.open(source.name)) as fd,
            ):
                status = os.fstat(fd)
                if status.st_size != source.size_bytes or is_bad(status) or crc_of_footer(fd) != source.crc32c:
                    raise ObjectCorrupt(root, "link", label, "the file is damaged")
                directory.link(source.name, path)
                if not os.path.samestat(path.lstat(), status):  # a user has put another file there meanwhile
                    path.unlink()
                    raise ObjectCorrupt(root, "link", label, "the file was replaced")
                if durable:
                    os.fsync(fd)  # with ack="peer-memory" it was committed before it was durable
        if durable:
            fsync_directory(path.parent)
    failpoints.reach("store.linked")
