"""Making a checkpoint of stock torch one of ours on this node: its shards are copied into a staged save, with footers.

The commit of that save then exchanges the directories (see carry_over); until then the original stays as it is.
"""

import json
import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from replicated_ckpt import failpoints
from replicated_ckpt.core.integrity.archive import Fetch
from replicated_ckpt.core.integrity.checksum import BlockHasher, BlockTable
from replicated_ckpt.core.integrity.footer_without_manifest import check_blocks, find_footer
from replicated_ckpt.core.integrity.zip_crc import ItemDamaged, check_item
from replicated_ckpt.core.layout import METADATA_NAME, STAGING_DIR
from replicated_ckpt.core.manifest import Manifest
from replicated_ckpt.core.reading.source_order import ByteRange, end_of
from replicated_ckpt.core.unmanaged.metadata_places import item_ranges
from replicated_ckpt.errors import ConfigInvalid, ManifestInvalid, ObjectCorrupt
from replicated_ckpt.stores.files.durable import read_exactly, translate_errors, write_file
from replicated_ckpt.stores.files.plain import closing_fd
from replicated_ckpt.stores.local.directories.committed import open_directory
from replicated_ckpt.stores.local.directories.intent import Intent
from replicated_ckpt.stores.local.shard_file import FileSink
from replicated_ckpt.stores.local.versions.carry_over import Signature, originals_path, signature
from replicated_ckpt.stores.local.versions.others import link_others
from replicated_ckpt.stores.local.versions.recycled import RecycledFiles

PIECE_BYTES = 4 << 20
CLOCKS_DIFFER_S = 86400.0
METADATA_BYTES_MAX = 256 << 20
"""Of an adoption: it is read in memory, to find the items in the shards. That of some million items fits."""


def check_announced(intent: Intent) -> None:
    """Holds the opening of an adoption against what an agent takes for one: it says how large its `.metadata` is.

    Raises:
        ConfigInvalid: it is larger than any, or does not say so.
    """
    announced = intent.announced.save_bytes_max
    if intent.adopts and not 0 < announced <= METADATA_BYTES_MAX:
        raise ConfigInvalid(
            f"{intent.checkpoint_id!r} is not adopted: its opening announces {announced} bytes of metadata, and from 1 to "
            f"{METADATA_BYTES_MAX} are taken.",
            "Such a checkpoint loads as it lies; saved again by this package, it is protected.",
        )


def check_adopted(root: Path, intent: Intent, manifest: Manifest) -> None:
    """Holds the manifest of a save against what it was opened for: an adoption is as old as the files that it adopts.

    So it comes before all that was saved since, in its lineage by the sequence and among lineages by the time: it takes no
    other save's place, neither for "latest" nor in what a policy keeps. `.metadata` is of another node's clock.

    Raises:
        ManifestInvalid: it is no adoption's.
    """
    if not intent.adopts:
        return
    with translate_errors(str(root), "look at", intent.checkpoint_id):
        newest_s = max((entry.stat().st_mtime for entry in os.scandir(root / intent.checkpoint_id)), default=0.0)
    latest_s = min(newest_s, time.time()) + CLOCKS_DIFFER_S
    wrong = [
        *([f"has sequence {manifest.sequence}"] if manifest.sequence != 0 else []),
        *([] if 0 <= manifest.created_unix_s <= latest_s else [f"is of {manifest.created_unix_s:.0f} s since 1970"]),
        *(["goes to a bucket"] if manifest.upload is not None else []),
        *(["has more metadata than was announced"] if manifest.metadata_bytes > METADATA_BYTES_MAX else []),
    ]
    if wrong:
        raise ManifestInvalid(
            f"Save {intent.save_id} adopts what stock torch wrote, and its manifest says otherwise: it {', '.join(wrong)}."
        )


def stage_shards(root: Path, checkpoint_id: str, save_id: str, names: Sequence[str]) -> Mapping[str, BlockTable]:
    """Copies these shards of a checkpoint without a manifest into the staged save, each with a footer, durably.

    `.metadata` must be staged. Each item of the copy is read back and held against its CRC32, where it has one; all of it
    against a footer of ours, where only the manifest was lost. Other files that lie there get a second name: what cannot be
    linked is found now, not when the adoption is decided.

    Raises:
        ObjectMissing, ObjectCorrupt, StoreFull, StoreError: the original is as it was.
    """
    staging = root / STAGING_DIR / save_id
    if not names:
        return {}
    with translate_errors(str(root), "link", checkpoint_id):
        link_others(root, root / checkpoint_id, staging)
    with translate_errors(str(root), "read", METADATA_NAME):
        ranges = item_ranges((staging / METADATA_NAME).read_bytes())
    tables: dict[str, BlockTable] = {}
    signatures: dict[str, Signature] = {}
    with open_directory(root, checkpoint_id) as directory:
        for name in names:
            with closing_fd(directory.open(name)) as fd:
                signatures[name] = signature(os.fstat(fd))
                sink = FileSink.create(staging / name, recycled=RecycledFiles(root))
                tables[name] = copy_with_footer(fd, sink, f"{root}/{checkpoint_id}/{name}")
            _check_copy(staging / name, ranges.get(name, ()), tables[name].data_bytes)
            failpoints.reach("adopt.shard-staged")
    with translate_errors(str(root), "write", save_id):
        write_file(originals_path(root, save_id), json.dumps(signatures).encode())
    return tables


def copy_with_footer(fd: int, sink: FileSink, path: str) -> BlockTable:
    """Copies a file into a sink and puts a footer behind it; the sink's file is whole and durable afterwards.

    Raises:
        StoreFull, StoreError: the sink's file is not there.
    """
    hasher, piece, position = BlockHasher(), memoryview(bytearray(PIECE_BYTES)), 0
    with sink:
        while True:
            with translate_errors(path, "read", ""):
                count = read_exactly(fd, piece, position)
            hasher.update(piece[:count])
            sink.write(piece[:count])
            position += count
            if count < len(piece):
                break
        table = hasher.table()
        sink.write(memoryview(table.encode()))
        sink.finish_durably()
    return table


def _check_copy(path: Path, items: Sequence[ByteRange], data_bytes: int) -> None:
    """Holds the staged copy of a file of so many bytes against checksums in that: of its items, or of a footer of ours."""
    with translate_errors(str(path.parent), "read back", path.name), path.open("rb", buffering=0) as file:

        def fetch(offset: int, length: int) -> memoryview:
            target = memoryview(bytearray(length))
            read_exactly(file.fileno(), target, offset)
            return target

        where, footer = "its footer", find_footer(fetch, data_bytes, end_of(items))
        try:
            if footer.table is not None:
                check_blocks(fetch, footer.table)
            for item in items:
                where = f"item at bytes {item.offset} to {item.end}"
                if item.end > data_bytes:
                    raise ObjectCorrupt(str(path.parent), "adopt", path.name, f"{where}: it has {data_bytes} bytes")
                if footer.table is None:
                    check_item(partial(_from, fetch, item.offset), item.length, must_tell=footer.is_damaged)
        except ItemDamaged as exc:
            raise ObjectCorrupt(str(path.parent), "adopt", path.name, f"{where}: {exc}") from exc


def _from(fetch: Fetch, start: int, offset: int, length: int) -> memoryview:
    return fetch(start + offset, length)
