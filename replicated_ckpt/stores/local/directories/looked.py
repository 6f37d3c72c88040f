"""One look at the directory of a checkpoint: the shard files in it, and the manifests by what became of their versions."""

import os
from collections.abc import Iterable
from functools import cached_property
from stat import S_ISREG

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
from replicated_ckpt.stores.files.durable import is_unreadable


class Looked:
    """What lies in a directory at one moment. `entries` None: the disk has lost it, and what lay in it cannot be read."""

    def __init__(self, checkpoint_id: str, entries: "Iterable[os.DirEntry[str]] | None") -> None:
        self.checkpoint_id = checkpoint_id
        self.is_lost = entries is None
        self._entries = {entry.name: entry for entry in entries or ()}

    @property
    def has_manifest(self) -> bool:
        """Whether anything lies there under the name of a manifest, or what lay there cannot be read."""
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
        """Whether any file of a checkpoint lies there: one of ours, or of stock torch, whole or not."""
        return self.is_described or METADATA_NAME in self._entries or bool(self.shards)

    def has(self, name: str) -> bool:
        """Whether anything has this name."""
        return name in self._entries

    @property
    def directories(self) -> "list[os.DirEntry[str]]":
        """The directories in it that may be checkpoints', too, by name; a link to one is none."""
        found = [
            entry for entry in self._entries.values() if entry.name[0] != "." and entry.is_dir(follow_symlinks=False)
        ]
        return sorted(found, key=lambda entry: entry.name)

    @cached_property
    def replaced(self) -> tuple[str, ...]:
        """The saves of which a newer one has the name, by their manifests."""
        return self._marked("replaced")

    @cached_property
    def version_metadata(self) -> tuple[str, ...]:
        """The saves whose metadata has a name of its own: replaced, or being published; their manifest may be gone."""
        return tuple(sorted(filter(None, map(parse_version_metadata, self._entries))))

    @cached_property
    def gone(self) -> tuple[str, ...]:
        """The saves whose removal has begun and did not end."""
        return self._marked("gone")

    @cached_property
    def shards(self) -> tuple[str, ...]:
        return tuple(name for name in self._entries if ShardName.parse(name) is not None)

    @cached_property
    def unfinished(self) -> tuple[str, ...]:
        return tuple(name for name in self._entries if is_unfinished(name))

    @property
    def others(self) -> list[str]:
        """What is not ours: files and directories that a user has put there."""
        return [name for name in self._entries if not is_ours(name)]

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Bytes of each shard file; 0, which no shard has, where the disk cannot tell: it is there, and damaged."""
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
