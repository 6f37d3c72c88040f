"""One listing of a checkpoint's directory: its shard files, and its manifests by the state of their versions."""

import os
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from stat import S_ISREG

from replicated_ckpt.core.integrity.checksum import FOOTER_TAIL_BYTES, decode_footer, footer_bytes_of
from replicated_ckpt.core.layout import (
    MANIFEST_NAME,
    METADATA_NAME,
    ShardName,
    is_ours,
    is_unfinished,
    parse_marked,
    parse_version_metadata,
    replaced_name,
)
from replicated_ckpt.stores.files.durable import is_unreadable, read_exactly
from replicated_ckpt.stores.files.existence import open_plain_file


class Looked:
    """The entries of a directory at one moment. `entries` None: the disk has lost the directory; its files are unknown."""

    def __init__(self, checkpoint_id: str, entries: "Iterable[os.DirEntry[str]] | None") -> None:
        self.checkpoint_id = checkpoint_id
        self.is_lost = entries is None
        self._entries = {entry.name: entry for entry in entries or ()}

    @property
    def has_manifest(self) -> bool:
        """Whether there is a manifest of the published version, or the disk has lost the directory."""
        return self.is_lost or MANIFEST_NAME in self._entries

    @property
    def manifest_names(self) -> list[str]:
        """The names of the manifests there, the published one's first."""
        return [*([MANIFEST_NAME] if self.has_manifest else []), *map(replaced_name, self.replaced)]

    @property
    def is_described(self) -> bool:
        """Whether it has the manifest of any version, published or replaced."""
        return self.has_manifest or bool(self.replaced)

    @property
    def holds_checkpoint(self) -> bool:
        """Whether any file of a checkpoint lies there, of this package or of stock torch, complete or not."""
        return self.is_described or METADATA_NAME in self._entries or bool(self.shards)

    def has(self, name: str) -> bool:
        """Whether anything has this name."""
        return name in self._entries

    @property
    def directories(self) -> "list[os.DirEntry[str]]":
        """Subdirectories that may be checkpoints, too, sorted by name. Links are excluded."""
        found = [
            entry for entry in self._entries.values() if entry.name[0] != "." and entry.is_dir(follow_symlinks=False)
        ]
        return sorted(found, key=lambda entry: entry.name)

    @cached_property
    def replaced(self) -> tuple[str, ...]:
        """The ids of replaced versions, by the names of their manifests."""
        return self._marked("replaced")

    @cached_property
    def version_metadata(self) -> tuple[str, ...]:
        """Ids of versions whose metadata has its own name: replaced or being published. Their manifest may be missing."""
        return tuple(sorted(filter(None, map(parse_version_metadata, self._entries))))

    @cached_property
    def gone(self) -> tuple[str, ...]:
        """The ids of versions whose removal has begun and is not complete."""
        return self._marked("gone")

    @cached_property
    def shards(self) -> tuple[str, ...]:
        return tuple(name for name in self._entries if ShardName.parse(name) is not None)

    @cached_property
    def unfinished(self) -> tuple[str, ...]:
        return tuple(name for name in self._entries if is_unfinished(name))

    @property
    def others(self) -> list[str]:
        """Files and directories of users, which are not part of a checkpoint."""
        return [name for name in self._entries if not is_ours(name)]

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Bytes of each shard file. 0, which no shard has, for an unreadable file: it exists, and is damaged."""
        found = {name: self.size_of(name) for name in self.shards}
        return {name: size for name, size in found.items() if size is not None}

    def size_of(self, name: str) -> int | None:
        """Bytes of a plain file; None: there is none of that name. Raises OSError"""
        entry = self._entries.get(name)
        if entry is None:
            return None
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            return None
        except OSError as exc:
            if is_unreadable(exc):
                return 0
            raise
        return status.st_size if S_ISREG(status.st_mode) else None

    def _marked(self, mark: str) -> tuple[str, ...]:
        parsed = map(parse_marked, self._entries)
        return tuple(sorted(found[1] for found in parsed if found is not None and found[0] == mark))


def crc_of_footer(fd: int) -> int | None:
    """The CRC32C of a shard's file, computed from its footer alone; None if the footer is damaged."""
    size = os.fstat(fd).st_size
    footer_bytes = footer_bytes_of(_end(fd, size, FOOTER_TAIL_BYTES), size)
    table = None if footer_bytes is None else decode_footer(_end(fd, size, footer_bytes), size)
    return None if table is None else table.file_crc()


def _end(fd: int, size: int, count: int) -> memoryview:
    target = memoryview(bytearray(min(count, size)))
    return target[: read_exactly(fd, target, size - len(target))]


def is_without_footer(path: str | Path) -> bool:
    """Whether a file lacks the footer of this package's shards, as stock torch's files do. Raises OSError"""
    with open_plain_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        return footer_bytes_of(_end(file.fileno(), size, FOOTER_TAIL_BYTES), size) is None
