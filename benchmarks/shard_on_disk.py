"""Shards of any size in the package's format, made with little memory and without torch."""

import os
from pathlib import Path

from replicated_ckpt.core.integrity.checksum import BlockHasher, BlockTable
from replicated_ckpt.stores.local.shard_file import FileSink

_PIECE_BYTES = 16 << 20


def written_shard(path: Path, size_bytes: int) -> BlockTable:
    """Writes a shard with `size_bytes` of data, in which no two pieces are equal. Returns its checksum table."""
    hasher, sink = BlockHasher(), FileSink.create(path)
    piece = bytearray(os.urandom(min(_PIECE_BYTES, size_bytes)))
    for offset in range(0, size_bytes, _PIECE_BYTES):
        piece[:8] = offset.to_bytes(8, "little")
        part = memoryview(piece)[: size_bytes - offset]
        hasher.update(part)
        sink.write(part)
    table = hasher.table()
    sink.write(memoryview(table.encode()))
    sink.finish(table)
    return table
