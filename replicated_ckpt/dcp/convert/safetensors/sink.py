"""Writes tensors as a Hugging Face directory: safetensors files of a bounded size, and their index."""

import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from replicated_ckpt.dcp.convert.entries.source import Contents, CountBytes, Source, TensorEntry, stream_tensors
from replicated_ckpt.dcp.convert.safetensors.files import SafetensorsFiles
from replicated_ckpt.dcp.convert.safetensors.format import (
    INDEX_NAME,
    NAME_BY_DTYPE,
    SINGLE_NAME,
    Tensor,
    encode_header,
)
from replicated_ckpt.dcp.tensors.memory import memory_of
from replicated_ckpt.errors import ConfigInvalid, ObjectCorrupt
from replicated_ckpt.stores.output.output import READ_BACK_HINT, Output


class SafetensorsSink:
    """`model.safetensors`, or, if that is more than `shard_bytes_max`, `model-00001-of-0000N.safetensors` and an index.

    Raises:
        ConfigInvalid: a tensor is of a type that the format does not have.
    """

    is_directory = True

    def __init__(self, contents: Contents, *, shard_bytes_max: int) -> None:
        for entry in contents.tensors:
            if entry.dtype not in NAME_BY_DTYPE:
                raise ConfigInvalid(f"Safetensors have no {entry.dtype}, which {entry.key!r} is.", "Use --exclude.")
        if not contents.tensors:
            raise ConfigInvalid(
                "There is no tensor to write, and safetensors hold nothing else.",
                "Export it as torch or dcp, or take other keys.",
            )
        groups = _groups(contents.tensors, shard_bytes_max)
        names = [f"model-{n:05}-of-{len(groups):05}.safetensors" for n in range(1, len(groups) + 1)]
        self._entries_by_file = dict(zip([SINGLE_NAME] if len(groups) == 1 else names, groups, strict=True))

    def write(self, source: Source, contents: Contents, output: Output, progress: CountBytes) -> None:
        """Writes all tensors; the objects of `contents` are left out. The index comes last."""
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


def _groups(entries: Sequence[TensorEntry], bytes_max: int) -> list[list[TensorEntry]]:
    """The tensors of each file, in the order of the state dict; one that is larger than allowed has a file of its own."""
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
