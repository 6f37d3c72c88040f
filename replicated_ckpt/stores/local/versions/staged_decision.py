"""The coordinator's decision in a staged save: a manifest, and the metadata that it names.

A decision that cannot be read now, as with too many open files, never counts as missing.
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
    """The staged manifest. It must be this save's, and the staged metadata must match it.

    Raises:
        ManifestInvalid, ObjectCorrupt: one of them is damaged, or of another save. OSError: one of them is missing, or
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
    """The staged shards whose footers differ from the manifest's checksums.

    Shards with a damaged footer are not among them: their data may be intact, and the only copy.
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
    """Whether there is a valid decision, including one that only a newer version of the package can publish."""
    try:
        read_decision(staging, save_id)
    except ManifestVersionUnknown:
        return True
    except (FileNotFoundError, NotADirectoryError, ManifestInvalid, ObjectCorrupt):
        return False
    return True


def has_damaged_decision(staging: Path, save_id: str) -> bool:
    """Whether there was a decision, and its manifest or metadata is damaged, or its metadata is missing.

    Metadata is written first, so a manifest without metadata was a decision.
    """
    path = staging / MANIFEST_NAME
    return path in list_prefixed(staging, MANIFEST_NAME) and not has_decision(staging, save_id)
