"""Any bucket that fsspec supports: the general client, without the checksums and resumed uploads of our client for S3."""

import contextlib
import errno
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import fsspec
import fsspec.asyn
from fsspec.callbacks import Callback

from replicated_ckpt.errors import (
    ConfigInvalid,
    ObjectCorrupt,
    ObjectMissing,
    ReplicatedCkptError,
    StoreDenied,
    StoreError,
    StoreUnavailable,
)
from replicated_ckpt.stores.bucket_client.client import (
    AWAY_HINT,
    PART_BYTES,
    PARTS_PARALLEL,
    Listing,
    Paced,
    UploadSource,
)
from replicated_ckpt.stores.bucket_client.url import ObjectTarget, missing_package

LIST_TIMEOUT_S = 300.0
"""Limit of one read, small write, removal or listing. A listing comes in pages of a thousand names."""


def _without_redirects(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of s3fs with redirects off. Its HTTP client would follow one to any host, even a cloud's metadata service."""
    try:
        from aiobotocore.config import AioConfig
        from aiobotocore.httpsession import AIOHTTPSession
    except ImportError:  # the client's own import raises the error with its hint
        return dict(options)
    if "http_session_cls" not in inspect.signature(AioConfig).parameters:  # an older release has no such option
        return dict(options)

    class Session(AIOHTTPSession):  # type: ignore[misc]
        async def _get_session(self, proxy_url: str | None) -> Any:
            return _NoRedirects(await super()._get_session(proxy_url))

    return {**options, "config_kwargs": {"http_session_cls": Session, **(options.get("config_kwargs") or {})}}


class _NoRedirects:
    """An HTTP session of aiohttp that follows no redirect."""

    def __init__(self, session: Any) -> None:
        self._session = session

    def request(self, *args: Any, **kwargs: Any) -> Any:
        return self._session.request(*args, **{**kwargs, "allow_redirects": False})


class _PacedCallback(Callback):  # type: ignore[misc]
    """Limits the pace of an upload: fsspec reports sent bytes here, and waits for the call to return."""

    def __init__(self, paced: Paced) -> None:
        super().__init__()
        self._paced = paced

    def relative_update(self, inc: int = 1) -> None:
        self._paced(inc)


class FsspecClient:
    """An ObjectClient over fsspec. See ObjectClient for the contract."""

    has_conditions = False

    def __init__(self, target: ObjectTarget, part_bytes: int = PART_BYTES) -> None:
        self.target = target
        self._part_bytes = part_bytes
        # A cached instance may hold an old token, and a cached listing hides objects of other nodes.
        defaults: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
        if target.scheme in ("s3", "s3a"):
            defaults |= {"default_block_size": part_bytes, "max_concurrency": PARTS_PARALLEL}
            target = replace(target, options=_without_redirects(target.options))
        if target.is_directory:
            defaults = {"auto_mkdir": True}
        if target.is_process_local:
            defaults = {}
        try:
            self._fs, self._root = fsspec.core.url_to_fs(target.url, **{**defaults, **target.options})
        except ImportError as exc:
            raise missing_package(target, exc) from exc
        except (ValueError, TypeError) as exc:
            detail = target.scrub(f"{type(exc).__name__}: {exc}")[:400]
            # No "from exc" here or below: the original error may quote a credential, and tracebacks are logged.
            raise ConfigInvalid(
                f"{target.url} cannot be reached through fsspec: {detail}.", "Correct the URL or storage_options."
            ) from None

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}".rstrip("/")

    def list_keys(self, directory: str) -> Listing:
        path = self._path(directory)
        with self.translate_errors("list", directory):
            try:
                entries = self._ask("ls", path, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return Listing()
            # Some back ends list the directory itself, as an empty object.
            inside = [entry for entry in entries if entry["name"].rstrip("/") != path]
            name_of = {id(entry): entry["name"].rstrip("/").rpartition("/")[2] for entry in inside}
            return Listing(
                {name_of[id(entry)]: int(entry["size"]) for entry in inside if entry["type"] == "file"},
                tuple(name_of[id(entry)] for entry in inside if entry["type"] == "directory"),
            )

    def _ask(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        """Calls the file system, with a time limit if it is asynchronous.

        Without one, s3fs would follow an endless listing, and gcsfs would wait for ever.
        """
        if not self._fs.async_impl:
            return getattr(self._fs, verb)(*args, **kwargs)
        return fsspec.asyn.sync(self._fs.loop, getattr(self._fs, f"_{verb}"), *args, timeout=LIST_TIMEOUT_S, **kwargs)

    def read(self, key: str, offset: int, target: memoryview) -> None:
        if not target:
            return
        with self.translate_errors("read", key):
            try:
                raw = self._ask("cat_file", self._path(key), start=offset, end=offset + len(target))
            except OSError as exc:
                if exc.errno != errno.EINVAL:
                    raise
                raw = b""  # s3fs raises EINVAL for a range behind the object's end
        # No client raises an error for a short answer with a matching length: only this comparison finds it.
        if len(raw) != len(target):
            raise ObjectCorrupt(
                self.target.url, "read", key, f"asked for {len(target)} bytes at {offset}, got {len(raw)}"
            )
        target[:] = raw

    def size_bytes(self, key: str) -> int:
        with self.translate_errors("look at", key):
            return int(self._ask("size", self._path(key)))

    def put(self, key: str, data: bytes) -> None:
        with self.translate_errors("write", key):
            self._ask("pipe_file", self._path(key), data)

    def version(self, key: str) -> str:
        """Always "": fsspec has no conditional writes that all its back ends support."""
        del key
        return ""

    def put_over(self, key: str, data: bytes, version: str) -> bool:
        del version
        self.put(key, data)
        return True

    def put_shard(self, key: str, source: UploadSource, paced: Paced) -> None:
        # `put_file` reads the file itself, so its blocks are checked before.
        source.check_all()
        with self.translate_errors("write", key):
            is_s3 = self.target.scheme in ("s3", "s3a")
            extra = {"chunksize": self._part_bytes, "max_concurrency": PARTS_PARALLEL} if is_s3 else {}
            # Not `open(path, "wb")`: an exception inside its block would commit a truncated object.
            self._fs.put_file(source.path, self._path(key), callback=_PacedCallback(paced), **extra)
        source.check_stored(self.target.url, key, self.size_bytes(key))

    def copy(self, source: str, key: str) -> None:
        with self.translate_errors("copy", source):
            self._ask("cp_file", self._path(source), self._path(key))

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            with self.translate_errors("delete", key), contextlib.suppress(FileNotFoundError):
                self._ask("rm_file", self._path(key))

    def end_unfinished(self, prefix: str, older_than_s: float) -> int:
        """Does nothing: fsspec has no call for it. A life-cycle rule of the bucket can do it."""
        del prefix, older_than_s
        return 0

    def close(self) -> None:
        """Does nothing: fsspec closes its own connections."""

    @contextmanager
    def translate_errors(self, op: str, key: str) -> Iterator[None]:
        """Translates errors of fsspec's back ends: OSErrors by kind, and exceptions of their SDKs by class name."""
        try:
            yield
        except ReplicatedCkptError:
            raise
        except FileNotFoundError as exc:
            raise ObjectMissing(self.target.url, op, key, self._detail(exc)) from None
        except PermissionError as exc:
            raise StoreDenied(self.target.url, op, key, self._detail(exc)) from None
        except (TimeoutError, ConnectionError) as exc:
            raise StoreUnavailable(self.target.url, op, key, self._detail(exc), AWAY_HINT) from None
        except OSError as exc:
            raise StoreError(self.target.url, op, key, self._detail(exc)) from None
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as exc:
            detail = f"its answer is not valid: {self._detail(exc)}"
            raise StoreError(self.target.url, op, key, detail) from None
        except Exception as exc:
            # A built-in exception that is none of these is a bug of ours, not an answer of the store.
            if type(exc).__module__.partition(".")[0] in ("builtins", "replicated_ckpt"):
                raise
            if "Credential" in type(exc).__name__:
                raise StoreDenied(self.target.url, op, key, self._detail(exc)) from None
            raise StoreUnavailable(self.target.url, op, key, self._detail(exc), AWAY_HINT) from None

    def _detail(self, exc: BaseException) -> str:
        return self.target.scrub(f"{type(exc).__name__}: {exc}")[:400]
