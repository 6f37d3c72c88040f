"""The commit mark of the object tier: a few bytes behind the pickle in the bucket's `.metadata`.

A bucket cannot rename, so `.metadata` is written last, and commits the checkpoint. Stock readers stop unpickling at the
STOP opcode, before the mark. Our readers find the committed save by one small range read, without unpickling and without
trusting a listing. Layout, little endian:

    8s   magic           b"RCKMARK2"
    16s  save_id
    8s   lineage         zeros: none
    u64  sequence
    f64  created_unix_s
    u32  manifest_crc    CRC32C of the manifest object's bytes
    u32  metadata_crc    CRC32C of all bytes before the mark
    u8   flags           1: shards and manifest lie under `<save_id>/`, else beside `.metadata`; 2: no optimizer
    u32  mark_crc        CRC32C of the mark's bytes before it
"""

import struct
from dataclasses import dataclass

from replicated_ckpt.core.integrity.checksum import Bytes, crc32c
from replicated_ckpt.core.layout import SEQUENCE_MAX
from replicated_ckpt.core.lineage import Version, is_moment
from replicated_ckpt.errors import ManifestVersionUnknown

MAGIC = b"RCKMARK2"
_FAMILY = MAGIC[:-1]
_BODY = struct.Struct("<8s16s8sQdIIB")
MARK_BYTES = _BODY.size + 4
_NO_LINEAGE = "0" * 16
_OWN_PREFIX, _SLIM = 1, 2


@dataclass(frozen=True)
class CommitMark:
    """The save that a bucket's `.metadata` commits."""

    save_id: str
    sequence: int
    created_unix_s: float
    manifest_crc32c: int
    metadata_crc32c: int
    has_own_prefix: bool
    lineage: str = ""
    is_slim: bool = False

    @property
    def version(self) -> Version:
        return Version(self.lineage, self.sequence, self.created_unix_s, self.save_id)

    @property
    def prefix(self) -> str:
        """The prefix of the save's shards and manifest, relative to the checkpoint."""
        return own_prefix(self.save_id) if self.has_own_prefix else ""

    def encode(self) -> bytes:
        body = _BODY.pack(
            MAGIC,
            bytes.fromhex(self.save_id),
            bytes.fromhex(self.lineage or _NO_LINEAGE),
            self.sequence,
            self.created_unix_s,
            self.manifest_crc32c,
            self.metadata_crc32c,
            self.has_own_prefix * _OWN_PREFIX + self.is_slim * _SLIM,
        )
        return body + struct.pack("<I", crc32c(body))


def decode_mark(tail: Bytes) -> CommitMark | None:
    """The mark in the last MARK_BYTES of a `.metadata`; None if there is none, as in stock torch's.

    Raises:
        ManifestVersionUnknown: the mark is intact, but has another format version.
    """
    if len(tail) != MARK_BYTES or crc32c(memoryview(tail)[:-4]) != int.from_bytes(tail[-4:], "little"):
        return None
    magic, save_id, lineage, sequence, created, manifest_crc, metadata_crc, flags = _BODY.unpack(memoryview(tail)[:-4])
    # The checksum is right, so this is a newer format. If it counted as damaged, it would be replaced.
    if magic != MAGIC and magic.startswith(_FAMILY):
        raise ManifestVersionUnknown(f"The commit mark begins with {magic!r} instead of {MAGIC!r}.")
    # A foreign file may pass the CRC by chance or design. A time of NaN would break the order of saves.
    if magic != MAGIC or not is_moment(created) or sequence > SEQUENCE_MAX:
        return None
    named = "" if lineage.hex() == _NO_LINEAGE else lineage.hex()
    own, slim = bool(flags & _OWN_PREFIX), bool(flags & _SLIM)
    return CommitMark(save_id.hex(), sequence, created, manifest_crc, metadata_crc, own, named, slim)


def own_prefix(save_id: str) -> str:
    """The prefix of a save that may replace another one: a bucket must never mix the shards of two saves."""
    return f"{save_id}/"
