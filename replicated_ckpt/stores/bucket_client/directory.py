"""The bucket at `file://`: a directory that all nodes mount. Links in it are not followed, as others may write there."""

import contextlib
import errno
import os
import stat
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from replicated_ckpt.errors import ObjectCorrupt, ObjectMissing, StoreDenied, StoreError, StoreUnavailable
from replicated_ckpt.stores.bucket_client.client import AWAY_HINT, Listing, Paced, UploadSource
from replicated_ckpt.stores.bucket_client.url import ObjectTarget
from replicated_ckpt.stores.files.durable import read_exactly, write_all
from replicated_ckpt.stores.files.existence import closing_fd, is_plain_file, open_plain

_PIECE_BYTES = 4 << 20
# A try fails only if another process removes the empty directory at that instant.
_CREATE_TRIES = 100
_NO_OBJECT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_LINK_HINT = (
    "A link or file lies where the bucket needs a directory, and links in a bucket are not followed. Find "
    "out who put it there, and remove it."
)


class DirectoryClient:
    """An ObjectClient over a directory. See ObjectClient for the contract.

    The directory itself may be a link. Below it each component is opened on its own, and links are neither objects nor
    directories. Each object is first written under a temporary name; `delete` also removes such files after a crash.
    After a power loss an object may be short. It never counts as a shard, since sizes and checksums are compared before
    a commit and at every read.
    """

    has_conditions = False

    def __init__(self, target: ObjectTarget) -> None:
        self.target = target
        self._root = Path(target.url.partition("://")[2])

    def list_keys(self, directory: str) -> Listing:
        sizes: dict[str, int] = {}
        directories = []
        with self._translate_errors("list", directory):
            try:
                with self._open_parent(f"{directory}.") as (fd, name), self._scan(fd, name) as entries:
                    for entry in entries:
                        if entry.is_dir(follow_symlinks=False):
                            directories.append(entry.name)
                        elif entry.is_file(follow_symlinks=False):
                            with contextlib.suppress(FileNotFoundError):  # removed since the listing
                                sizes[entry.name] = entry.stat(follow_symlinks=False).st_size
            except (FileNotFoundError, NotADirectoryError):
                if is_plain_file(self._root):  # a mistyped URL must not look like an empty bucket
                    detail, hint = "it is a file, not a directory", "Correct the URL: name a directory."
                    raise StoreError(self.target.url, "list", directory, detail, hint) from None
                return Listing()
        return Listing(sizes, tuple(directories))

    def read(self, key: str, offset: int, target: memoryview) -> None:
        if not target:
            return
        with (
            self._translate_errors("read", key),
            self._open_parent(key) as (directory, name),
            # Plain and not a link: another user of the share may have put a pipe or a link there.
            closing_fd(open_plain(name, os.O_NOFOLLOW, dir_fd=directory)) as fd,
        ):
            count = read_exactly(fd, target, offset)
        if count != len(target):
            detail = f"asked for {len(target)} bytes at {offset}, got {count}"
            raise ObjectCorrupt(self.target.url, "read", key, detail)

    def size_bytes(self, key: str) -> int:
        with self._translate_errors("look at", key), self._open_parent(key) as (directory, name):
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
            if not stat.S_ISREG(status.st_mode):
                raise FileNotFoundError(errno.ENOENT, "No plain file lies there")
            return status.st_size

    def put(self, key: str, data: bytes) -> None:
        with self._write(key) as fd:
            write_all(fd, data)

    def version(self, key: str) -> str:
        """Always "": a file system has no conditional writes."""
        del key
        return ""

    def put_over(self, key: str, data: bytes, version: str) -> bool:
        del version
        self.put(key, data)
        return True

    def put_shard(self, key: str, source: UploadSource, paced: Paced) -> None:
        step = source.piece_bytes(_PIECE_BYTES)
        memory = memoryview(bytearray(min(step, source.size_bytes)))
        with self._write(key) as fd:
            for offset in range(0, source.size_bytes, step):
                piece = memory[: min(step, source.size_bytes - offset)]
                paced(len(piece))
                source.read(offset, piece)
                write_all(fd, piece)
        # The file that has the name now: another process may have replaced it meanwhile.
        source.check_stored(self.target.url, key, self.size_bytes(key))

    def copy(self, source: str, key: str) -> None:
        """Makes a hard link, which is safe, as no object is written in place."""
        with (
            self._translate_errors("copy", source),
            self._open_parent(source) as (there, old),
            self._open_parent(key, is_made=True) as (directory, name),
        ):
            part = f"{name}.{uuid.uuid4().hex}.part"
            os.link(old, part, src_dir_fd=there, dst_dir_fd=directory, follow_symlinks=False)
            os.rename(part, name, src_dir_fd=directory, dst_dir_fd=directory)
            with contextlib.suppress(FileNotFoundError):  # rename does nothing if the key is a link of the same file
                os.unlink(part, dir_fd=directory)

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            with (
                self._translate_errors("delete", key),
                contextlib.suppress(FileNotFoundError, NotADirectoryError),
                self._open_parent(key) as (directory, name),
            ):
                with self._scan(directory, ".") as entries:
                    parts = [e.name for e in entries if e.name.startswith(f"{name}.") and e.name.endswith(".part")]
                # The object goes last: if a crash comes before, the next removal finds the parts again.
                for left in (*parts, name):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(left, dir_fd=directory)
            self._remove_empty(key.split("/")[:-1])

    def _remove_empty(self, parts: list[str]) -> None:
        """Removes directories that a deleted object leaves empty; otherwise each look into the bucket would list them."""
        with contextlib.suppress(OSError):  # the directory holds other objects, or another process has removed it
            for depth in range(len(parts), 0, -1):
                with self._open_parent("/".join(parts[:depth])) as (above, name):
                    os.rmdir(name, dir_fd=above)

    def end_unfinished(self, prefix: str, older_than_s: float) -> int:
        """Does nothing: the names of unfinished files contain their object's name, and `delete` removes both."""
        del prefix, older_than_s
        return 0

    def close(self) -> None:
        """Nothing is open between two calls."""

    @contextmanager
    def _open_parent(self, key: str, *, is_made: bool = False) -> Iterator[tuple[int, str]]:
        """The open directory of an object, and the object's name in it. With `is_made`, missing directories are made.

        Raises:
            NotADirectoryError: a link is on the way. OSError
        """
        *parts, name = key.split("/")
        if is_made:
            self._root.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as opened:
            # O_PATH: the user need not be allowed to list the directory.
            fd = opened.enter_context(closing_fd(os.open(self._root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)))
            for part in parts:
                if is_made:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(part, dir_fd=fd)
                # Component by component: the kernel would follow a link in the middle of a path.
                flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                fd = opened.enter_context(closing_fd(os.open(part, flags, dir_fd=fd)))
            yield fd, name

    @contextmanager
    def _scan(self, directory: int, name: str) -> Iterator[Iterator[os.DirEntry[str]]]:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        with closing_fd(os.open(name, flags, dir_fd=directory)) as fd, os.scandir(fd) as entries:
            yield entries

    @contextmanager
    def _write(self, key: str) -> Iterator[int]:
        """A descriptor for the block to write to. Only a complete file gets the key; an old object stays until then."""
        with self._translate_errors("write", key), contextlib.ExitStack() as opened:
            directory, name, part, fd = self._create_part(opened, key)
            try:
                with closing_fd(fd):
                    yield fd
                # After close: an NFS server may report a full disk only there.
                os.rename(part, name, src_dir_fd=directory, dst_dir_fd=directory)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(part, dir_fd=directory)
                raise

    def _create_part(self, opened: contextlib.ExitStack, key: str) -> tuple[int, str, str, int]:
        """Creates the temporary file. Tries again if another process removes the directory, which is empty until then."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        for _ in range(_CREATE_TRIES):
            with contextlib.suppress(FileNotFoundError):
                directory, name = opened.enter_context(self._open_parent(key, is_made=True))
                part = f"{name}.{uuid.uuid4().hex}.part"
                return directory, name, part, os.open(part, flags, 0o666, dir_fd=directory)
        raise FileNotFoundError(errno.ENOENT, "Another process removes its directory again and again")

    @contextmanager
    def _translate_errors(self, op: str, key: str) -> Iterator[None]:
        try:
            yield
        except PermissionError as exc:
            raise StoreDenied(self.target.url, op, key, _detail(exc)) from exc
        except (TimeoutError, ConnectionError) as exc:
            raise StoreUnavailable(self.target.url, op, key, _detail(exc), AWAY_HINT) from exc
        except OSError as exc:
            # ENOTDIR and ELOOP come from a file or link on the way: no object lies under that key.
            if exc.errno not in _NO_OBJECT:
                raise StoreError(self.target.url, op, key, _detail(exc)) from exc
            if op != "write":
                raise ObjectMissing(self.target.url, op, key, _detail(exc)) from exc
            raise StoreError(self.target.url, op, key, _detail(exc), _LINK_HINT) from exc


def _detail(exc: OSError) -> str:
    return f"{type(exc).__name__}: {exc.strerror or exc}"
