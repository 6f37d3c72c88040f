"""The scrub goes on: on a full disk, after a defect, and past a checkpoint that it cannot read."""

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from replicated_ckpt.agent.repair.scrub import Scrubber
from replicated_ckpt.core.inventory import Holding
from replicated_ckpt.node.state.damage import DamageBook
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.throttle import Pace
from tests.agent.agents import wait_for
from tests.agent.checkpoints import checkpointed, shard

IDS = ["step-1", "step-2", "step-3"]


class Reading:
    """A scrub of three checkpoints, which fails at the first one with `bad`. `read` lists the checkpoints that it has
    read.
    """

    def __init__(self, root: Path, bad: Exception | None = None) -> None:
        store, self.stopping = LocalStore(root), threading.Event()
        for number, checkpoint_id in enumerate(IDS, 1):
            checkpointed([store], number, {shard(0): (0,)}, checkpoint_id=checkpoint_id, copies=1, size_bytes=3000)
        self.read: list[str] = []
        self.bad = bad
        pace = Pace(1e12, self.stopping)
        damage = DamageBook(store)
        damage.begin_reading = lambda: self._note  # type: ignore[method-assign]
        self.scrubber = Scrubber(store, store.node_id(), pace, self.stopping, 0.01, lambda _: None, damage)

    def _note(self, holding: Holding) -> None:
        if self.bad is not None and holding.checkpoint_id == IDS[0]:
            raise self.bad
        self.read.append(holding.checkpoint_id)


def test_a_full_disk_ends_no_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The position cannot be written: every checkpoint is read all the same."""

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    reading = Reading(tmp_path / "root")
    monkeypatch.setattr("replicated_ckpt.node.state.state_file.write_file", fail)
    assert reading.scrubber.scrub().passes == 1
    assert reading.read == IDS


def test_a_failed_pass_does_not_keep_others_from_being_read(tmp_path: Path) -> None:
    """One checkpoint fails in each pass: the other checkpoints are read all the same."""
    reading = Reading(tmp_path / "root", OSError(errno.EIO, os.strerror(errno.EIO)))
    for _ in range(2):
        with pytest.raises(OSError, match="Input/output"):
            reading.scrubber.scrub()
        assert not reading.scrubber.done.is_running
    assert reading.read == IDS[1:]


class _Meanwhile(Pace):
    """Calls `act` before the last bytes are read."""

    def __init__(self, stopping: threading.Event, size_bytes: int, act: Callable[[], None]) -> None:
        super().__init__(1e12, stopping)
        self._left, self._act = size_bytes, act

    def take(self, size_bytes: int) -> None:
        self._left -= size_bytes
        if size_bytes and self._left <= 0:
            self._act()


@pytest.mark.parametrize("is_known_before", [False, True])
def test_a_mark_set_during_a_pass_stays(tmp_path: Path, *, is_known_before: bool) -> None:
    """A load finds a shard damaged that the running pass has read before: the mark stays until the next pass."""
    store, stopping = LocalStore(tmp_path / "root"), threading.Event()
    manifest = checkpointed([store], 1, {shard(0): (0,), shard(1): (0,)}, copies=1, size_bytes=3000)
    book, place = DamageBook(store), ("step-1", manifest.save_id, shard(0))
    if is_known_before:
        book.mark(*place)
    pace = _Meanwhile(stopping, sum(manifest.shard_sizes.values()), lambda: book.mark(*place))
    scrubber = Scrubber(store, store.node_id(), pace, stopping, 1.0, lambda _: None, book)
    assert scrubber.scrub().findings == 0
    assert book.is_known(*place)
    Scrubber(store, store.node_id(), Pace(1e12, stopping), stopping, 1.0, lambda _: None, book).scrub()
    assert not book.is_known(*place), "the next pass has read the intact shard"


def test_a_defect_ends_no_scrub(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The thread logs the error and begins again."""
    reading = Reading(tmp_path / "root", LookupError("a defect"))
    reading.scrubber.start()
    try:
        wait_for(lambda: IDS[2] in reading.read, 20, "the other checkpoints")
        reading.bad = None
        wait_for(lambda: reading.scrubber.done.passes, 20, "a whole pass")
    finally:
        reading.stopping.set()
        reading.scrubber.join()
    assert "a defect in replicated_ckpt: the scrub stopped" in caplog.text
