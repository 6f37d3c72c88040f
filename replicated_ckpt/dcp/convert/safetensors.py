"""Files of safetensors, as a source and as a target: 8 bytes with the size of a JSON header, the header, the elements.

Source: https://huggingface.co/docs/safetensors, section Format; the index file as transformers writes it.
"""

import contextlib
import json
import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from replicated_ckpt.core.chunk import Chunk
from replicated_ckpt.dcp.convert.source import (
    Contents,
    CountBytes,
    ObjectEntry,
    Part,
    Source,
    TensorEntry,
    stream_tensors,
)
from replicated_ckpt.dcp.tensors.tensor_memory import memory_of, window_tensor
from replicated_ckpt.errors import ConfigInvalid, ObjectCorrupt
from replicated_ckpt.stores.files.durable import read_exactly, translate_errors
from replicated_ckpt.stores.files.existence import is_directory, is_plain_file, open_plain, read_plain
from replicated_ckpt.stores.output.output import READ_BACK_HINT, Output

_INDEX_BYTES_MAX = 64 << 20
_CHOOSE = "Name one of the files, or add an index (model.safetensors.index.json) that assigns each tensor to one file."
_CHOOSE_INDEX = "Keep the index of the model or variant (such as fp16) that you want, and move the others away."
_OF_ANOTHER = "Index and files are of different versions: fetch all again, or remove the index to use the files alone."
SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
LENGTH = struct.Struct("<Q")
_HEADER_BYTES_MAX = 100_000_000  # the limit of the safetensors library itself
_ENTRY_BYTES_MAX = 4096  # dtype, shape and offsets of one tensor, without its name
_DIMENSIONS_MAX = 64
_NUMBER_MAX = (1 << 63) - 1
_TEXT = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"')
_SPACE = re.compile(rb"[ \t\r\n]*")
_ALIGNMENT_BYTES = 8
_PLACES, _RANKS_FILE = "DCP_SHARDING_INFO", re.compile(r"shard-\d+-")
"""HuggingFaceStorageWriter's list of the tensors' places in the whole, and its names of single ranks' files."""
_CONSOLIDATE = (
    "Merge the files of all ranks first: save with HuggingFaceStorageWriter(..., save_distributed=True, "
    "enable_consolidation=True), or call consolidate_safetensors_files of "
    "torch.distributed.checkpoint._consolidate_hf_safetensors."
)
_FETCH = "Fetch the file again: it is truncated, or is not a safetensors file."

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
    """One tensor of a file. `start` is the position of its first byte after the header."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def end(self) -> int:
        return self.start + Chunk.whole(self.shape).elements * self.dtype.itemsize


def encode_header(tensors: Iterable[Tensor]) -> bytes:
    """The bytes of a file before the elements: the size of the header, and the header."""
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
        ConfigInvalid: it is not a safetensors file.
    """
    # The size is untrusted: without this bound a small file could ask for any amount of memory.
    size = LENGTH.unpack(raw)[0] if len(raw) == LENGTH.size else file_bytes
    if size > min(_HEADER_BYTES_MAX, file_bytes - LENGTH.size):
        raise ConfigInvalid(f"{label} is not a safetensors file: it has no header.", _FETCH)
    return int(size)


def decode_header(raw: bytes, data_bytes: int, label: str) -> list[Tensor]:
    """The tensors in a JSON header. Together they fill the `data_bytes` after it, without gap or overlap.

    The header is read entry by entry, so that memory is proportional to its tensors, not to any other JSON in it.
    """
    try:
        tensors = [_decode_tensor(name, entry) for name, entry in _entries(raw, label)]
        _check_filled(tensors, data_bytes)
    except (ValueError, TypeError, KeyError, RecursionError) as exc:
        raise ConfigInvalid(
            f"{label} is not a safetensors file: {type(exc).__name__}: {str(exc)[:300]}.", _FETCH
        ) from exc
    return tensors


