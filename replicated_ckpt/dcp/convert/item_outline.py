"""Where the elements of a large stored tensor lie, told from the two ends of its container: nothing between is read.

Source: torch.serialization and torch._utils (torch 2.7 to 2.15) for what `torch.save` makes of a tensor.
"""

import io
import math
import pickle
import struct
import zipfile
from collections import OrderedDict
from typing import Any

END_BYTES = 4096
"""So much of each end is looked at; what surrounds the elements takes about 1 KiB."""

_LOCAL_HEADER_BYTES = 30
_REBUILDERS = {("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_tensor_v3")}


class _Ends(io.RawIOBase):
    """A file of which only the ends are there."""

    def __init__(self, head: bytes, tail: bytes, size_bytes: int) -> None:
        super().__init__()
        self._head, self._tail, self._size, self._position = head, tail, size_bytes, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        start = self._position
        end = self._size if size < 0 else min(start + size, self._size)
        tail_start = self._size - len(self._tail)
        if end <= len(self._head):
            found = self._head[start:end]
        elif start >= tail_start:
            found = self._tail[start - tail_start : end - tail_start]
        else:
            raise ValueError(f"bytes {start} to {end} are not at the ends")
        self._position = end
        return found


def data_start(head: bytes, tail: bytes, size_bytes: int, shape: tuple[int, ...], itemsize: int) -> int | None:
    """Position of the first element in a container of `size_bytes`, if the elements lie there row by row.

    None: they do not, or it is no such container.
    """
    try:
        with zipfile.ZipFile(_Ends(head, tail, size_bytes)) as archive:
            entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
        outline = entries["data.pkl"]
        start = _start(head, outline)
        layout = _Unpickler(io.BytesIO(head[start : start + outline.file_size])).load()
        if not isinstance(layout, _Layout) or not layout.is_row_by_row(shape):
            return None
        data = entries[f"data/{layout.key}"]
        if data.compress_type != zipfile.ZIP_STORED or data.file_size != math.prod(shape) * itemsize:
            return None
        return _start(head, data)
    except (
        ValueError,
        KeyError,
        IndexError,
        TypeError,
        struct.error,
        zipfile.BadZipFile,
        pickle.UnpicklingError,
        EOFError,
    ):
        return None


def _start(head: bytes, entry: zipfile.ZipInfo) -> int:
    name_bytes, extra_bytes = struct.unpack_from("<2H", head, entry.header_offset + 26)
    return int(entry.header_offset + _LOCAL_HEADER_BYTES + name_bytes + extra_bytes)


class _Layout:
    """What a pickle says of a tensor: the storage's key, and how the elements lie in it."""

    def __init__(self, storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> None:
        self.key: str = storage
        self._offset = offset
        self._size = size
        self._stride = stride

    def is_row_by_row(self, shape: tuple[int, ...]) -> bool:
        if self._offset != 0 or self._size != shape:
            return False
        expected = 1
        for size, stride in zip(reversed(shape), reversed(self._stride), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


class _Unpickler(pickle.Unpickler):
    """Makes a _Layout of a tensor's pickle, and nothing else of anything."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _REBUILDERS:
            return _Layout
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module in ("torch", "torch.storage"):
            return name  # of a storage or a dtype: a text, which nothing can be done with
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a plain tensor")

    def persistent_load(self, pid: Any) -> Any:
        return pid[2]
