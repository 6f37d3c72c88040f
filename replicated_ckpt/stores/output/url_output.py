"""The output of a conversion at any URL that fsspec supports: written under part names, in one pass, then moved."""

import contextlib
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from replicated_ckpt.errors import ConfigInvalid, ObjectCorrupt, ReplicatedCkptError
from replicated_ckpt.stores.bucket_client.client import PART_BYTES
from replicated_ckpt.stores.bucket_client.fsspec import FsspecClient
from replicated_ckpt.stores.bucket_client.url import ObjectTarget
from replicated_ckpt.stores.output.output import READ_BYTES, Output, Stream


class _UrlStream(Stream):
    def __init__(self, files: "_Files", path: str) -> None:
        super().__init__()
        self._files = files
        self._path = path
        self._file = files.opened(path, "wb")

    def _append(self, view: memoryview) -> None:
        with self._files.translate_errors("write", self._path):
            for start in range(0, len(view), PART_BYTES):
                self._file.write(bytes(view[start : start + PART_BYTES]))

    def close(self) -> None:
        with self._files.translate_errors("write", self._path):
            self._file.close()

    def abort(self) -> None:
        with contextlib.suppress(ReplicatedCkptError):
            self.close()  # fsspec has no common abort: the part file is closed, and removed later


class _Files(FsspecClient):
    """The few operations on files that an output needs. Paths are relative to the directory of the output."""

    def opened(self, path: str, mode: str) -> Any:
        with self.translate_errors("open", path):
            return self._fs.open(self._path(path), mode, block_size=PART_BYTES)

    def has(self, path: str) -> bool:
        with self.translate_errors("look at", path):
            return bool(self._fs.exists(self._path(path)))

    def has_file(self, path: str) -> bool:
        with self.translate_errors("look at", path):
            return bool(self._fs.isfile(self._path(path)))

    def move(self, path: str, to: str) -> None:
        with self.translate_errors("publish", to):
            if self.target.is_directory:  # fsspec 2025: the move into a new directory fails
                self._fs.makedirs(self._path(to).rpartition("/")[0], exist_ok=True)
            self._fs.mv(self._path(path), self._path(to))

    def remove(self, path: str) -> None:
        with self.translate_errors("remove", path), contextlib.suppress(FileNotFoundError):
            self._fs.rm(self._path(path), recursive=True)


class UrlOutput(Output):
    """A file or a directory at a URL. Its parts lie beside it under `.<name>.part-<8 digits>/`.

    A bucket cannot rename: `publish` copies each file and removes its part, in the order of creation.

    Raises:
        ConfigInvalid: the place cannot be used. StoreDenied, StoreUnavailable, StoreError
    """

    def __init__(
        self,
        url: str,
        storage_options: Mapping[str, Any] | None,
        *,
        is_directory: bool,
        may_replace: Callable[[str], bool] | None = None,
    ) -> None:
        super().__init__()
        parent, _, name = url.rstrip("/").rpartition("/")
        if not parent.partition("://")[2]:
            raise ConfigInvalid(f"{url} names no file or directory in a bucket.", "Name one, such as s3://bucket/name.")
        self.label = url
        self._files = _Files(ObjectTarget.check_supported(parent, storage_options))
        self._name = name
        self._is_directory = is_directory
        self._may_replace = may_replace
        self._part = f".{name}.part-{uuid.uuid4().hex[:8]}"
        self._check()

    def _check(self) -> None:
        if self._may_replace is None and self._files.has(self._name):
            raise ConfigInvalid(f"{self.label} exists; nothing was written.", "Name another path, or pass --overwrite.")
        if self._may_replace is not None:
            found = self._files.list_keys(f"{self._name}/")
            inside = (*found.sizes, *found.directories)
            if inside and not self._is_directory:  # back ends would move the file into it
                raise ConfigInvalid(f"{self.label} is not a file.", "Name another path; nothing was written.")
            if self._is_directory and self._files.has_file(self._name):  # the directory would take its place
                raise ConfigInvalid(f"{self.label} is not a directory.", "Name another path; nothing was written.")
            others = [name for name in inside if not self._may_replace(name)]
            if others:
                listed = ", ".join(sorted(others)[:5])
                raise ConfigInvalid(f"{self.label} holds other files, too: {listed}.", "Move them.")

    def _open(self, name: str) -> Stream:
        return _UrlStream(self._files, f"{self._part}/{name}")

    def _pieces(self, name: str) -> Iterator[bytes]:
        path = f"{self._part}/{name}"
        file = self._files.opened(path, "rb")
        with self._files.translate_errors("read back", path), file:
            while piece := file.read(READ_BYTES):
                yield piece

    def _give_names(self) -> None:
        self._check()
        if self._is_directory and self._may_replace is not None:
            self._files.remove(self._name)
        for name, written in self.written.items():
            final = f"{self._name}/{name}" if self._is_directory else self._name
            self._files.move(f"{self._part}/{name}", final)
            # The copy happens in the store: an error in it may leave a short object, and no exception.
            if self._files.size_bytes(final) != written.size_bytes:
                detail = f"it does not have {written.size_bytes} bytes there"
                raise ObjectCorrupt(self.label, "publish", name, detail, "Convert it again, with --overwrite.")
        self._remove_parts()

    def _remove_parts(self) -> None:
        with contextlib.suppress(ReplicatedCkptError):
            self._files.remove(self._part)

    def _close(self) -> None:
        self._files.close()
