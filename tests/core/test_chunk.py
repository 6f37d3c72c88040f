"""Chunks: cut into runs that lie in one piece, whatever the shape."""

import math

from hypothesis import given
from hypothesis import strategies as st

from replicated_ckpt.core.chunk import Chunk

SIZES = st.lists(st.integers(1, 5), max_size=4)


@st.composite
def chunks_within(draw: st.DrawFn) -> tuple[Chunk, Chunk]:
    """A chunk somewhere, and one inside it."""
    sizes = draw(SIZES)
    outer = Chunk(tuple(draw(st.integers(0, 9)) for _ in sizes), tuple(sizes))
    starts = [draw(st.integers(0, size - 1)) for size in sizes]
    lengths = [draw(st.integers(1, size - start)) for size, start in zip(sizes, starts, strict=True)]
    offsets = (offset + start for offset, start in zip(outer.offsets, starts, strict=True))
    return outer, Chunk(tuple(offsets), tuple(lengths))


def positions(chunk: Chunk, outer: Chunk) -> list[int]:
    """Of each element among those of `outer` row by row, the slow way."""
    found = [0]
    strides = [math.prod(outer.sizes[axis + 1 :]) for axis in range(len(outer.sizes))]
    for offset, start, size, stride in zip(chunk.offsets, outer.offsets, chunk.sizes, strides, strict=True):
        found = [at + (offset - start + step) * stride for at in found for step in range(size)]
    return found


@given(chunks_within(), st.integers(1, 12))
def test_runs_are_the_chunk_in_order_and_each_in_one_piece(chunks: tuple[Chunk, Chunk], elements_max: int) -> None:
    """Each element once, row by row; a run is adjoining elements of the outer chunk, and not larger than allowed."""
    outer, inner = chunks
    seen: list[int] = []
    for run in inner.runs(outer, elements_max):
        start = run.start_in(outer)
        assert positions(run, outer) == list(range(start, start + run.elements))
        assert run.elements <= elements_max
        seen += positions(run, outer)
    assert seen == positions(inner, outer)


@given(chunks_within(), chunks_within())
def test_what_is_common_is_what_lies_in_both(first: tuple[Chunk, Chunk], second: tuple[Chunk, Chunk]) -> None:
    """Element by element; None stands for nothing."""
    a, b = first[1], second[1]
    if len(a.sizes) != len(b.sizes):
        return
    wide = Chunk((0,) * len(a.sizes), (20,) * len(a.sizes))
    both = set(positions(a, wide)) & set(positions(b, wide))
    common = a.common(b)
    assert (set() if common is None else set(positions(common, wide))) == both


def test_nothing_has_no_runs() -> None:
    """A tensor without elements is not read at all; a single number is one run."""
    assert list(Chunk.whole((3, 0)).runs(Chunk.whole((3, 0)), 4)) == []
    assert list(Chunk.whole(()).runs(Chunk.whole(()), 4)) == [Chunk.whole(())]
