"""`torch.save` of one tensor into our streams: errors come out as they went in, and what surrounds the data is learned.

Source: torch.serialization (torch 2.7 to 2.15).
"""

import io
import threading
from typing import Protocol

import torch

from replicated_ckpt.dcp.tensors.container import TEMPLATE_BYTES_MAX, data_range
from replicated_ckpt.dcp.tensors.memory import empty_tensor
from replicated_ckpt.errors import ReplicatedCkptError

_DATA_WRITE_BYTES_MIN = 64 << 10
_RECORD_END_BYTES = 24
"""What ends a record of a zip container: `PK\\x07\\x08`, a CRC32 and two sizes."""
_crc32_lock = threading.Lock()
"""The switch for CRC32 in torch's zip containers is global to the process."""

Envelope = tuple[memoryview, memoryview]
"""The bytes of a container before and after the tensor's data."""


class Writable(Protocol):
    """What `save_tensor` needs of a stream."""

    def write(self, data: memoryview, /) -> int: ...


class _Recording:
    """What `torch.save` is given in place of a stream: it keeps the error of a write, as torch raises another one."""

    def __init__(self, stream: Writable) -> None:
        self._stream = stream
        self.failure: ReplicatedCkptError | None = None

    def write(self, data: memoryview) -> int:
        try:
            return self._stream.write(data)
        except ReplicatedCkptError as exc:
            self.failure = self.failure or exc
            raise

    def flush(self) -> None:
        """The stream below flushes at its end only."""


def save_tensor(tensor: torch.Tensor, stream: Writable) -> None:
    """Writes a container to a stream.

    Raises:
        ReplicatedCkptError: of the stream; torch closes its archive after a failed write, and raises what that fails with.
    """
    remembering = _Recording(stream)
    try:
        torch.save(tensor, remembering)  # type: ignore[arg-type]
    except RuntimeError as exc:
        if remembering.failure is None:
            raise
        raise remembering.failure from exc


def save_without_crc32(tensor: torch.Tensor, stream: Writable) -> None:
    """The same, without the CRC32s in the container: our own checksums cover all of it.

    Raises:
        ReplicatedCkptError: of the stream.
    """
    with _crc32_lock:
        was = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            save_tensor(tensor, stream)
        finally:
            torch.serialization.set_crc32_options(was)


class _WithoutData:
    """Takes what `torch.save` writes of a large tensor, and keeps all but its data, which it passes on in large pieces."""

    def __init__(self) -> None:
        self.head = bytearray()
        self.tail = bytearray()
        self.data_bytes = 0

    def write(self, piece: memoryview) -> int:
        if len(piece) >= _DATA_WRITE_BYTES_MIN:
            self.data_bytes += len(piece)
        elif self.data_bytes:
            self.tail += piece
        else:
            self.head += piece
        return len(piece)


def learn_envelope(dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> Envelope | None:
    """What surrounds the data of such a dense tensor: always the same bytes. A large one's memory costs nothing.

    Its first bytes are zeros. Others may be what some container left in the memory: torch takes data that begin as a
    record's end do for one, and another serialization ID comes out. All further memory is never touched. Source: torch
    2.7 to 2.15, `ostream_write_func` in caffe2/serialize/inline_container.cc. Returns None if it is not as expected.

    Raises:
        RuntimeError, ValueError, TypeError, pickle.PicklingError: there are no such tensors, or torch does not save them.
    """
    model = empty_tensor(shape, dtype, stride)
    model.untyped_storage()[:_RECORD_END_BYTES].fill_(0)
    size_bytes = model.numel() * model.element_size()
    if size_bytes > TEMPLATE_BYTES_MAX:
        parts = _WithoutData()
        save_without_crc32(model, parts)
        is_understood = parts.data_bytes == size_bytes
        return (memoryview(bytes(parts.head)), memoryview(bytes(parts.tail))) if is_understood else None
    buffer = io.BytesIO()
    save_without_crc32(model, buffer)
    raw = memoryview(buffer.getvalue())
    start = data_range(raw)[0]
    return memoryview(bytes(raw[:start])), memoryview(bytes(raw[start + size_bytes :]))
