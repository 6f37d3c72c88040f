"""Direct I/O: the same bytes as through the page cache, with buffered writes on file systems without direct I/O."""

import errno
import fcntl
import io
import os
from collections.abc import Sequence
from email.message import Message
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from replicated_ckpt import ReplicatedWriter
from replicated_ckpt.config import AgentConfig
from replicated_ckpt.errors import ConfigInvalid
from replicated_ckpt.node.saves.receive import receive_file
from replicated_ckpt.node.saves.request_body import Body
from replicated_ckpt.stores.files import direct
from replicated_ckpt.stores.files.direct import PAGE_BYTES, is_worthwhile, page_aligned
from replicated_ckpt.stores.local.shard_file import FileSink
from replicated_ckpt.stores.tee import Buffers, Tee
from replicated_ckpt.testing.shards import table_of

DATA = os.urandom(5 * PAGE_BYTES + 123)
FOOTER_BYTES = table_of([b"one block"]).footer_bytes


def written(path: Path, data: bytes) -> None:
    sink = FileSink.create(path, "on")
    tee = Tee([sink], Buffers(2, 2 * PAGE_BYTES), copies=sink.is_direct)
    tee.write(data[:100])
    tee.refer(memoryview(data)[100:])
    assert tee.finish()[1][0].error is None


@pytest.mark.parametrize("size_bytes", [0, 1, PAGE_BYTES - FOOTER_BYTES, PAGE_BYTES, 2 * PAGE_BYTES, len(DATA)])
def test_the_file_is_the_same(size_bytes: int, tmp_path: Path) -> None:
    """A file of any size has its data and footer, without padding."""
    data = DATA[:size_bytes]
    written(tmp_path / "shard", data)
    assert (tmp_path / "shard").read_bytes() == data + table_of([data]).encode()


@pytest.mark.parametrize("size_bytes", [1, PAGE_BYTES - FOOTER_BYTES, len(DATA)])
def test_a_received_file_is_the_same(size_bytes: int, tmp_path: Path) -> None:
    """A received copy is verified against its footer and stored, also if it has whole pages only."""
    data = DATA[:size_bytes]
    raw = data + table_of([data]).encode()
    headers = Message()
    headers["Content-Length"] = str(len(raw))
    body = Body(io.BytesIO(raw), headers)
    found = receive_file(tmp_path / "shard", body, lambda _: None, durable=True, direct_io="on")
    assert (tmp_path / "shard").read_bytes() == raw
    assert found.crc32c == table_of([data]).file_crc()


def is_open_for_direct_io(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def test_whole_pages_go_past_the_page_cache(tmp_path: Path) -> None:
    """Whole pages are written with O_DIRECT, the rest without."""
    sizes: list[tuple[bool, int]] = []
    write, writev = os.write, os.writev

    def noting_write(fd: int, data: memoryview) -> int:
        sizes.append((is_open_for_direct_io(fd), len(data)))
        return write(fd, data)

    def noting_writev(fd: int, pieces: Sequence[memoryview]) -> int:
        sizes.append((is_open_for_direct_io(fd), sum(map(len, pieces))))
        return writev(fd, pieces)

    sink = FileSink.create(tmp_path / "probe", "on")
    sink.discard()
    if not sink.is_direct:
        pytest.skip("this file system takes no direct I/O")
    with mock.patch.object(os, "write", noting_write), mock.patch.object(os, "writev", noting_writev):
        written(tmp_path / "shard", DATA)
    rest = 123 + len(table_of([DATA]).encode())
    assert sizes == [(True, 2 * PAGE_BYTES)] * 2 + [(True, PAGE_BYTES), (False, rest)]


@pytest.mark.parametrize("refused", ["flag", "write"])
def test_a_file_system_that_refuses_gets_buffered_writes(refused: str, tmp_path: Path) -> None:
    """The file system refuses O_DIRECT as a flag or at the first write: the file is complete."""
    control, write = fcntl.fcntl, os.write

    def refusing_flag(fd: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O here")
        return control(fd, command, argument)

    def refusing_write(fd: int, data: memoryview) -> int:
        if is_open_for_direct_io(fd):
            raise OSError(errno.EINVAL, "no direct I/O here")
        return write(fd, data)

    with (
        mock.patch.object(fcntl, "fcntl", refusing_flag)
        if refused == "flag"
        else mock.patch.object(os, "write", refusing_write)
    ):
        written(tmp_path / "shard", DATA)
    assert (tmp_path / "shard").read_bytes() == DATA + table_of([DATA]).encode()


def test_other_errors_are_errors(tmp_path: Path) -> None:
    """A full disk raises, and is not taken for a refusal of direct I/O."""
    sink = FileSink.create(tmp_path / "shard", "on")
    full = mock.patch.object(os, "write", side_effect=OSError(errno.ENOSPC, "full"))
    with full, pytest.raises(OSError, match="full"):
        direct.write_direct(sink._fd, page_aligned(PAGE_BYTES))
    sink.discard()


def test_file_systems_without_a_device_are_left_alone() -> None:
    """`auto` skips direct I/O on file systems without a block device. `on` and `off` apply everywhere."""
    assert [is_worthwhile(Path("/proc"), mode) for mode in ("auto", "on", "off")] == [False, True, False]


def test_argument_then_environment_then_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writers and agents take the mode from the argument, else from REPLICATED_CKPT_DIRECT_IO, else `auto`. They refuse
    other values.
    """

    def writers(mode: Any) -> str:
        return ReplicatedWriter("/x", direct_io=mode).config.direct_io

    monkeypatch.delenv("REPLICATED_CKPT_DIRECT_IO", raising=False)
    assert (writers(None), writers("on"), AgentConfig("/x").direct_io) == ("auto", "on", "auto")
    monkeypatch.setenv("REPLICATED_CKPT_DIRECT_IO", "off")
    assert (writers(None), writers("on"), AgentConfig("/x").direct_io) == ("off", "on", "off")
    with pytest.raises(ConfigInvalid, match="maybe"):
        writers("maybe")
    with pytest.raises(ConfigInvalid, match="maybe"):
        AgentConfig("/x", direct_io="maybe")