def _entries(raw: bytes, label: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The entries of a header by name, without `__metadata__`."""
    position = _token(raw, 0, b"{")
    seen: set[str] = set()
    while not raw.startswith(b"}", position):
        name, position = _text(raw, position)
        position = _token(raw, position, b":")
        # Of two entries with one name, readers would take different ones.
        if name in seen:
            raise ValueError(f"{name[:80]!r} appears twice")
        seen.add(name)
        if name == "__metadata__":
            position = _skip_metadata(raw, position, label)
        else:
            # Bounded: json.loads of a huge entry takes many times its size in memory.
            end = raw.find(b"}", position, position + _ENTRY_BYTES_MAX) + 1
            entry = json.loads(raw[position:end], parse_constant=_refuse, object_pairs_hook=name_once)
            if not isinstance(entry, dict):
                raise TypeError(f"{name[:80]!r} has an entry that is not a JSON object")
            yield name, entry
            position = _skip(raw, end)
        if not raw.startswith(b"}", position):
            position = _token(raw, position, b",")
    if _skip(raw, position + 1) != len(raw):
        raise ValueError("there are bytes after the header")


def _skip_metadata(raw: bytes, position: int, label: str) -> int:
    """The position after the texts of `__metadata__`."""
    position = _token(raw, position, b"{")
    while not raw.startswith(b"}", position):
        name, position = _text(raw, position)
        value, position = _text(raw, _token(raw, position, b":"))
        # One rank's file looks like a whole model, but has only a part of it.
        if name == _PLACES and (_RANKS_FILE.match(Path(label).name) or re.search(r"[1-9]", _offsets(value))):
            raise ConfigInvalid(f"{label} has only one rank's parts of the tensors.", _CONSOLIDATE)
        if not raw.startswith(b"}", position):
            position = _token(raw, position, b",")
    return _skip(raw, position + 1)


def _offsets(places: str) -> str:
    """The offsets in torch's list of the tensors' places, without the tensors' names, which may have digits, too."""
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
    raise ValueError(f"{constant} is not a JSON number")


def name_once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Makes a dict for `json.loads`. Raises ValueError if a name occurs twice: readers would differ in its value."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name[:80]!r} appears twice")
        found[name] = value
    return found


def _decode_tensor(name: str, entry: Mapping[str, Any]) -> Tensor:
    shape, (start, end) = entry["shape"], entry["data_offsets"]
    if not all(type(number) is int and 0 <= number <= _NUMBER_MAX for number in (*shape, start, end)):
        raise ValueError(f"{name[:80]!r} has invalid sizes")
    if len(shape) > _DIMENSIONS_MAX:
        raise ValueError(f"{name[:80]!r} has {len(shape)} dimensions")
    if entry["dtype"] not in DTYPE_BY_NAME:
        raise ValueError(f"{name[:80]!r} has the type {str(entry['dtype'])[:80]!r}, which this torch does not support")
    tensor = Tensor(name, DTYPE_BY_NAME[entry["dtype"]], tuple(shape), start)
    if tensor.end != end:
        raise ValueError(f"{name[:80]!r} has offsets that do not fit its shape")
    return tensor


# Bytes that no tensor covers, or two cover, could hide data from one reader and show it to another.
def _check_filled(tensors: Sequence[Tensor], data_bytes: int) -> None:
    """Raises ValueError unless the tensors fill the data one after the other, without gaps."""
    end = 0
    for tensor in sorted(tensors, key=lambda tensor: (tensor.start, tensor.end)):
        if tensor.start != end:
            raise ValueError(f"{tensor.name[:80]!r} has offsets that leave a gap, or overlap another tensor")
        end = tensor.end
    if end != data_bytes:
        raise ValueError(f"the offsets of all tensors end at {end}, but the data ends at {data_bytes}")


