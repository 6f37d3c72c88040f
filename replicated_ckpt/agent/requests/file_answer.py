"""An answer that is a file, or a range of one."""

import os
import re
from dataclasses import dataclass

from replicated_ckpt.agent.requests.request import Answer, Request
from replicated_ckpt.errors import ObjectCorrupt, PeerProtocolError

_RANGE = re.compile(r"bytes=([0-9]{1,18})-([0-9]{1,18})?")


@dataclass(frozen=True)
class FileAnswer(Answer):
    """An answer that is a range of a file; its sender closes `fd`."""

    fd: int = -1
    offset: int = 0
    length: int = 0
    size_bytes: int = 0
    is_partial: bool = False


def file_answer(request: Request, fd: int) -> FileAnswer:
    """The file behind `fd`, which is taken over, or the range of it that the request names.

    Raises:
        ObjectCorrupt: the file ends before the range. PeerProtocolError: it is no range.
    """
    try:
        size = os.fstat(fd).st_size
        offset, end = _range(request.headers.get("Range"), size)
    except BaseException:
        os.close(fd)
        raise
    is_partial = request.headers.get("Range") is not None
    return FileAnswer(b"", fd=fd, offset=offset, length=end - offset, size_bytes=size, is_partial=is_partial)


def _range(header: str | None, size_bytes: int) -> tuple[int, int]:
    if header is None:
        return 0, size_bytes
    match = _RANGE.fullmatch(header.strip())
    if match is None:
        raise PeerProtocolError(f"Range {header[:60]!r} is not understood.")
    first = int(match[1])
    end = min(int(match[2]) + 1 if match[2] else size_bytes, size_bytes)
    if first >= end:
        raise ObjectCorrupt("this agent", "GET", f"bytes from {first} on", f"the file has {size_bytes} bytes")
    return first, end
