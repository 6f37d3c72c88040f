"""Chunks are cut into runs of adjoining elements, for any shape."""

import math

from hypothesis import given
from hypothesis import strategies as st

from replicated_ckpt.core.chunk import Chunk

SIZES = st.lists(st.integers(1, 5), max_size=4)


@st.composite
def chunks_within(draw: st.DrawFn) -> tuple[Chunk, Chunk]:
    """A chunk, and one inside it."""
    sizes = draw(SIZES)
    outer = Chunk(tuple(draw(st.integers(0, 9)) for _ in sizes), tuple(sizes))
    starts = [draw(st.integers(0, size - 1)) for size in sizes]
    lengths = [draw(st.integers(1, size - start)) for size, start in zip(sizes, starts, strict=True)]
    offsets = (offset + start for offset, start in zip(outer.offsets, starts, strict=True))
    return outer, Chunk(tuple(offsets), tuple(lengths))


def positions(chunk: Chunk, outer: Chunk) -> list[int]:
    """The position of each element among those of `outer` in row order, computed naively."""
    found = [0]
    strides = [math.prod(outer.sizes[axis + 1 :]) for axis in range(len(outer.sizes))]
    for offset, start, size, stride in zip(chunk.offsets, outer.offsets, chunk.sizes, strides, strict=True):
        found = [at + (offset - start + step) * stride for at in found for step in range(size)]
    return found


@given(chunks_within(), st.integers(1, 12))
def test_runs_are_the_chunk_in_order_and_each_in_one_piece(chunks: tuple[Chunk, Chunk], elements_max: int) -> None:
    """Runs cover each element once, in row order. Each run is contiguous in the outer chunk, and at most `elements_max`
    long.
    """
    outer, inner = chunks
    seen: list[int] = []
    for run in inner.runs(outer, elements_max):
        start = run.start_in(outer)
        assert positions(run, outer) == list(range(start, start + run.elements))
        assert run.elements <= elements_max
        seen += positions(run, outer)
    assert seen == positions(inner, outer)


@given(chunks_within(), chunks_within())
def test_the_common_chunk_has_the_shared_elements(first: tuple[Chunk, Chunk], second: tuple[Chunk, Chunk]) -> None:
    """The common chunk has exactly the shared elements. None stands for no common element."""
    a, b = first[1], second[1]
    if len(a.sizes) != len(b.sizes):
        return
    wide = Chunk((0,) * len(a.sizes), (20,) * len(a.sizes))
    both = set(positions(a, wide)) & set(positions(b, wide))
    common = a.common(b)
    assert (set() if common is None else set(positions(common, wide))) == both


def test_an_empty_tensor_has_no_runs() -> None:
    """A tensor without elements has no runs, and a scalar has one."""
    assert list(Chunk.whole((3, 0)).runs(Chunk.whole((3, 0)), 4)) == []
    assert list(Chunk.whole(()).runs(Chunk.whole(()), 4)) == [Chunk.whole(())]
