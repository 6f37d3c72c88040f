"""The file system `rckpt://` for fsspec: checkpoints as read-only files, read from any intact copy.

`rckpt:///nvme/ckpt/step-100/.metadata` is a file of `step-100` in the store `/nvme/ckpt`. The package's entry point
registers the scheme, so readers of fsspec's URLs, such as torch's FsspecReader, load from the surviving copies.
"""

import errno
import os
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
from fsspec.spec import AbstractBufferedFile

from replicated_ckpt.core.layout import METADATA_NAME, NODE_NAME
from replicated_ckpt.dcp.c10d.world import World
from replicated_ckpt.dcp.find.rendezvous import AgreedError, meet
from replicated_ckpt.dcp.find.survey import Survey
from replicated_ckpt.dcp.load.metadata_copies import places_of, read_verified_metadata
from replicated_ckpt.dcp.load.shard_reader import ShardReader
from replicated_ckpt.dcp.metadata.metadata import encode_metadata
from replicated_ckpt.errors import ConfigInvalid
from replicated_ckpt.stores.files.durable import translate_errors
from replicated_ckpt.stores.files.existence import is_there
from replicated_ckpt.stores.local.store import LocalStore

_KEY = "rckpt://"
_NO_STORE = (
    "Pass rckpt://ROOT/ID, with the root that the job saves to. On a replaced node, run a save or an agent there first."
)
_READ_ONLY = "rckpt:// is read-only. Save with ReplicatedWriter."


@dataclass(frozen=True)
class _Checkpoint:
    """A checkpoint that a search has found. Its files are those of this save, even if another save replaces it later."""

    store: LocalStore
    survey: Survey
    metadata: bytes
    size_by_shard: Mapping[str, int]

    @property
    def sizes(self) -> Mapping[str, int]:
        return {METADATA_NAME: len(self.metadata), **self.size_by_shard}


class ReplicatedFileSystem(fsspec.AbstractFileSystem):
    """Read-only files of checkpoints, for this process alone. A shard's file ends with its last entry, without the footer.

    The first use of a checkpoint's directory searches the nodes for it. After `invalidate_cache`, the next use does, too.
    """

    protocol = "rckpt"
    root_marker = "/"
    # fsspec must not share an instance: it has found checkpoints, and another job must search itself.
    cachable = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._found: dict[str, _Checkpoint] = {}

    def invalidate_cache(self, path: str | None = None) -> None:
        self._found.clear()
        super().invalidate_cache(path)

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Name, size and type of a path.

        Raises:
            FileNotFoundError: the checkpoint has no such file. Also the errors of a load.
        """
        path = str(self._strip_protocol(path))
        directory, name = posixpath.split(path)
        if not _is_file(name):
            self._find(path)
            return {"name": path, "size": 0, "type": "directory"}
        size = self._find(directory).sizes.get(name)
        if size is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{_KEY}{path}")
        return {"name": path, "size": size, "type": "file"}

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """The files of a checkpoint."""
        path = self._strip_protocol(path)
        found = [
            {"name": f"{path}/{name}", "size": size, "type": "file"} for name, size in self._find(path).sizes.items()
        ]
        return found if detail else [each["name"] for each in found]

    def _open(self, path: str, mode: str = "rb", **options: Any) -> "_File":
        if mode != "rb":
            raise OSError(errno.EROFS, _READ_ONLY, f"{_KEY}{path}")
        size = self.info(path)["size"]
        return _File(self, path, self._find(posixpath.dirname(path)), **{**options, "size": size})

    def _find(self, path: str) -> _Checkpoint:
        if path not in self._found:
            self._found[path] = _look_for(path)
        return self._found[path]


class _File(AbstractBufferedFile):
    """One file that is open for reading, for one thread."""

    def __init__(self, fs: ReplicatedFileSystem, path: str, checkpoint: _Checkpoint, **options: Any) -> None:
        super().__init__(fs, path, "rb", **options)
        self._checkpoint = checkpoint
        self._name = posixpath.basename(path)
        self._reader: ShardReader | None = None

    def _fetch_range(self, start: int, end: int) -> bytes:
        """Verified bytes from this node or another one. Raises ShardLost: there is no intact copy."""
        if self._name == METADATA_NAME:
            return self._checkpoint.metadata[start:end]
        if self._reader is None:
            store, survey = self._checkpoint.store, self._checkpoint.survey
            self._reader = ShardReader(store, store.read_node_id(), survey, [self._name], _KEY)
        return bytes(self._reader.read_range(self._name, start, end - start))

    def close(self) -> None:
        """Closes the connections, and reports bad copies to the agents of their nodes, which mend them."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.report_suspects()
            reader.close()
        super().close()


def _is_file(name: str) -> bool:
    return name == METADATA_NAME or name.endswith(".distcp")


def _look_for(path: str) -> _Checkpoint:
    """Finds the checkpoint of a directory.

    Raises:
        ConfigInvalid: the directory lies in no store. And the errors of a load, such as CheckpointNotFound and ShardLost.
    """
    with translate_errors(path, "look for", NODE_NAME):
        root = next((each for each in Path(path).parents if is_there(each / NODE_NAME)), None)
    if root is None:
        raise ConfigInvalid(f"{_KEY}{path} lies in no store: no directory above it has a {NODE_NAME}.", _NO_STORE)
    store = LocalStore(root)
    try:
        survey = meet(store, World(0, 1, None), os.path.relpath(path, root))
    except AgreedError as exc:
        raise exc.error from None
    metadata = read_verified_metadata(store, survey, None, _KEY, set())
    sizes = {name: max(each.end for each in ranges) for name, ranges in places_of(metadata).items() if ranges}
    return _Checkpoint(store, survey, encode_metadata(metadata), sizes)
