"""Where the elements of a large stored tensor lie, told from the two ends of its container: nothing between is read."""

import torch

from replicated_ckpt.core.integrity.archive import find_records
from replicated_ckpt.core.pickles.follower import follow
from replicated_ckpt.core.pickles.tensors import tensor_of
from replicated_ckpt.dcp.objects.storages import dtype_of, record_of

END_BYTES = 4096
"""So much of each end is looked at; what surrounds the elements takes about 1 KiB."""


def data_start(head: bytes, tail: bytes, size_bytes: int, shape: tuple[int, ...], dtype: torch.dtype) -> int | None:
    """Position of the first element in a container of `size_bytes`, if elements of this type lie there row by row.

    None: they do not, or it is no such container.
    """

    def fetch(offset: int, length: int) -> memoryview:
        if offset + length <= len(head):
            return memoryview(head)[offset : offset + length]
        start = offset - (size_bytes - len(tail))
        if start < 0:
            raise ValueError(f"bytes {offset} to {offset + length} are not at the ends")
        return memoryview(tail)[start : start + length]

    try:
        records = find_records(fetch, size_bytes)
        outline = tensor_of(follow(bytes(fetch(records["data.pkl"].start, records["data.pkl"].size))))
        if outline is None or outline.shape != shape or dtype_of(outline) != dtype or not outline.is_row_by_row():
            return None
        return record_of(outline.storage, records).start
    except (ValueError, KeyError):
        return None
