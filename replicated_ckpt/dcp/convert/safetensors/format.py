"""The safetensors format: 8 bytes with the size of a JSON header, the header, the elements.

Source: https://huggingface.co/docs/safetensors, section Format; the index file as transformers writes it.
"""

import json
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from replicated_ckpt.core.chunk import Chunk
from replicated_ckpt.errors import ConfigInvalid

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
LENGTH = struct.Struct("<Q")
_HEADER_BYTES_MAX = 100_000_000
_ENTRY_BYTES_MAX = 4096
_DIMENSIONS_MAX = 64
_NUMBER_MAX = (1 << 63) - 1
_TEXT = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"')
_SPACE = re.compile(rb"[ \t\r\n]*")
_ALIGNMENT_BYTES = 8
_PLACES, _RANKS_FILE = "DCP_SHARDING_INFO", re.compile(r"shard-\d+-")
"""HuggingFaceStorageWriter says where in the whole each tensor of a file begins, and names files of single ranks so."""
_CONSOLIDATE = (
    "Import what torch makes of the files of all ranks: save with HuggingFaceStorageWriter(..., save_distributed=True, "
    "enable_consolidation=True), or call consolidate_safetensors_files of "
    "torch.distributed.checkpoint._consolidate_hf_safetensors."
)
_FETCH = "Fetch the file again from where it came: it was cut off, or is something else."

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
        return self.start + Chunk.whole(self.shape).elements * self.dtype.itemsize


def encode_header(tensors: Iterable[Tensor]) -> bytes:
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
        raise ConfigInvalid(f"{label} is no safetensors file: it has no header.", _FETCH)
    return int(size)


def decode_header(raw: bytes, data_bytes: int, label: str) -> list[Tensor]:
    """The tensors that a JSON header describes: together they are the `data_bytes` behind it, without gap or overlap.

    The header is read entry by entry, so that memory goes with the tensors in it, not with what else JSON can say.

    Raises:
        ConfigInvalid: it is no safetensors file, or one with types that this torch does not have.
    """
    try:
        tensors = [_decode_tensor(name, entry) for name, entry in _entries(raw, label)]
        _check_filled(tensors, data_bytes)
    except (ValueError, TypeError, KeyError, RecursionError) as exc:
        raise ConfigInvalid(f"{label} is no safetensors file: {type(exc).__name__}: {str(exc)[:300]}.", _FETCH) from exc
    return tensors


def _entries(raw: bytes, label: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Names and what is told of them, `__metadata__` left out."""
    position = _token(raw, 0, b"{")
    seen: set[str] = set()
    while not raw.startswith(b"}", position):
        name, position = _text(raw, position)
        position = _token(raw, position, b":")
        if name in seen:
            raise ValueError(f"{name[:80]!r} is there twice")
        seen.add(name)
        if name == "__metadata__":
            position = _without_metadata(raw, position, label)
        else:
            end = raw.find(b"}", position, position + _ENTRY_BYTES_MAX) + 1
            entry = json.loads(raw[position:end], parse_constant=_refuse, object_pairs_hook=name_once)
            if not isinstance(entry, dict):
                raise TypeError(f"{name[:80]!r} is described by no object")
            yield name, entry
            position = _skip(raw, end)
        if not raw.startswith(b"}", position):
            position = _token(raw, position, b",")
    if _skip(raw, position + 1) != len(raw):
        raise ValueError("something stands behind the header")


def _without_metadata(raw: bytes, position: int, label: str) -> int:
    """Where the texts of `__metadata__` end."""
    position = _token(raw, position, b"{")
    while not raw.startswith(b"}", position):
        name, position = _text(raw, position)
        value, position = _text(raw, _token(raw, position, b":"))
        if name == _PLACES and (_RANKS_FILE.match(Path(label).name) or re.search(r"[1-9]", _offsets(value))):
            raise ConfigInvalid(f"{label} holds one rank's parts of tensors, which look like whole ones.", _CONSOLIDATE)
        if not raw.startswith(b"}", position):
            position = _token(raw, position, b",")
    return _skip(raw, position + 1)


def _offsets(places: str) -> str:
    """The numbers in what torch says of the places of tensors, whose names may hold digits, too."""
    return " ".join(str(place["saved_offsets"]) for place in dict(json.loads(places)).values())


def _text(raw: bytes, position: int) -> tuple[str, int]:
    match = _TEXT.match(raw, position)
    if match is None:
        raise ValueError(f"no text at byte {position}")
    return json.loads(match[0]), _skip(raw, match.end())


def _token(raw: bytes, position: int, wanted: bytes) -> int:
    position = _skip(raw, position)
    if not raw.startswith(wanted, position):
        raise ValueError(f"no {wanted.decode()!r} at byte {position}")
    return _skip(raw, position + 1)


def _skip(raw: bytes, position: int) -> int:
    match = _SPACE.match(raw, position)
    assert match is not None, "no space is a match, too"
    return match.end()


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number of JSON")


def name_once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, as `json.loads` asks for it. Raises ValueError: readers would differ in which value a name has."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name[:80]!r} is there twice")
        found[name] = value
    return found


def _decode_tensor(name: str, entry: Mapping[str, Any]) -> Tensor:
    shape, (start, end) = entry["shape"], entry["data_offsets"]
    if not all(type(number) is int and 0 <= number <= _NUMBER_MAX for number in (*shape, start, end)):
        raise ValueError(f"{name[:80]!r} is described by what are no sizes")
    if len(shape) > _DIMENSIONS_MAX:
        raise ValueError(f"{name[:80]!r} has {len(shape)} dimensions")
    if entry["dtype"] not in DTYPE_BY_NAME:
        raise ValueError(f"{name[:80]!r} is of the type {str(entry['dtype'])[:80]!r}, which this torch does not have")
    tensor = Tensor(name, DTYPE_BY_NAME[entry["dtype"]], tuple(shape), start)
    if tensor.end != end:
        raise ValueError(f"{name[:80]!r} has offsets that do not fit its shape")
    return tensor


def _check_filled(tensors: Sequence[Tensor], data_bytes: int) -> None:
    """Raises ValueError unless the tensors lie one behind the other up to the end."""
    end = 0
    for tensor in sorted(tensors, key=lambda tensor: (tensor.start, tensor.end)):
        if tensor.start != end:
            raise ValueError(f"{tensor.name[:80]!r} has offsets that leave a gap, or lie in another tensor")
        end = tensor.end
    if end != data_bytes:
        raise ValueError(f"the offsets of all tensors end at {end}, and the file at {data_bytes}")
