"""Chunks: rectangular parts of a tensor, and their division into runs that are contiguous in memory or in a file."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class Chunk:
    """A rectangular part of a tensor: its offsets and sizes, in elements by dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Self:
        return cls((0,) * len(shape), tuple(shape))

    @property
    def elements(self) -> int:
        return math.prod(self.sizes)

    def common(self, other: "Chunk") -> "Chunk | None":
        """The intersection; None if it is empty."""
        starts = tuple(map(max, self.offsets, other.offsets))
        ends = map(min, self._ends(), other._ends())  # noqa: SLF001 - of the same class
        sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return None if min(sizes, default=1) <= 0 else Chunk(starts, sizes)

    def _ends(self) -> tuple[int, ...]:
        return tuple(offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))

    def relative_to(self, outer: "Chunk") -> "Chunk":
        """The same part, with offsets relative to `outer`."""
        offsets = (offset - start for offset, start in zip(self.offsets, outer.offsets, strict=True))
        return Chunk(tuple(offsets), self.sizes)

    def start_in(self, outer: "Chunk") -> int:
        """Position of the first element among those of `outer` in row-major order."""
        position = 0
        for offset, size in zip(self.relative_to(outer).offsets, outer.sizes, strict=True):
            position = position * size + offset
        return position

    def runs(self, outer: "Chunk", elements_max: int) -> Iterator["Chunk"]:
        """Cuts this part of `outer` into chunks, in row-major order.

        Each is contiguous in a row-major layout of `outer`, and has at most `elements_max` elements.
        """
        if self.elements == 0:
            return
        split = next((axis for axis, size in enumerate(self.sizes) if size > 1), None)
        if split is None or (self.elements <= elements_max and self._is_full_behind(split, outer)):
            yield self
            return
        row = math.prod(self.sizes[split + 1 :])
        count = max(1, elements_max // row) if self._is_full_behind(split, outer) else 1
        for start in range(0, self.sizes[split], count):
            size = min(count, self.sizes[split] - start)
            offsets = (*self.offsets[:split], self.offsets[split] + start, *self.offsets[split + 1 :])
            sizes = (*self.sizes[:split], size, *self.sizes[split + 1 :])
            yield from Chunk(offsets, sizes).runs(outer, elements_max)

    def _is_full_behind(self, axis: int, outer: "Chunk") -> bool:
        return self.sizes[axis + 1 :] == outer.sizes[axis + 1 :]


def is_contiguous(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the strides describe a contiguous row-major tensor."""
    if len(sizes) != len(strides):
        return False
    expected = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size > 1 and stride != expected:  # torch leaves the stride of a dimension of size 1 arbitrary
            return False
        expected *= max(size, 1)
    return True
