"""What the footer of a shard file on disk implies, without its data."""

import os
from pathlib import Path

from replicated_ckpt.core.integrity.checksum import FOOTER_TAIL_BYTES, decode_footer, footer_bytes_of
from replicated_ckpt.stores.files.durable import read_exactly
from replicated_ckpt.stores.files.plain import open_plain_file


def crc_of_footer(fd: int) -> int | None:
    """The CRC32C that a shard's file has if all its blocks are as its footer says; None if the footer is damaged."""
    size = os.fstat(fd).st_size
    footer_bytes = footer_bytes_of(_end(fd, size, FOOTER_TAIL_BYTES), size)
    table = None if footer_bytes is None else decode_footer(_end(fd, size, footer_bytes), size)
    return None if table is None else table.file_crc()


def _end(fd: int, size: int, count: int) -> memoryview:
    target = memoryview(bytearray(min(count, size)))
    return target[: read_exactly(fd, target, size - len(target))]


def is_without_footer(path: str | Path) -> bool:
    """Whether a file does not end as this package ends its shards, as one that stock torch has written. Raises OSError"""
    with open_plain_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        return footer_bytes_of(_end(file.fileno(), size, FOOTER_TAIL_BYTES), size) is None