class SafetensorsFiles:
    """The tensors of one or more files.

    Raises:
        ConfigInvalid: a file is not a safetensors file, or two files have a tensor of the same name.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._held = contextlib.ExitStack()
        self._place_by_key: dict[str, tuple[Path, int, int]] = {}
        entries: list[TensorEntry] = []
        try:
            for path in paths:
                entries += self._open(path)
        # Files that were opened before the bad one would stay open.
        except BaseException:
            self._held.close()
            raise
        self.contents = Contents(tuple(entries), (), tuple(entry.key for entry in entries))

    def _open(self, path: Path) -> list[TensorEntry]:
        with translate_errors(str(path.parent), "read", path.name):
            fd = open_plain(path)
            self._held.callback(os.close, fd)
            size_bytes = os.fstat(fd).st_size
            header_bytes = header_size(os.pread(fd, LENGTH.size, 0), size_bytes, str(path))
            raw = bytearray(header_bytes)
            read_exactly(fd, memoryview(raw), LENGTH.size)
        data = LENGTH.size + header_bytes
        return [
            self._entry(tensor, path, fd, data) for tensor in decode_header(bytes(raw), size_bytes - data, str(path))
        ]

    def _entry(self, tensor: Tensor, path: Path, fd: int, data: int) -> TensorEntry:
        if tensor.name in self._place_by_key:
            raise ConfigInvalid(f"{tensor.name!r} is in {path} and in {self._place_by_key[tensor.name][0]}.", _CHOOSE)
        self._place_by_key[tensor.name] = (path, fd, data + tensor.start)
        return TensorEntry(
            tensor.name, tensor.name, (tensor.name,), tensor.dtype, tensor.shape, (Chunk.whole(tensor.shape),)
        )

    def check(self, contents: Contents) -> None:
        """Does nothing: the files were checked when they were opened."""

    def read(self, parts: Sequence[Part]) -> list[torch.Tensor]:
        return [self._part(part) for part in parts]

    def _part(self, part: Part) -> torch.Tensor:
        path, fd, start = self._place_by_key[part.entry.key]
        itemsize, whole = part.entry.dtype.itemsize, Chunk.whole(part.entry.shape)
        target = window_tensor((part.chunk.elements,), part.entry.dtype)
        raw = memory_of(target)
        position = 0
        for run in part.chunk.runs(whole, part.chunk.elements):
            piece = raw[position : position + run.elements * itemsize]
            with translate_errors(str(path.parent), "read", path.name):
                count = read_exactly(fd, piece, start + run.start_in(whole) * itemsize)
            # The file may be cut off while it is read, as when a download replaces it.
            if count != len(piece):
                raise ObjectCorrupt(str(path.parent), "read", path.name, "it ended early", _FETCH)
            position += len(piece)
        return target.view(part.chunk.sizes)

    def read_objects(self, entries: Sequence[ObjectEntry]) -> Mapping[str, bytes]:
        assert not entries, "safetensors files hold only tensors"
        return {}

    def close(self) -> None:
        self._held.close()


def safetensors_files(path: Path) -> SafetensorsFiles:
    """The tensors of a file, or of a directory: of the files in its index, or of all `.safetensors` files without an index.

    Raises:
        ConfigInvalid: there is no such file, there are several indexes, or a file or tensor of the index is missing.
    """
    if is_plain_file(path):
        return SafetensorsFiles([path])
    if not is_directory(path):
        raise ConfigInvalid(f"{path} does not exist.")
    indexes = sorted(path.glob("*.safetensors.index.json"))
    # A model and its fp16 variant share a directory: reading all files would mix them.
    if len(indexes) > 1:
        listed = ", ".join(index.name for index in indexes[:5])
        raise ConfigInvalid(f"{path} holds several indexes, each for a whole model: {listed}.", _CHOOSE_INDEX)
    names = _read_index(indexes[0]) if indexes else {}
    paths = sorted({path / name for name in names.values()} if indexes else path.glob("*.safetensors"))
    if not paths:
        raise ConfigInvalid(f"{path} holds no .safetensors file.", "Name a file or directory that has one.")
    files = SafetensorsFiles(paths)
    # If index and files are of two versions, a part of the model would silently be missing.
    missing = sorted(names.keys() - set(files.contents.order))
    if missing:
        files.close()
        raise ConfigInvalid(
            f"{indexes[0]} names {missing[0]!r}, which is in none of its files ({len(missing)} such).", _OF_ANOTHER
        )
    return files


def _read_index(index: Path) -> dict[str, str]:
    """The file of each tensor, as an index names it."""
    with translate_errors(str(index.parent), "read", index.name):
        raw = read_plain(index, _INDEX_BYTES_MAX + 1)
    # One byte more than allowed was read: the file is larger.
    if len(raw) > _INDEX_BYTES_MAX:
        raise ConfigInvalid(
            f"{index} has more than {_INDEX_BYTES_MAX} bytes, so it is not an index of safetensors files.", _FETCH
        )
    try:
        file_by_name: dict[str, str] = json.loads(raw, object_pairs_hook=name_once)["weight_map"]
        paths = {name: index.parent / name for name in sorted(set(file_by_name.values()))}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise ConfigInvalid(
            f"{index} is not an index of safetensors files: {type(exc).__name__}: {exc}.", _FETCH
        ) from exc
    for name, path in paths.items():
        # An index may come from the network: a name with a path could lead to any file.
        if Path(name).name != name or not is_plain_file(path):
            raise ConfigInvalid(
                f"{index} names {name!r}, which does not exist.", f"Copy {name!r} to {index.parent}, too."
            )
    return file_by_name


class SafetensorsSink:
    """Writes `model.safetensors`. Beyond `shard_bytes_max`, writes `model-00001-of-0000N.safetensors` and an index.

    Raises:
        ConfigInvalid: a tensor is of a type that the format does not have.
    """

    is_directory = True

    def __init__(self, contents: Contents, *, shard_bytes_max: int) -> None:
        for entry in contents.tensors:
            if entry.dtype not in NAME_BY_DTYPE:
                raise ConfigInvalid(
                    f"Safetensors files cannot hold {entry.dtype}, the type of {entry.key!r}.", "Use --exclude."
                )
        if not contents.tensors:
            raise ConfigInvalid(
                "There is no tensor to write, and safetensors files hold nothing else.",
                "Export it as torch or dcp, or select other keys.",
            )
        groups = _group_by_file(contents.tensors, shard_bytes_max)
        names = [f"model-{n:05}-of-{len(groups):05}.safetensors" for n in range(1, len(groups) + 1)]
        self._entries_by_file = dict(zip([SINGLE_NAME] if len(groups) == 1 else names, groups, strict=True))

    def write(self, source: Source, contents: Contents, output: Output, progress: CountBytes) -> None:
        """Writes all tensors. Objects in `contents` are left out. The index comes last, because it names finished
        files.
        """
        for name, entries in self._entries_by_file.items():
            with output.create(name) as stream:
                stream.write(encode_header(_place_tensors(entries)))
                for _, tensor in stream_tensors(source, entries):
                    progress(stream.write(memory_of(tensor)))
                    del tensor  # before the next window is read
        if len(self._entries_by_file) > 1:
            weight_map = {entry.name: name for name, entries in self._entries_by_file.items() for entry in entries}
            total = sum(entry.size_bytes for entry in contents.tensors)
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            with output.create(INDEX_NAME) as stream:
                stream.write(json.dumps(index, indent=2).encode() + b"\n")

    def check(self, path: Path, contents: Contents) -> None:
        """Reads the headers back.

        Raises:
            ObjectCorrupt: they do not describe the tensors that were to be written.
        """
        found: dict[str, object] = {}
        for name in self._entries_by_file:
            with closing(SafetensorsFiles([path / name])) as file:
                found |= {entry.name: (entry.dtype, entry.shape) for entry in file.contents.tensors}
        if found != {entry.name: (entry.dtype, entry.shape) for entry in contents.tensors}:
            raise ObjectCorrupt(
                str(path), "read back", SINGLE_NAME, "the headers describe other tensors", READ_BACK_HINT
            )

    def may_replace(self, name: str) -> bool:
        return name == INDEX_NAME or (name.startswith("model") and name.endswith(".safetensors"))


def _group_by_file(entries: Sequence[TensorEntry], bytes_max: int) -> list[list[TensorEntry]]:
    """The tensors of each file, in the order of the state dict. A tensor above `bytes_max` has a file of its own."""
    groups: list[list[TensorEntry]] = [[]]
    size_bytes = 0
    for entry in entries:
        if groups[-1] and size_bytes + entry.size_bytes > bytes_max:
            groups.append([])
            size_bytes = 0
        groups[-1].append(entry)
        size_bytes += entry.size_bytes
    for group in groups:
        group.sort(key=lambda entry: -entry.dtype.itemsize)  # so that each is aligned to its own elements
    return groups


def _place_tensors(entries: Sequence[TensorEntry]) -> list[Tensor]:
    placed = []
    start = 0
    for entry in entries:
        placed.append(Tensor(entry.name, entry.dtype, entry.shape, start))
        start = placed[-1].end
    return placed
