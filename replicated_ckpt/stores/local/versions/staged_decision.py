"""The coordinator's decision as it lies with a staged save: a manifest, and the metadata that it names.

What cannot be read now, as by a process with too many open files, is never taken for a decision that is not there.
"""

import os
from pathlib import Path

from replicated_ckpt.core.layout import MANIFEST_NAME, METADATA_NAME
from replicated_ckpt.core.manifest import Manifest, decode_manifest
from replicated_ckpt.errors import ManifestInvalid, ManifestVersionUnknown, ObjectCorrupt
from replicated_ckpt.stores.files.durable import hash_file
from replicated_ckpt.stores.files.existence import list_prefixed
from replicated_ckpt.stores.files.plain import closing_fd, open_plain, read_plain
from replicated_ckpt.stores.local.directories.catalog import manifest_readable
from replicated_ckpt.stores.local.directories.footer import crc_of_footer


def read_decision(staging: Path, save_id: str) -> Manifest:
    """The manifest staged there, believed only if it is this save's, and together with the metadata that it names.

    Raises:
        ManifestInvalid, ObjectCorrupt: it is not believed, or the disk has lost it. OSError: it is not there, or it
        cannot be read now.
    """
    path = staging / MANIFEST_NAME
    with manifest_readable(path):
        manifest = decode_manifest(read_plain(path), str(path))
    if manifest.save_id != save_id:
        raise ManifestInvalid(f"The manifest in {staging} is of save {manifest.save_id}.")
    path = staging / METADATA_NAME
    with manifest_readable(path):
        found = hash_file(path, manifest.metadata_bytes)
    if found != (manifest.metadata_bytes, manifest.metadata_crc32c):
        expected = f"{manifest.metadata_bytes} bytes of CRC32C {manifest.metadata_crc32c:08x}"
        crc = f" of {found[1]:08x}" if found[0] == manifest.metadata_bytes else ""
        detail = f"expected {expected}, found {found[0]} bytes{crc}"
        raise ObjectCorrupt(str(staging), "commit", METADATA_NAME, detail)
    return manifest


def list_differing(staging: Path, manifest: Manifest) -> list[str]:
    """The staged shards whose footers imply another checksum than the manifest has.

    One with a damaged footer is none of them: its data may be intact, and the only copy.
    """
    differing = []
    for name, entry in manifest.shards.items():
        try:
            with closing_fd(open_plain(staging / name, os.O_NOFOLLOW)) as fd:
                found = crc_of_footer(fd)
        except FileNotFoundError:
            continue
        if found not in (None, entry.crc32c):
            differing.append(name)
    return differing


def has_decision(staging: Path, save_id: str) -> bool:
    """Whether there is one to believe, if only a newer version of the package can carry it out."""
    try:
        read_decision(staging, save_id)
    except ManifestVersionUnknown:
        return True
    except (FileNotFoundError, NotADirectoryError, ManifestInvalid, ObjectCorrupt):
        return False
    return True


def has_damaged_decision(staging: Path, save_id: str) -> bool:
    """Whether there was one, and its manifest or metadata cannot be believed any more, or its metadata is gone.

    Metadata is written first, so a manifest without it was a decision.
    """
    path = staging / MANIFEST_NAME
    return path in list_prefixed(staging, MANIFEST_NAME) and not has_decision(staging, save_id)
