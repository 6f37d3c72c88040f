"""The safetensors format: 8 bytes with the size of a JSON header, the header, the elements.

Source: https://huggingface.co/docs/safetensors, section Format; the index file as transformers writes it.
"""

import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from replicated_ckpt.core.box import Box
from replicated_ckpt.errors import ConfigInvalid

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
LENGTH = struct.Struct("<Q")
_HEADER_BYTES_MAX = 100_000_000
_ALIGNMENT_BYTES = 8

_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}
DTYPE_BY_NAME: Mapping[str, torch.dtype] = {
    name: getattr(torch, attribute) for name, attribute in _NAMES.items() if hasattr(torch, attribute)
}
NAME_BY_DTYPE: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPE_BY_NAME.items()}


@dataclass(frozen=True)
class Tensor:
    """One tensor of a file; `start` is the position of its first byte behind the header."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def end(self) -> int:
        return self.start + Box.whole(self.shape).elements * self.dtype.itemsize


def encoded_header(tensors: Iterable[Tensor]) -> bytes:
    """Everything before the elements."""
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for tensor in tensors:
        offsets = [tensor.start, tensor.end]
        fields[tensor.name] = {
            "dtype": NAME_BY_DTYPE[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": offsets,
        }
    raw = json.dumps(fields, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % _ALIGNMENT_BYTES)
    return LENGTH.pack(len(raw)) + raw


def header_size(raw: bytes, file_bytes: int, label: str) -> int:
    """Size of the JSON header, from the first 8 bytes of a file.

    Raises:
        ConfigInvalid: it is no safetensors file.
    """
    size = LENGTH.unpack(raw)[0] if len(raw) == LENGTH.size else file_bytes
    if size > min(_HEADER_BYTES_MAX, file_bytes - LENGTH.size):
        raise ConfigInvalid(f"{label} is no safetensors file: it has no header.")
    return int(size)


def decoded_header(raw: bytes, data_bytes: int, label: str) -> list[Tensor]:
    """The tensors that a JSON header describes, all inside the `data_bytes` behind it.

    Raises:
        ConfigInvalid: it is no safetensors file, or one with types that this torch does not have.
    """
    try:
        fields = json.loads(raw)
        fields.pop("__metadata__", None)
        return [_decoded(name, entry, data_bytes) for name, entry in fields.items()]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as exc:
        raise ConfigInvalid(f"{label} is no safetensors file: {type(exc).__name__}: {str(exc)[:300]}.") from exc


def _decoded(name: str, entry: Mapping[str, Any], data_bytes: int) -> Tensor:
    shape, (start, end) = entry["shape"], entry["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, start, end)):
        raise ValueError(f"{name!r} is described by what are no sizes")
    if entry["dtype"] not in DTYPE_BY_NAME:
        raise ValueError(f"{name!r} is of the type {entry['dtype']!r}, which this torch does not have")
    tensor = Tensor(name, DTYPE_BY_NAME[entry["dtype"]], tuple(shape), start)
    if tensor.end != end or end > data_bytes:
        raise ValueError(f"{name!r} has offsets that do not fit its shape or the file")
    return tensor
