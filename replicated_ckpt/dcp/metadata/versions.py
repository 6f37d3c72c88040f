"""Versions of a tensor's properties in torch: five fields, and from 2.15 on a sixth, `strides`."""

import copyreg
import pickle
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

from replicated_ckpt.core.chunk import is_contiguous

COMMON_FIELDS = 5
"""Every supported torch reads and writes these: dtype, layout, requires_grad, memory format, pin_memory. Source: torch 2.7
to 2.15, `TensorProperties.__getstate__`. torch up to 2.13 refuses a state of more."""


def known_fields(kind: type) -> int:
    """The number of fields that this torch writes, and reads, of a class of properties."""
    return len(kind().__getstate__())


def reduction_for_all(metadata: Metadata) -> Callable[[TensorProperties], Any]:
    """How to pickle the properties in `metadata`: without the fields that older versions lack, if these are empty."""
    if known_fields(TensorProperties) == COMMON_FIELDS:
        return _reduce_whole
    can_cut: dict[int, bool] = {}
    for entry in metadata.state_dict_metadata.values():
        if isinstance(entry, TensorStorageMetadata):
            key = id(entry.properties)
            # Several tensors may share one object: it is cut only if that loses nothing for any of them.
            can_cut[key] = can_cut.get(key, True) and _says_nothing_more(entry)

    def reduce(properties: TensorProperties) -> Any:
        if not can_cut.get(id(properties), False):
            return _reduce_whole(properties)
        return copyreg.__newobj__, (TensorProperties,), _state_of(properties)[:COMMON_FIELDS]  # type: ignore[attr-defined]

    return reduce


def _reduce_whole(properties: TensorProperties) -> Any:
    return properties.__reduce_ex__(pickle.DEFAULT_PROTOCOL)


def _state_of(properties: Any) -> Sequence[Any]:
    state: Sequence[Any] = properties.__getstate__()
    return state


def _says_nothing_more(entry: TensorStorageMetadata) -> bool:
    """Whether the fields beyond the common ones are empty, or strides of contiguous memory, of a whole or a shard."""
    strides, *others = _state_of(entry.properties)[COMMON_FIELDS:]
    if any(other is not None for other in others):
        return False
    if strides is None or is_contiguous(entry.size, strides):
        return True
    return any(is_contiguous(chunk.sizes, strides) for chunk in entry.chunks)
