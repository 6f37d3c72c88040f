"""Small files of a staged save are written completely or not at all, whatever ends the save meanwhile."""

import contextlib
import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest

from replicated_ckpt import failpoints
from replicated_ckpt.core.layout import MANIFEST_NAME, METADATA_NAME
from replicated_ckpt.errors import SaveAborted, StoreError, StoreFull
from replicated_ckpt.stores.files import durable
from replicated_ckpt.stores.local.shard_file import FileSink
from replicated_ckpt.stores.local.store import LocalStore
from tests.stores.local.test_local import METADATA, SHARD, staged


def test_a_commit_waits_for_a_small_file_that_is_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Re-protection writes `.metadata` during a commit: the commit waits, succeeds, and publishes no partial file."""
    store = LocalStore(tmp_path)
    save = staged(store, 1, b"bytes")
    writing, go_on, write_all = threading.Event(), threading.Event(), durable.write_all

    def write_slowly(fd: int, data: bytes | memoryview) -> None:
        writing.set()
        go_on.wait(10)
        write_all(fd, data)

    monkeypatch.setattr(durable, "write_all", write_slowly)
    with ThreadPoolExecutor(2) as pool:
        written = pool.submit(store.put_small, save, METADATA_NAME, METADATA)
        assert writing.wait(10)
        committed = pool.submit(store.commit, save)
        with contextlib.suppress(TimeoutError):
            committed.result(0.5)
        go_on.set()
        written.result(10)
        assert committed.result(10) == (SHARD,)
    assert {path.name for path in store.final("step-1").iterdir()} == {MANIFEST_NAME, METADATA_NAME, SHARD}


def test_a_small_file_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk, the previous files stay, and no temporary file is left."""
    store = LocalStore(tmp_path)
    save = staged(store, 1, b"bytes")
    before = sorted(store.staging(save).iterdir())

    def is_full(fd: int, data: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(durable, "write_all", is_full)
    with pytest.raises(StoreFull):
        store.put_small(save, METADATA_NAME, METADATA)
    assert sorted(store.staging(save).iterdir()) == before


def test_a_file_that_comes_while_its_save_is_published_leaves_nothing(tmp_path: Path) -> None:
    """A peer begins to send `.metadata` during a commit: the file is refused, and no part of it is published."""
    store = LocalStore(tmp_path)
    save = staged(store, 1, b"bytes")
    begun: list[FileSink] = []
    path = store.path_of_staged(save, METADATA_NAME)
    with failpoints.arm("commit.described", lambda _: begun.append(FileSink.create(path))):
        store.commit(save)
    with pytest.raises(SaveAborted):
        begun[0].finish_durably()
    assert {path.name for path in store.final("step-1").iterdir()} == {MANIFEST_NAME, METADATA_NAME, SHARD}


def test_a_later_flush_finds_a_renamed_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later flush finds a file that a commit has renamed, and ignores one that was removed."""
    first, final = tmp_path / "staged", tmp_path / "final"
    first.write_bytes(b"a copy")
    flush, flushed = durable.flush_later(first), list[int]()
    first.rename(final)
    monkeypatch.setattr(os, "fsync", lambda fd: flushed.append(os.fstat(fd).st_ino))
    flush()
    durable.flush_later(first)()
    assert flushed == [final.stat().st_ino]


def test_a_secret_is_not_written_where_others_could_read_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a mount that refuses fchmod and gives files mode 0755, as FAT does, writing a secret raises and leaves no
    file.
    """
    path = tmp_path / "token"
    real = os.open
    refused = mock.Mock(side_effect=OSError(errno.EPERM, os.strerror(errno.EPERM)))
    monkeypatch.setattr(os, "fchmod", refused)
    monkeypatch.setattr(os, "open", lambda at, flags, mode=0o777, **more: real(at, flags, mode | 0o755, **more))
    with (
        pytest.raises(StoreError, match="fchmod to 0600 is refused") as raised,
        durable.translate_errors("/nvme", "write", "token"),
    ):
        durable.write_file(path, b"secret", 0o600)
    assert "file modes" in raised.value.hint
    assert list(tmp_path.iterdir()) == []
