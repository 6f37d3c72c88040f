"""Bodies: of a request, memory of ours sent as it lies there; of an answer, no more than it may be."""

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from replicated_ckpt.errors import StoreDenied, StoreError

ANSWER_BYTES_MAX = 64 << 20
"""Of a page of a listing, or an error: a thousand keys with all that can be said of them take some megabytes."""
PAGES_MAX = 10_000
"""Of one listing, a thousand names each."""
_REDIRECTS = (301, 302, 303, 307, 308)
_REDIRECT_HINT = (
    "Give the endpoint_url of the object store itself, with https:// if it wants that: no redirect is followed."
)


class MemoryBody:
    """What botocore and urllib3 take for a file over `data`, which must not change meanwhile; `read` copies nothing.

    Of a bytearray botocore's signer makes a copy where awscrt is installed, and the socket's time-out is one for all of
    it: on a slow link no part would ever arrive. Of a file they send a piece at a time (128 KiB), each with its own
    time-out. Source: botocore 1.43, crt/auth.py and httpsession.py; CPython's socket.sendall.
    """

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        self._data = memoryview(data)
        self._position = 0

    def __len__(self) -> int:
        """Bytes in all, wherever it stands: botocore's Content-Length."""
        return len(self._data)

    def read(self, size: int | None = None) -> memoryview:
        """The next `size` bytes at most, or all the rest; empty at the end."""
        end = len(self._data) if size is None or size < 0 else self._position + size
        piece = self._data[self._position : end]
        self._position += len(piece)
        return piece

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Moves as files do, within the data: a request may be sent twice."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: len(self._data)}[whence]
        self._position = min(max(0, base + offset), len(self._data))
        return self._position

    def tell(self) -> int:
        return self._position


def without_expect(params: dict[str, Any], **_: Any) -> None:
    """Takes away `Expect: 100-continue`, which botocore adds for files, and with it a round trip before each part.

    A server that does not know it would cost a second each.
    """
    params["headers"].pop("Expect", None)


class BoundedSession:
    """botocore's HTTP session, but that an answer which is read as a whole ends, or is an error. Safe for concurrent use.

    botocore itself reads until the server stops sending. Nor does it end where it is sent elsewhere, and not told the
    region of the bucket: it asks for that in a recursion, of the server that answers alike.
    """

    def __init__(self, session: Any, store: str) -> None:
        self._session = session
        self._store = store

    def send(self, request: Any) -> Any:
        is_streamed, request.stream_output = request.stream_output, True
        response = self._session.send(request)
        if response.status_code in _REDIRECTS and "x-amz-bucket-region" not in response.headers:
            response.raw.close()
            where = urlsplit(response.headers.get("Location", ""))
            to = f"{where.scheme}://{where.netloc}" if where.netloc else "elsewhere"
            raise StoreDenied(
                self._store, "ask", "", f"{urlsplit(request.url).netloc} redirects to {to}", _REDIRECT_HINT
            )
        response.raw = _BoundedAnswer(response.raw, self._store)
        if not is_streamed:
            response.content  # noqa: B018 - it is read here, and kept
        return response

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


class _BoundedAnswer:
    """urllib3's answer: `stream` gives all of it; a shard's bytes are taken by `read` and `readinto`, as asked."""

    def __init__(self, raw: Any, store: str) -> None:
        self._raw = raw
        self._store = store

    def stream(self, *args: Any, **kwargs: Any) -> Iterator[bytes]:
        size_bytes = 0
        for piece in self._raw.stream(*args, **kwargs):
            size_bytes += len(piece)
            if size_bytes > ANSWER_BYTES_MAX:
                self._raw.close()
                raise StoreError(self._store, "ask", "", f"it answers with more than {ANSWER_BYTES_MAX} bytes")
            yield piece

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)


def read_pages(
    ask: Callable[..., Mapping[str, Any]], store: str, names: Mapping[str, str], **first: Any
) -> Iterator[Mapping[str, Any]]:
    """The pages of a listing. `names`: by parameter of the request for the next page, the field that has its value.

    Raises:
        StoreError: it has no end, or a page does not say how to go on. And what `ask` raises.
    """
    following: dict[str, Any] = {}
    for _ in range(PAGES_MAX):
        page = ask(**first, **following)
        yield page
        if not page.get("IsTruncated"):
            return
        before, following = following, {name: page[field] for name, field in names.items() if page.get(field)}
        if not following or following == before:
            raise StoreError(store, "list", "", "a page says that more follow, and not which")
    raise StoreError(store, "list", "", f"it answers with more than {PAGES_MAX} pages")
