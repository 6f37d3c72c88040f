"""The bytes of a `.metadata` file of ours: the pickle that stock torch reads and, behind a large one, columns of it.

No unpickler looks behind the end of a pickle. docs/format.md has the bytes.
"""

import logging
import struct

from torch.distributed.checkpoint.metadata import Metadata

from replicated_ckpt.core.integrity.checksum import crc32c
from replicated_ckpt.dcp.metadata.columns import ColumnsInvalid, decode_columns, encode_columns
from replicated_ckpt.dcp.metadata.metadata import decode_metadata, encode_metadata
from replicated_ckpt.dcp.planning.kept_layouts import holds_paths_only

log = logging.getLogger(__name__)

COLUMNS_FROM_BYTES = 64 << 10
"""So large a pickle has columns: some 400 chunks. A smaller one is read in a fortieth of a second."""
_END = struct.Struct("<QQ8s")
"""Bytes of the pickle, bytes of the columns, magic."""
_MAGIC = b"RCKCOLS\n"
_WORD = 8


def encode_metadata_file(metadata: Metadata) -> bytes:
    """As `encode_metadata`; with columns behind it if it is large, and regular enough to have some."""
    pickled = encode_metadata(metadata)
    planner_data = metadata.planner_data
    if len(pickled) < COLUMNS_FROM_BYTES or not (planner_data is None or holds_paths_only(planner_data)):
        return pickled
    try:
        columns = encode_columns(metadata, len(pickled), crc32c(pickled))
    except (TypeError, ValueError, AttributeError) as exc:  # a planner may describe a state in any way that pickles
        log.warning("this .metadata has no columns, and takes longer to read: %s: %s", type(exc).__name__, exc)
        columns = None
    if columns is None:
        return pickled
    end = _END.pack(len(pickled), len(columns), _MAGIC)
    return b"".join((pickled, bytes(-len(pickled) % _WORD), columns, end))


def decode_metadata_file(raw: bytes, source: str) -> Metadata:
    """The metadata that `raw` says: by its columns, if it has some that are of its pickle, else by the pickle.

    Nothing is believed that `decode_metadata` would not believe.

    Raises:
        MetadataUnsafe: as `decode_metadata`.
    """
    parts = _split(raw)
    if parts is not None:
        pickled, columns = parts
        try:
            return decode_columns(columns, len(pickled), crc32c(pickled), source)
        except ColumnsInvalid as exc:
            log.warning("the columns of the .metadata from %s are not used, and its pickle is read: %s", source, exc)
    return decode_metadata(raw, source)


def _split(raw: bytes) -> tuple[memoryview, memoryview] | None:
    """Pickle and columns; None: it has none."""
    if not raw.endswith(_MAGIC) or len(raw) < _END.size:
        return None
    view = memoryview(raw)
    pickle_bytes, column_bytes, _ = _END.unpack(view[-_END.size :])
    begin = pickle_bytes + -pickle_bytes % _WORD
    if begin + column_bytes + _END.size != len(raw):
        return None
    return view[:pickle_bytes], view[begin : -_END.size]
