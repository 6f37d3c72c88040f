"""A file of `torch.save` as a source: mapped to learn what is in it, and then read part by part."""

import io
import os
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from replicated_ckpt.core.chunk import Chunk
from replicated_ckpt.core.integrity.archive import find_records
from replicated_ckpt.core.pickles.follower import follow
from replicated_ckpt.dcp.convert.entries.source import Contents, ObjectEntry, Part, TensorEntry, check_plain
from replicated_ckpt.dcp.objects.storages import Storages
from replicated_ckpt.dcp.objects.values import UnknownName
from replicated_ckpt.dcp.objects.weights_only import ObjectValues, pickle_in
from replicated_ckpt.dcp.runtime.torch_private import flatten
from replicated_ckpt.dcp.tensors.container import is_plain
from replicated_ckpt.dcp.tensors.memory import memory_of, window_tensor
from replicated_ckpt.errors import ConfigInvalid, ObjectCorrupt, ObjectUnsafe, StoreError
from replicated_ckpt.stores.files.durable import read_exactly, translate_errors
from replicated_ckpt.stores.files.plain import open_plain, open_plain_file

_NAME_FILE = "Name a file of torch.save that this user can read (`ls -l` shows whose it is)."
_BRING_CLASS = "Install the package, or name the directory of the module in PYTHONPATH; in the version that saved."
_SAVE_AGAIN = (
    "Fetch it again if it was cut off. What an old torch wrote, torch.load and torch.save make into such a file."
)


class TorchFile:
    """A state dict in a file. Elements are read with `pread`, so that the mapping costs no memory.

    Raises:
        ConfigInvalid: it is no such file, or holds what torch does not load without running code and is not trusted.
    """

    def __init__(self, path: Path, *, trust_pickles: bool) -> None:
        self._path = path
        state = load_file(path, trust_pickles=trust_pickles)
        if not isinstance(state, dict):
            raise ConfigInvalid(
                f"{path} holds a {type(state).__name__}, not a state dict.",
                "Save a dict of tensors: model.state_dict(), say.",
            )
        try:
            values, paths = flatten(state)
        except ValueError as exc:
            raise ConfigInvalid(
                f"{path} holds two entries of one name: {exc}.", "Rename one of them, and save it again."
            ) from exc
        self._values = values
        tensors, objects = [], []
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                check_plain(key, value)
                shape = tuple(value.shape)
                tensors.append(TensorEntry(key, key, paths[key], value.dtype, shape, (Chunk.whole(shape),)))
            else:
                objects.append(ObjectEntry(key, key, paths[key]))
        self.contents = Contents(tuple(tensors), tuple(objects), tuple(values))
        with translate_errors(str(path.parent), "read", path.name):
            self._fd = open_plain(path)
        self._mappings = _mappings(self._fd)

    def check(self, contents: Contents) -> None:
        """What could be wrong was found when the file was opened."""

    def read(self, parts: Sequence[Part]) -> list[torch.Tensor]:
        return [self._part(part) for part in parts]

    def _part(self, part: Part) -> torch.Tensor:
        tensor = self._values[part.entry.key].detach()
        whole = Chunk.whole(part.entry.shape)
        lies_there = is_plain(tensor) and tensor.is_contiguous()  # of a conjugate view, other bytes lie there
        start = self._position(tensor) if lies_there and part.chunk.elements else None
        target = window_tensor(part.chunk.sizes, tensor.dtype)
        slices = tuple(slice(o, o + s) for o, s in zip(part.chunk.offsets, part.chunk.sizes, strict=True))
        if start is None or len(list(part.chunk.runs(whole, part.chunk.elements))) != 1:
            return target.copy_(tensor[slices])
        raw = memory_of(target)
        with translate_errors(str(self._path.parent), "read", self._path.name):
            count = read_exactly(self._fd, raw, start + part.chunk.start_in(whole) * tensor.itemsize)
        if count != len(raw):
            raise ObjectCorrupt(str(self._path.parent), "read", self._path.name, "it ended early", _SAVE_AGAIN)
        return target

    def _position(self, tensor: torch.Tensor) -> int | None:
        """Where a tensor's elements begin in the file; None if they do not lie there."""
        first = tensor.data_ptr()
        end = first + tensor.numel() * tensor.itemsize
        found = [m for m in self._mappings if m[0] <= first and end <= m[1]]
        return found[0][2] + first - found[0][0] if found else None

    def read_objects(self, entries: Sequence[ObjectEntry]) -> Mapping[str, bytes]:
        found = {}
        for entry in entries:
            buffer = io.BytesIO()
            torch.save(self._values[entry.key], buffer)
            found[entry.key] = buffer.getvalue()
        return found

    def close(self) -> None:
        os.close(self._fd)
        self._values = {}


def load_trusted(file: Path | io.BytesIO, what: str, *, mmap: bool = False) -> Any:
    """What `torch.save` wrote. Its pickle runs what it says.

    Raises:
        ConfigInvalid: that is not here. RuntimeError, ValueError, EOFError, pickle.UnpicklingError: it is no such file.
    """
    try:
        return torch.load(file, map_location="cpu", mmap=mmap, weights_only=False)
    except (ImportError, AttributeError) as exc:
        raise ConfigInvalid(f"{what} names what this process does not have: {exc}.", _BRING_CLASS) from exc


def load_file(path: Path, *, trust_pickles: bool) -> Any:
    """What `torch.save` wrote; its tensors are mapped. No code of its choosing runs unless it is trusted.

    Raises:
        ConfigInvalid: it is no such file. ObjectUnsafe: it names what nothing allows. StoreError: it cannot be read.
    """
    try:
        with open_plain_file(path) as file:
            return load_trusted(path, str(path), mmap=True) if trust_pickles else _map_file(path, file.fileno())
    except FileNotFoundError as exc:
        raise ConfigInvalid(f"{path} does not exist.") from exc
    except OSError as exc:
        raise StoreError(str(path.parent), "read", path.name, str(exc), _NAME_FILE) from exc
    except UnknownName as exc:
        raise ObjectUnsafe("state dict", str(path), exc.keys) from exc
    except (RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as exc:
        raise ConfigInvalid(
            f"{path} is no file of torch.save that can be mapped: it {str(exc)[:300]}.", _SAVE_AGAIN
        ) from exc


def _map_file(path: Path, fd: int) -> Any:
    size_bytes = os.fstat(fd).st_size

    def fetch(offset: int, length: int) -> memoryview:
        piece = memoryview(bytearray(length))
        read_exactly(fd, piece, offset)
        return piece

    records = find_records(fetch, size_bytes)
    raw = pickle_in(fetch, records)
    whole = torch.UntypedStorage.from_file(str(path), shared=False, nbytes=size_bytes)
    storages = Storages(records, lambda record: whole[record.start : record.start + record.size])
    return ObjectValues(storages).whole(follow(raw), len(raw))


def _mappings(fd: int) -> list[tuple[int, int, int]]:
    """Where this process has a file in its memory: start, end, and position there. Source: proc(5), /proc/pid/maps."""
    status = os.fstat(fd)
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    found = []
    with Path("/proc/self/maps").open(encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            addresses, _, offset, where, inode = line.split(maxsplit=5)[:5]
            if (where, int(inode)) == (device, status.st_ino):
                start, _, end = addresses.partition("-")
                found.append((int(start, 16), int(end, 16), int(offset, 16)))
    return found
