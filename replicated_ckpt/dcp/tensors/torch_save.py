"""`torch.save` of one tensor into our streams: errors pass unchanged, and the bytes around the data are learned.

Source: torch.serialization (torch 2.7 to 2.15).
"""

import io
import threading
from typing import Protocol

import torch

from replicated_ckpt.dcp.tensors.container import TEMPLATE_BYTES_MAX, data_range
from replicated_ckpt.dcp.tensors.tensor_memory import empty_tensor
from replicated_ckpt.errors import ReplicatedCkptError

_DATA_WRITE_BYTES_MIN = 64 << 10
_RECORD_END_BYTES = 24
"""The end of a record of a zip container: `PK\\x07\\x08`, a CRC32 and two sizes."""
_crc32_lock = threading.Lock()
"""The switch for CRC32 in torch's zip containers is global to the process."""

Envelope = tuple[memoryview, memoryview]
"""The bytes of a container before and after the tensor's data."""


class Writable(Protocol):
    """The stream that `save_tensor` writes to."""

    def write(self, data: memoryview, /) -> int: ...


class _Recording:
    """A stream for `torch.save` that keeps the error of a write, because torch raises another error instead."""

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
        """Does nothing: the stream below flushes at its end only."""


def save_tensor(tensor: torch.Tensor, stream: Writable) -> None:
    """Writes a container to a stream.

    Raises:
        ReplicatedCkptError: the stream's; torch itself raises the error of closing its archive after a failed write.
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
    # The option is global: a torch.save of another thread must not lose its CRC32s for longer than this.
    with _crc32_lock:
        was = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            save_tensor(tensor, stream)
        finally:
            torch.serialization.set_crc32_options(was)


class _WithoutData:
    """Keeps all that `torch.save` writes of a large tensor, except its data, which torch writes in large pieces."""

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
    """The bytes around the data of such a dense tensor: always the same. A large one's memory costs nothing.

    Its first bytes are zeroed. Otherwise they may be left from an old container: torch takes data that begin like a
    record's end for one, and writes another serialization ID. All further memory is never touched. Source: torch
    2.7 to 2.15, `ostream_write_func` in caffe2/serialize/inline_container.cc. Returns None if it is not as expected.

    Raises:
        RuntimeError, ValueError, TypeError, pickle.PicklingError: there are no such tensors, or torch does not save them.
    """
    model = empty_tensor(shape, dtype, stride)
    model.untyped_storage()[:_RECORD_END_BYTES].fill_(0)
    size_bytes = model.numel() * model.element_size()
    # A large one would be copied through memory whole, only to learn its two ends.
    if size_bytes > TEMPLATE_BYTES_MAX:
        parts = _WithoutData()
        save_without_crc32(model, parts)
        # torch wrote the data in other pieces than expected: the parts cannot be told apart.
        is_understood = parts.data_bytes == size_bytes
        return (memoryview(bytes(parts.head)), memoryview(bytes(parts.tail))) if is_understood else None
    buffer = io.BytesIO()
    save_without_crc32(model, buffer)
    raw = memoryview(buffer.getvalue())
    start = data_range(raw)[0]
    return memoryview(bytes(raw[:start])), memoryview(bytes(raw[start + size_bytes :]))
