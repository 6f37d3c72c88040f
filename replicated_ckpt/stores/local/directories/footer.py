"""Checksums from the footer of a shard file on disk, without reading its data."""

import os
from pathlib import Path

from replicated_ckpt.core.integrity.checksum import FOOTER_TAIL_BYTES, decode_footer, footer_bytes_of
from replicated_ckpt.stores.files.durable import read_exactly
from replicated_ckpt.stores.files.plain import open_plain_file


def crc_of_footer(fd: int) -> int | None:
    """The CRC32C of a shard's file, computed from its footer alone; None if the footer is damaged."""
    size = os.fstat(fd).st_size
    footer_bytes = footer_bytes_of(_end(fd, size, FOOTER_TAIL_BYTES), size)
    table = None if footer_bytes is None else decode_footer(_end(fd, size, footer_bytes), size)
    return None if table is None else table.file_crc()


def _end(fd: int, size: int, count: int) -> memoryview:
    target = memoryview(bytearray(min(count, size)))
    return target[: read_exactly(fd, target, size - len(target))]


def is_without_footer(path: str | Path) -> bool:
    """Whether a file lacks the footer of this package's shards, as stock torch's files do. Raises OSError"""
    with open_plain_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        return footer_bytes_of(_end(file.fileno(), size, FOOTER_TAIL_BYTES), size) is None
