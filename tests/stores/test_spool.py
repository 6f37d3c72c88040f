"""The spool: what one process puts the others take, whole and in order, and nobody waits for one that is gone."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from replicated_ckpt.stores import spool
from replicated_ckpt.stores.spool import SLOTS, Spool, TakenSpool, spool_path

SLOT = 1 << 16


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Spool]:
    made = Spool(spool_path(tmp_path, "n", 0), 2, SLOT)
    yield made
    made.close()


@pytest.fixture
def taker(tmp_path: Path) -> Iterator[TakenSpool]:
    made = TakenSpool(spool_path(tmp_path, "n", 0), 1, 2, SLOT)
    yield made
    made.close()


def taken(found: memoryview | bool | None) -> bytes:
    assert isinstance(found, memoryview)
    return bytes(found)


def test_pieces_are_taken_as_they_were_put(own: Spool, taker: TakenSpool) -> None:
    """A piece may lie in its slot already, or elsewhere; a slot is used again, and each taker says when it is done."""
    assert taker.peek(0) is None
    inside = own.slot(0)[100:105]
    inside[:] = b"slot0"
    own.put(0, inside)
    own.put(1, memoryview(bytearray(b"elsewhere")))
    assert taken(taker.peek(0)) == b"slot0"
    assert taken(taker.peek(1)) == b"elsewhere"
    assert not own.has_taken(1, 0)
    taker.taken(1)
    assert own.has_taken(1, 0)
    assert own.has_taken(1, 1)
    assert not own.has_taken(0, 0)
    assert taker.peek(SLOTS) is None
    own.put(SLOTS, memoryview(bytearray(b"again")))
    assert taken(taker.peek(SLOTS)) == b"again"


def test_a_piece_that_changed_is_not_taken(own: Spool, taker: TakenSpool) -> None:
    """Bytes in the spool are believed by their checksum only."""
    own.put(0, memoryview(bytearray(b"intact")))
    own.slot(0)[2] ^= 1
    assert taker.peek(0) is False


def test_what_does_not_come_is_said(own: Spool, taker: TakenSpool) -> None:
    """A piece that could not be fetched, and all that follow once the spool is closed, are fetched by each taker."""
    own.put(0, None)
    assert taker.peek(0) is False
    assert taker.peek(1) is None
    own.close_for_others()
    assert taker.peek(1) is False


@pytest.mark.parametrize("is_made", [True, False])
def test_nobody_waits_for_one_that_gives_no_sign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_made: bool
) -> None:
    """A process that died, or never came, is given up after the patience is over, for good."""
    monkeypatch.setattr(spool, "PATIENCE_S", 0.0)
    own = Spool(spool_path(tmp_path, "n", 0), 2, SLOT) if is_made else None
    taker = TakenSpool(spool_path(tmp_path, "n", 0), 1, 2, SLOT)
    taker.peek(0)
    assert taker.peek(0) is False
    assert not taker.lives()
    if own is not None:
        own.put(0, memoryview(bytearray(b"too late")))
        own.close()
    assert taker.peek(0) is False
    taker.close()


def test_spools_of_the_dead_are_removed(tmp_path: Path) -> None:
    """The next spool in a directory removes those whose processes are gone, and no other."""
    living = Spool(spool_path(tmp_path, "m", 0), 1, SLOT)
    dead = spool_path(tmp_path, "m", 1)
    dead.write_bytes(b"left behind")
    last = Spool(spool_path(tmp_path, "n", 0), 1, SLOT)
    assert {path.name for path in tmp_path.iterdir()} == {"spool-m-0", "spool-n-0"}
    living.close()
    last.close()
    assert list(tmp_path.iterdir()) == []
