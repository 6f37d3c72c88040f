"""The state dict that a conversion reads, entry by entry and part by part."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self, TypeVar

import torch

from replicated_ckpt.core.chunk import Chunk
from replicated_ckpt.core.key_rules import KeyRules, Path, rename_path
from replicated_ckpt.errors import ConfigInvalid

WINDOW_BYTES = 64 << 20
"""How much of a state dict is in memory at once."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor. `key` is its name in the source; `name` and `path` (in the nested state dict) are its new ones.

    `chunks` are its parts in the source.
    """

    key: str
    name: str
    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def size_bytes(self) -> int:
        return Chunk.whole(self.shape).elements * self.dtype.itemsize


@dataclass(frozen=True)
class ObjectEntry:
    """One entry that is not a tensor. `size_bytes` is the size of its pickle, as far as known."""

    key: str
    name: str
    path: Path
    size_bytes: int = 0


@dataclass(frozen=True)
class Contents:
    """Everything that a source has, or that a conversion takes from it; `order` has the keys in the state dict's order."""

    tensors: tuple[TensorEntry, ...]
    objects: tuple[ObjectEntry, ...]
    order: tuple[str, ...]

    @property
    def entries(self) -> "tuple[TensorEntry | ObjectEntry, ...]":
        return (*self.tensors, *self.objects)

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.entries)

    def chosen(self, rules: KeyRules) -> "Contents":
        """The entries that the rules take, under their new names.

        Raises:
            ConfigInvalid: see KeyRules.
        """
        names = rules.new_names(self.order)

        def path_of(entry: TensorEntry | ObjectEntry) -> Path:
            return rename_path(entry.path, names[entry.key])

        return Contents(
            tuple(replace(e, name=names[e.key], path=path_of(e)) for e in self.tensors if e.key in names),
            tuple(replace(e, name=names[e.key], path=path_of(e)) for e in self.objects if e.key in names),
            tuple(key for key in self.order if key in names),
        )

    def without_objects(self) -> "Contents":
        """The tensors alone."""
        objects = {entry.key for entry in self.objects}
        return Contents(self.tensors, (), tuple(key for key in self.order if key not in objects))


@dataclass(frozen=True)
class Part:
    """A part of a tensor that is to be read."""

    entry: TensorEntry
    chunk: Chunk

    @property
    def size_bytes(self) -> int:
        return self.chunk.elements * self.entry.dtype.itemsize


Unit = TypeVar("Unit", bound=Part | ObjectEntry)


class Source(Protocol):
    """A state dict that can be read in parts, by one thread."""

    contents: Contents

    def check(self, contents: Contents) -> None:
        """Checks that all of `contents` can be read, as far as possible without reading it.

        Raises:
            ReplicatedCkptError
        """

    def read(self, parts: Sequence[Part]) -> list[torch.Tensor]:
        """The parts, each a contiguous tensor of its own on the CPU; all of them are in memory at once.

        Raises:
            ReplicatedCkptError: no intact copy can be read.
        """

    def read_objects(self, entries: Sequence[ObjectEntry]) -> Mapping[str, bytes]:
        """By key, each object as `torch.save` writes it.

        Raises:
            ReplicatedCkptError: no intact copy can be read.
        """

    def close(self) -> None:
        """Closes all open files and connections."""


def windows(units: Iterable[Unit]) -> Iterator[list[Unit]]:
    """Groups of parts and objects, of at most WINDOW_BYTES or of one member. An object of unknown size is by itself."""
    group: list[Unit] = []
    size_bytes = 0
    for unit in units:
        # An object's size is often unknown until it is read: it may fill a window alone.
        weight = unit.size_bytes or (WINDOW_BYTES if isinstance(unit, ObjectEntry) else 0)
        if group and size_bytes + weight > WINDOW_BYTES:
            yield group
            group, size_bytes = [], 0
        group.append(unit)
        size_bytes += weight
    if group:
        yield group


def stream_tensors(source: Source, entries: Sequence[TensorEntry]) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
    """The tensors, one after the other, in pieces in the order of their rows."""
    for group in windows(_windows_of(entries)):
        yield from zip((part.entry for part in group), source.read(group), strict=True)


def _windows_of(entries: Iterable[TensorEntry]) -> Iterator[Part]:
    for entry in entries:
        whole = Chunk.whole(entry.shape)
        check_covered(entry)
        yield from (Part(entry, chunk) for chunk in whole.runs(whole, WINDOW_BYTES // entry.dtype.itemsize))


def check_covered(entry: TensorEntry) -> None:
    """Raises ConfigInvalid unless the chunks of a tensor hold all of its elements. Missing elements would be garbage."""
    whole = Chunk.whole(entry.shape)
    if sum(chunk.elements for chunk in entry.chunks) < whole.elements:
        raise ConfigInvalid(f"The checkpoint holds only a part of {entry.key!r}.", "Leave it out with --exclude.")


def check_plain(key: str, tensor: torch.Tensor) -> None:
    """Raises ConfigInvalid if a tensor is sparse or quantized, or is not on the CPU."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
        kind = "quantized" if tensor.is_quantized else tensor.layout
        raise ConfigInvalid(f"{key!r} is not a plain tensor ({kind}, {tensor.device}).", "Use --exclude.")


CountBytes = Callable[[int], None]
"""Called with the number of further bytes that were converted."""


@dataclass(frozen=True)
class Progress:
    """The progress of a conversion. `step` is "writing" or "verifying"."""

    step: str
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class Converted:
    """The result of a conversion. `skipped` are keys that the format has no place for."""

    checkpoint_id: str
    place: str
    tensors: int
    objects: int
    size_bytes: int
    seconds: float
    skipped: tuple[str, ...] = ()

    @classmethod
    def of(cls, contents: Contents, checkpoint_id: str, place: str, seconds: float, skipped: tuple[str, ...]) -> Self:
        counts = (len(contents.tensors), len(contents.objects), contents.size_bytes)
        return cls(checkpoint_id, place, *counts, seconds, skipped)


class Reporter:
    """Adds up the bytes that were converted, and reports them."""

    def __init__(self, total_bytes: int, progress: Callable[[Progress], None] | None) -> None:
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._progress = progress

    def more(self, count: int) -> None:
        """Adds bytes that were read and written."""
        self._done_bytes += count
        self._report_progress("writing", self._done_bytes)

    def verifying(self) -> None:
        """Reports that everything was written, and is being read back."""
        self._report_progress("verifying", self._total_bytes)

    def _report_progress(self, step: str, done_bytes: int) -> None:
        if self._progress is not None:
            self._progress(Progress(step, done_bytes, self._total_bytes))
