"""The speed of the machine's resources: a plain loop over the ranks' own bytes for each, on all ranks at once."""

import itertools
import mmap
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch.distributed as dist

from benchmarks.rank.cost import Sample, measured
from benchmarks.rank.state import State
from benchmarks.rank.ways import cool_files, shared_directory
from replicated_ckpt.core.integrity.checksum import crc32c
from tests.steps.context import Context

PIECE_BYTES = 4 << 20
_SLICE_BYTES = 1 << 20
_SOCKET_TIMEOUT_S = 30.0
_HOST_ENV = "REPLICATED_CKPT_HOST"  # the address at which this node receives copies


class Probes:
    """One probe of each kind per rank. `run` measures each once."""

    def __init__(self, context: Context, state: State, *, is_disk: bool) -> None:
        self._context, self._state, self._is_disk = context, state, is_disk
        folder = shared_directory(context) if is_one_medium(context) else context.root
        self._path = folder / f"probe{context.rank}.distcp"
        self._scratch = mmap.mmap(-1, PIECE_BYTES)  # page-aligned, as direct I/O requires

    def run(self) -> dict[str, Sample | None]:
        taken = {name: measured(work, _nothing, None) for name, work in self._in_memory().items()}
        taken["write"] = measured(self._write_buffered, _nothing, None)
        if self._is_disk:
            if self._takes_direct():
                taken["write direct"] = measured(self._write_direct, _nothing, None)
            cool_files(self._path.parent)
        taken["read"] = measured(self._read, _nothing, None)
        dist.barrier()
        self._path.unlink()
        return taken

    def _in_memory(self) -> Mapping[str, Callable[[], None]]:
        works: dict[str, Callable[[], None]] = {"copy": self._copy, "checksum": self._checksum}
        if self._context.world_size > 1:
            works["network"] = self._network()
        return works

    def _pieces(self) -> Iterator[memoryview]:
        for buffer in self._state.buffers():
            for start in range(0, len(buffer), PIECE_BYTES):
                yield buffer[start : start + PIECE_BYTES]

    def _copy(self) -> None:
        target = memoryview(self._scratch)
        for piece in self._pieces():
            target[: len(piece)] = piece

    def _checksum(self) -> None:
        for piece in self._pieces():
            crc32c(piece)

    def _write_buffered(self) -> None:
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            for batch in _batches(self._pieces()):
                _write_all(fd, batch)
            os.fsync(fd)
        finally:
            os.close(fd)

    def _takes_direct(self) -> bool:
        """Whether the file system supports direct I/O. The answer is the same on all ranks, which share the file
        system.
        """
        try:
            os.close(os.open(self._path, os.O_WRONLY | os.O_DIRECT))
        except OSError:
            return False
        return True

    def _write_direct(self) -> None:
        """Writes whole pieces from aligned memory, without the copy into it that a save would need."""
        left = self._state.size_bytes // PIECE_BYTES * PIECE_BYTES
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT)
        try:
            while left > 0:
                left -= os.write(fd, self._scratch)
            os.fsync(fd)
        finally:
            os.close(fd)

    def _read(self) -> None:
        fd = os.open(self._path, os.O_RDONLY)
        try:
            while os.readv(fd, [self._scratch]):
                pass
        finally:
            os.close(fd)

    def _network(self) -> Callable[[], None]:
        """Every rank sends its bytes to a rank on the next node, and receives as many."""
        listener = socket.create_server((os.environ.get(_HOST_ENV, "127.0.0.1"), 0))
        listener.settimeout(_SOCKET_TIMEOUT_S)
        context = self._context
        posted: list[Any] = [None] * context.world_size
        dist.all_gather_object(posted, listener.getsockname())
        step = int(os.environ["LOCAL_WORLD_SIZE"]) % context.world_size or 1
        target = posted[(context.rank + step) % context.world_size]

        def exchange() -> None:
            receiver = threading.Thread(target=_receive_all, args=(listener,))
            receiver.start()
            with socket.create_connection(target, _SOCKET_TIMEOUT_S) as sender:
                for piece in self._pieces():
                    sender.sendall(piece)
            receiver.join()

        return exchange


def is_one_medium(context: Context) -> bool:
    """Whether all nodes' stores are on one device, so that a probe may write to any of them."""
    return len({root.stat().st_dev for root in context.roots}) == 1


def _batches(pieces: Iterator[memoryview]) -> Iterator[list[memoryview]]:
    """Batches of 64 pieces for one system call, so that small tensors do not need a call each."""
    while batch := list(itertools.islice(pieces, 64)):
        yield batch


def _write_all(fd: int, batch: list[memoryview]) -> None:
    size = sum(len(piece) for piece in batch)
    written = os.writev(fd, batch)
    while written < size:
        written += os.write(fd, b"".join(batch)[written:])


def _receive_all(listener: socket.socket) -> None:
    with ExitStack() as stack:
        stack.callback(listener.close)
        connection, _ = listener.accept()
        stack.enter_context(connection)
        connection.settimeout(_SOCKET_TIMEOUT_S)
        scratch = bytearray(_SLICE_BYTES)
        while connection.recv_into(scratch, _SLICE_BYTES, socket.MSG_WAITALL):
            pass


def _nothing() -> None:
    """Probes leave no work."""
