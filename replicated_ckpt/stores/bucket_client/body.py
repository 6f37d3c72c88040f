"""Bodies of requests and answers: requests are sent from memory without a copy, answers have a limit in bytes."""

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from replicated_ckpt.errors import StoreDenied, StoreError

ANSWER_BYTES_MAX = 64 << 20
"""Limit of a page of a listing, or an error. A thousand keys with all their fields take some megabytes."""
PAGES_MAX = 10_000
"""Most pages of one listing. A page has a thousand names."""
_REDIRECTS = (301, 302, 303, 307, 308)
_REDIRECT_HINT = (
    "Pass the endpoint_url of the object store itself, with https:// if it needs that: redirects are not followed."
)


class MemoryBody:
    """A file object over `data` for botocore and urllib3. `data` must not change meanwhile; `read` copies nothing.

    A bytearray as a body has two faults. With awscrt installed, botocore's signer copies it. And one socket time-out covers
    all of it, so on a slow link no part would ever arrive. A file is sent in pieces of 128 KiB, each with its own time-out.
    Source: botocore 1.43, crt/auth.py and httpsession.py; CPython's socket.sendall.
    """

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        self._data = memoryview(data)
        self._position = 0

    def __len__(self) -> int:
        """All bytes, whatever the position: botocore's Content-Length."""
        return len(self._data)

    def read(self, size: int | None = None) -> memoryview:
        """The next `size` bytes at most, or all the rest; empty at the end."""
        end = len(self._data) if size is None or size < 0 else self._position + size
        piece = self._data[self._position : end]
        self._position += len(piece)
        return piece

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Moves as a file does, within the data. botocore rewinds it to send a request again."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: len(self._data)}[whence]
        self._position = min(max(0, base + offset), len(self._data))
        return self._position

    def tell(self) -> int:
        return self._position


def without_expect(params: dict[str, Any], **_: Any) -> None:
    """Removes `Expect: 100-continue`, which botocore adds for files and which costs a round trip before each part.

    With a server that does not support it, each part would wait for a second.
    """
    params["headers"].pop("Expect", None)


class BoundedSession:
    """botocore's HTTP session with a limit for answers that are read as a whole. Safe for concurrent use.

    botocore itself reads until the server stops sending. On a redirect without a bucket region it asks the same server for
    the region, in an endless recursion. This session refuses such a redirect.
    """

    def __init__(self, session: Any, store: str) -> None:
        self._session = session
        self._store = store

    def send(self, request: Any) -> Any:
        # Always streamed: botocore would read an endless answer into memory before anything counts it.
        is_streamed, request.stream_output = request.stream_output, True
        response = self._session.send(request)
        if response.status_code in _REDIRECTS and "x-amz-bucket-region" not in response.headers:
            response.raw.close()  # its body is not read: the connection cannot be used again
            where = urlsplit(response.headers.get("Location", ""))
            to = f"{where.scheme}://{where.netloc}" if where.netloc else "elsewhere"
            raise StoreDenied(
                self._store,
                "send a request to",
                "",
                f"{urlsplit(request.url).netloc} redirects to {to}",
                _REDIRECT_HINT,
            )
        response.raw = _BoundedAnswer(response.raw, self._store)
        if not is_streamed:
            response.content  # noqa: B018 - reads and caches the body
        return response

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


class _BoundedAnswer:
    """urllib3's answer with a limit for `stream`. A shard is read by `read` and `readinto`, without that limit."""

    def __init__(self, raw: Any, store: str) -> None:
        self._raw = raw
        self._store = store

    def stream(self, *args: Any, **kwargs: Any) -> Iterator[bytes]:
        size_bytes = 0
        for piece in self._raw.stream(*args, **kwargs):
            size_bytes += len(piece)
            if size_bytes > ANSWER_BYTES_MAX:
                self._raw.close()
                raise StoreError(
                    self._store, "send a request to", "", f"it answers with more than {ANSWER_BYTES_MAX} bytes"
                )
            yield piece

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)


def read_pages(
    ask: Callable[..., Mapping[str, Any]], store: str, names: Mapping[str, str], **first: Any
) -> Iterator[Mapping[str, Any]]:
    """The pages of a listing. `names` maps each parameter of the next request to the field of a page that has its value.

    Raises:
        StoreError: the listing has no end, or a page has no new marker. Also the errors of `ask`.
    """
    following: dict[str, Any] = {}
    for _ in range(PAGES_MAX):
        page = ask(**first, **following)
        yield page
        if not page.get("IsTruncated"):
            return
        before, following = following, {name: page[field] for name, field in names.items() if page.get(field)}
        # A server that ignores the marker would send its first page for ever.
        if not following or following == before:
            raise StoreError(store, "list", "", "a page announces a next page, but has no marker for it")
    raise StoreError(store, "list", "", f"it answers with more than {PAGES_MAX} pages")
