"""A request's body that is memory of ours, sent as it lies there: no copy, and a deadline on each piece."""

import os
from typing import Any


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
