"""The footer of a shard without a manifest: the manifest is lost, and the footer still has the checksums."""

from dataclasses import dataclass

from replicated_ckpt.core.integrity.archive import Fetch
from replicated_ckpt.core.integrity.checksum import (
    FOOTER_TAIL_BYTES,
    MAGIC,
    BlockTable,
    decode_footer,
    first_bad_block,
    footer_bytes_of,
    size_with_footer,
)
from replicated_ckpt.core.integrity.zip_crc import ItemDamaged

_PIECE_BYTES = 4 << 20


@dataclass(frozen=True)
class OwnFooter:
    """The footer of a file. `table` None: there is none, or, if `is_damaged`, a damaged one."""

    table: BlockTable | None = None
    is_damaged: bool = False


def find_footer(fetch: Fetch, size_bytes: int, items_end: int | None = None) -> OwnFooter:
    """The footer of a file, recognized by its last bytes, or by its size if that is the items' size and a footer's."""
    # Stock torch writes an empty file for a rank without items.
    if size_bytes < FOOTER_TAIL_BYTES:
        return OwnFooter()
    tail = fetch(size_bytes - FOOTER_TAIL_BYTES, FOOTER_TAIL_BYTES)
    # The damage may lie in the magic itself: then only the size shows that there was a footer.
    is_as_long = items_end is not None and size_bytes == size_with_footer(items_end)
    if bytes(tail[: len(MAGIC)]) != MAGIC and not is_as_long:
        return OwnFooter()
    footer_bytes = footer_bytes_of(tail, size_bytes) or 0
    table = decode_footer(fetch(size_bytes - footer_bytes, footer_bytes), size_bytes)
    return OwnFooter(table, is_damaged=table is None)


def check_blocks(fetch: Fetch, table: BlockTable) -> None:
    """Reads all data of a file and compares it with its footer.

    Raises:
        ItemDamaged: a block differs from its checksum.
    """
    at_once = max(1, _PIECE_BYTES // table.block_bytes)
    for first in range(0, len(table.crcs), at_once):
        start = first * table.block_bytes
        piece = fetch(start, min(at_once * table.block_bytes, table.data_bytes - start))
        problem = first_bad_block(piece, table, first)
        if problem is not None:
            raise ItemDamaged(problem)
