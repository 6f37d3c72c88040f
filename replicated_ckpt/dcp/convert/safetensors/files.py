"""Safetensors as a source: one file, or the files of a Hugging Face directory."""

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from replicated_ckpt.core.chunk import Chunk
from replicated_ckpt.dcp.convert.entries.source import Contents, ObjectEntry, Part, TensorEntry
from replicated_ckpt.dcp.convert.safetensors.format import LENGTH, Tensor, decode_header, header_size, name_once
from replicated_ckpt.dcp.tensors.memory import memory_of, window_tensor
from replicated_ckpt.errors import ConfigInvalid, ObjectCorrupt
from replicated_ckpt.stores.files.durable import read_exactly, translate_errors
from replicated_ckpt.stores.files.existence import is_directory, is_plain_file
from replicated_ckpt.stores.files.plain import open_plain, read_plain

_INDEX_BYTES_MAX = 64 << 20
_CHOOSE = "Name one of the files, or leave an index (model.safetensors.index.json) that says which tensor is whose."
_CHOOSE_INDEX = "Move the indexes of those that are not meant elsewhere: a variant such as fp16 has other files."
_OF_ANOTHER = "Index and files are of two versions: fetch all again, or remove the index to take what is in the files."
_FETCH = "Fetch the file again from where it came: it was cut off, or is something else."


class SafetensorsFiles:
    """The tensors of one or more files.

    Raises:
        ConfigInvalid: they are no safetensors files, or two of them have a tensor of the same name.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._held = contextlib.ExitStack()
        self._place_by_key: dict[str, tuple[Path, int, int]] = {}
        entries: list[TensorEntry] = []
        try:
            for path in paths:
                entries += self._open(path)
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
        """What could be wrong was found when the files were opened."""

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
            if count != len(piece):
                raise ObjectCorrupt(str(path.parent), "read", path.name, "it ended early", _FETCH)
            position += len(piece)
        return target.view(part.chunk.sizes)

    def read_objects(self, entries: Sequence[ObjectEntry]) -> Mapping[str, bytes]:
        assert not entries, "safetensors have tensors only"
        return {}

    def close(self) -> None:
        self._held.close()


def safetensors_files(path: Path) -> SafetensorsFiles:
    """A file, or the directory that its index describes, or without one, all `.safetensors` in it.

    Raises:
        ConfigInvalid: no such file lies there, or several indexes do, or what the index names is missing: a file, a tensor.
    """
    if is_plain_file(path):
        return SafetensorsFiles([path])
    if not is_directory(path):
        raise ConfigInvalid(f"{path} does not exist.")
    indexes = sorted(path.glob("*.safetensors.index.json"))
    if len(indexes) > 1:
        listed = ", ".join(index.name for index in indexes[:5])
        raise ConfigInvalid(f"{path} holds several indexes, each of a whole model: {listed}.", _CHOOSE_INDEX)
    names = _read_index(indexes[0]) if indexes else {}
    paths = sorted({path / name for name in names.values()} if indexes else path.glob("*.safetensors"))
    if not paths:
        raise ConfigInvalid(f"{path} holds no .safetensors file.", "Name a file or directory that does.")
    files = SafetensorsFiles(paths)
    missing = sorted(names.keys() - set(files.contents.order))
    if missing:
        files.close()
        raise ConfigInvalid(
            f"{indexes[0]} names {missing[0]!r}, which no file of it has ({len(missing)} such).", _OF_ANOTHER
        )
    return files


def _read_index(index: Path) -> dict[str, str]:
    """The file of each tensor, as an index names it."""
    with translate_errors(str(index.parent), "read", index.name):
        raw = read_plain(index, _INDEX_BYTES_MAX + 1)
    if len(raw) > _INDEX_BYTES_MAX:
        raise ConfigInvalid(
            f"{index} has more than {_INDEX_BYTES_MAX} bytes: it is no index of safetensors files.", _FETCH
        )
    try:
        file_by_name: dict[str, str] = json.loads(raw, object_pairs_hook=name_once)["weight_map"]
        paths = {name: index.parent / name for name in sorted(set(file_by_name.values()))}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise ConfigInvalid(f"{index} is no index of safetensors files: {type(exc).__name__}: {exc}.", _FETCH) from exc
    for name, path in paths.items():
        if Path(name).name != name or not is_plain_file(path):
            raise ConfigInvalid(
                f"{index} names {name!r}, which is not there.", f"Copy {name!r} to {index.parent}, too."
            )
    return file_by_name
