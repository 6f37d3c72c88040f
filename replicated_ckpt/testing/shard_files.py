"""Whole shard files, data and footer, to test stores with."""

import os
import random
from collections.abc import Iterable
from pathlib import Path

from replicated_ckpt.core.integrity.checksum import BLOCK_BYTES, BlockHasher, BlockTable, Bytes, crc32c
from replicated_ckpt.stores.bucket_client.upload_source import UploadSource
from replicated_ckpt.stores.verified import Expected

DATA_BYTES = 2 * BLOCK_BYTES + 12345
"""Three blocks, the last of them short."""


def make_data(size_bytes: int = DATA_BYTES, *, seed: int = 1) -> bytes:
    """The same bytes for the same seed."""
    return random.Random(seed).randbytes(size_bytes)  # noqa: S311 - reproducible, not secret


def table_of(pieces: Iterable[Bytes], block_bytes: int = BLOCK_BYTES) -> BlockTable:
    """Block table of data given as pieces in order."""
    hasher = BlockHasher(block_bytes)
    for piece in pieces:
        hasher.update(piece)
    return hasher.table()


def add_footer(data: bytes) -> tuple[bytes, BlockTable]:
    """A shard file of this data, and its block table."""
    table = table_of([data])
    return data + table.encode(), table


def expect(raw: bytes) -> Expected:
    """Size and checksum of a shard file, as in a manifest."""
    return Expected(len(raw), crc32c(raw))


def open_source(folder: Path, raw: bytes, expected: Expected | None = None) -> UploadSource:
    """A shard file to upload. `expected` is the saved shard, if the file has changed since."""
    path = folder / "__0_0.distcp"
    path.write_bytes(raw)
    return UploadSource(os.open(path, os.O_RDONLY | os.O_CLOEXEC), "node", path.name, expected or expect(raw))


def flip_bit(raw: bytes, position: int) -> bytes:
    """The bytes with one bit flipped; a negative position counts from the end."""
    changed = bytearray(raw)
    changed[position] ^= 1
    return bytes(changed)
