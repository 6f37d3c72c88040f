"""A file of `torch.save` as the source or target of a conversion, which reads or writes it part by part."""

import io
import os
import pickle
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from warnings import catch_warnings, simplefilter

import torch

from replicated_ckpt.core.chunk import Chunk
from replicated_ckpt.core.integrity.archive import find_records
from replicated_ckpt.core.key_rules import nest
from replicated_ckpt.core.pickles.follower import follow
from replicated_ckpt.dcp.convert.source import (
    Contents,
    CountBytes,
    ObjectEntry,
    Part,
    Source,
    TensorEntry,
    check_plain,
    stream_tensors,
)
from replicated_ckpt.dcp.objects.storages import STORAGE_BY_DTYPE, Storages
from replicated_ckpt.dcp.objects.values import UnknownName
from replicated_ckpt.dcp.objects.weights_only import ObjectValues, load_object, pickle_in
from replicated_ckpt.dcp.runtime.torch_private import flatten
from replicated_ckpt.dcp.tensors.container import is_plain
from replicated_ckpt.dcp.tensors.tensor_memory import empty_tensor, memory_of, window_tensor
from replicated_ckpt.errors import ConfigInvalid, ObjectCorrupt, ObjectUnsafe, StoreError
from replicated_ckpt.stores.files.durable import read_exactly, translate_errors
from replicated_ckpt.stores.files.existence import open_plain, open_plain_file
from replicated_ckpt.stores.output.output import READ_BACK_HINT, Output, Stream

_NAME_FILE = "Name a file of torch.save that this user can read (`ls -l` shows the owner)."
_BRING_CLASS = (
    "Install the package in the version with which the file was saved, or add the module's directory to PYTHONPATH."
)
_SAVE_AGAIN = "Fetch it again if it is truncated. Convert a file of an old torch with torch.load and torch.save."


class TorchFile:
    """A state dict in a file. Elements are read with `pread`, so that the mapping costs no memory.

    Raises:
        ConfigInvalid: torch.save did not write the file, or it has objects that torch refuses and `trust_pickles` is off.
    """

    def __init__(self, path: Path, *, trust_pickles: bool) -> None:
        self._path = path
        state = load_file(path, trust_pickles=trust_pickles)
        if not isinstance(state, dict):
            raise ConfigInvalid(
                f"{path} holds a {type(state).__name__}, not a state dict.",
                "Save a dict of tensors, such as model.state_dict().",
            )
        try:
            values, paths = flatten(state)
        except ValueError as exc:
            raise ConfigInvalid(
                f"{path} holds two entries with the same name: {exc}.", "Rename one of them, and save it again."
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
        """Does nothing: the file was checked when it was opened."""

    def read(self, parts: Sequence[Part]) -> list[torch.Tensor]:
        return [self._part(part) for part in parts]

    def _part(self, part: Part) -> torch.Tensor:
        tensor = self._values[part.entry.key].detach()
        whole = Chunk.whole(part.entry.shape)
        lies_there = is_plain(tensor) and tensor.is_contiguous()  # a conjugate view's bytes are other numbers
        start = self._position(tensor) if lies_there and part.chunk.elements else None
        target = window_tensor(part.chunk.sizes, tensor.dtype)
        slices = tuple(slice(o, o + s) for o, s in zip(part.chunk.offsets, part.chunk.sizes, strict=True))
        # The part is not one range of the file: torch copies it from the mapping.
        if start is None or len(list(part.chunk.runs(whole, part.chunk.elements))) != 1:
            return target.copy_(tensor[slices])
        raw = memory_of(target)
        with translate_errors(str(self._path.parent), "read", self._path.name):
            count = read_exactly(self._fd, raw, start + part.chunk.start_in(whole) * tensor.itemsize)
        if count != len(raw):
            raise ObjectCorrupt(str(self._path.parent), "read", self._path.name, "it ended early", _SAVE_AGAIN)
        return target

    def _position(self, tensor: torch.Tensor) -> int | None:
        """The position of a tensor's first element in the file; None: it is not in the file."""
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
    """The object that `torch.save` wrote. Its pickle can run any code.

    Raises:
        ConfigInvalid: a class is missing here. RuntimeError, ValueError, EOFError, pickle.UnpicklingError: torch.save did
            not write it.
    """
    try:
        return torch.load(file, map_location="cpu", mmap=mmap, weights_only=False)
    except (ImportError, AttributeError) as exc:
        raise ConfigInvalid(
            f"{what} needs a class or module that this process does not have: {exc}.", _BRING_CLASS
        ) from exc


def load_file(path: Path, *, trust_pickles: bool) -> Any:
    """The object that `torch.save` wrote; its tensors are mapped. Runs no code of the pickle unless it is trusted.

    Raises:
        ConfigInvalid: torch.save did not write the file. ObjectUnsafe: it names a class that is not allowed. StoreError
    """
    try:
        # Opened before torch does: a FIFO at the path would make it wait for ever.
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
            f"{path} is not a file of torch.save that can be mapped: it {str(exc)[:300]}.", _SAVE_AGAIN
        ) from exc


def _map_file(path: Path, fd: int) -> Any:
    size_bytes = os.fstat(fd).st_size

    def fetch(offset: int, length: int) -> memoryview:
        piece = memoryview(bytearray(length))
        read_exactly(fd, piece, offset)
        return piece

    records = find_records(fetch, size_bytes)
    raw = pickle_in(fetch, records)
    # Mapped, not read: a state dict may be larger than the memory.
    whole = torch.UntypedStorage.from_file(str(path), shared=False, nbytes=size_bytes)
    storages = Storages(records, lambda record: whole[record.start : record.start + record.size])
    return ObjectValues(storages).whole(follow(raw), len(raw))


def _mappings(fd: int) -> list[tuple[int, int, int]]:
    """Where this process has mapped a file: start, end, and position in the file. Source: proc(5), /proc/pid/maps."""
    status = os.fstat(fd)
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    found = []
    # A mapped file's name may have any bytes.
    with Path("/proc/self/maps").open(encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            addresses, _, offset, where, inode = line.split(maxsplit=5)[:5]
            if (where, int(inode)) == (device, status.st_ino):
                start, _, end = addresses.partition("-")
                found.append((int(start, 16), int(end, 16), int(offset, 16)))
    return found


PROTOCOL = 2  # torch.save's own


@dataclass(frozen=True)
class _Storage:
    """Stands for a storage: the key of its elements' record, and its type and size."""

    key: str
    kind: type
    size: int


@dataclass(frozen=True)
class Absent:
    """Stands in a state dict for a tensor whose elements are written later."""

    entry: TensorEntry


class StatePickler(pickle.Pickler):
    """Pickles a state dict with Absent tensors as `torch.save` would pickle it with the tensors.

    Afterwards `absent` has the entry of each such tensor by its record's key, and `present` the tensors inside objects.
    """

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=PROTOCOL)
        self.absent: dict[str, TensorEntry] = {}
        self.present: dict[str, torch.Tensor] = {}

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Absent):
            key = self._next_key()
            self.absent[key] = obj.entry
            like = empty_tensor((0,), obj.entry.dtype)
            stride = torch.empty(obj.entry.shape, device="meta").stride()  # of rows in order; no memory is taken
            return _rebuilding(like, key, obj.entry.shape, stride)
        if type(obj) is torch.Tensor and obj.layout is torch.strided and not obj.is_quantized:
            # A tensor inside an object: torch.save would write its whole storage; here its own elements follow.
            key, tensor = self._next_key(), obj.detach().cpu().contiguous().resolve_conj().resolve_neg()
            self.present[key] = tensor
            like = empty_tensor((0,), obj.dtype).requires_grad_(obj.requires_grad)
            return _rebuilding(like, key, tuple(tensor.shape), tensor.stride())
        return NotImplemented

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _Storage):
            return ("storage", obj.kind, obj.key, "cpu", obj.size)
        if isinstance(obj, torch.UntypedStorage | torch.TypedStorage):
            raise ConfigInvalid("An object holds a storage, which cannot be converted.", "Leave it out with --exclude.")
        return None

    def _next_key(self) -> str:
        return str(len(self.absent) + len(self.present))


def _rebuilding(like: torch.Tensor, key: str, shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[Any, ...]:
    """torch's own reduction of `like`, with another storage, shape and stride."""
    with catch_warnings():
        simplefilter("ignore", UserWarning)  # torch warns of typed storages, which torch.save still writes
        rebuild, arguments = like.__reduce_ex__(PROTOCOL)[:2]  # type: ignore[no-untyped-call]
        storage, _, _, _, *more = arguments
        count = torch.Size(shape).numel()
        # New dtypes have no typed storage class: torch.save writes an untyped one for them.
        if isinstance(storage, torch.UntypedStorage):
            stand_in = _Storage(key, torch.UntypedStorage, count * like.itemsize)
        else:
            stand_in = _Storage(key, STORAGE_BY_DTYPE[like.dtype], count)
    return rebuild, (stand_in, 0, shape, stride, *more)


_ALIGNMENT_BYTES = 64
_LOCAL_HEADER_BYTES = 30
_ZIP64_EXTRA_BYTES = 20
_PADDING_ID = b"FB"
_SMALL_BYTES_MAX = zipfile.ZIP64_LIMIT // 2
"""Records up to this size need no zip64 fields, however long their headers are."""


class TorchSink:
    """Writes `archive/data.pkl` and one record for each tensor, as `torch.save` does: uncompressed, aligned to 64 bytes."""

    is_directory = False

    def __init__(self, name: str, *, trust_pickles: bool) -> None:
        self._name = name
        self._trust_pickles = trust_pickles

    def write(self, source: Source, contents: Contents, output: Output, progress: CountBytes) -> None:
        """Writes all of it.

        Raises:
            ConfigInvalid: an object needs trust, or has no place in the state dict. ReplicatedCkptError
        """
        buffer = io.BytesIO()
        pickler = StatePickler(buffer)
        self._pickle(pickler, self._state(source, contents))
        with output.create(self._name) as stream, _Archive(stream) as archive:
            archive.add("data.pkl", buffer.getvalue())
            archive.add("byteorder", sys.byteorder.encode())
            keys = {entry.key: key for key, entry in pickler.absent.items()}
            _write_tensors(archive, source, [pickler.absent[key] for key in keys.values()], keys, progress)
            for key, tensor in pickler.present.items():
                archive.add(f"data/{key}", memory_of(tensor))
            archive.add("version", b"3\n")

    def _state(self, source: Source, contents: Contents) -> dict[str, Any]:
        values: dict[str, Any] = {entry.key: Absent(entry) for entry in contents.tensors}
        values |= self._objects(source, contents.objects)
        path_by_key = {entry.key: entry.path for entry in contents.entries}
        return nest({path_by_key[key]: values[key] for key in contents.order})

    def _objects(self, source: Source, entries: Sequence[ObjectEntry]) -> Mapping[str, Any]:
        raw_by_key = source.read_objects(entries)
        return {entry.key: object_in(raw_by_key[entry.key], entry.key, trust=self._trust_pickles) for entry in entries}

    @staticmethod
    def _pickle(pickler: StatePickler, state: dict[str, Any]) -> None:
        try:
            pickler.dump(state)
        except (pickle.PicklingError, TypeError, AttributeError, KeyError, RuntimeError) as exc:
            raise ConfigInvalid(
                f"The state dict cannot be pickled: {exc}.", "Leave the entry out with --exclude."
            ) from exc

    def check(self, path: Path, contents: Contents) -> None:
        """Loads the file without reading its tensors.

        Raises:
            ObjectCorrupt: the file has another state dict than the one to be written.
        """
        state = load_file(path, trust_pickles=self._trust_pickles)
        for entry in contents.tensors:
            found: Any = state
            for part in entry.path:
                found = found[part]
            if (tuple(found.shape), found.dtype) != (entry.shape, entry.dtype) or not found.is_contiguous():
                detail = f"it is {found.dtype} {tuple(found.shape)}"
                raise ObjectCorrupt(str(path), "load back", entry.name, detail, READ_BACK_HINT)

    def may_replace(self, name: str) -> bool:
        return name == self._name


def object_in(raw: bytes, key: str, *, trust: bool) -> Any:
    """The object that `torch.save` wrote, made without running code of the pickle unless it is trusted.

    Raises:
        ObjectUnsafe: it names a class that nothing allows, or is not an object of `torch.save`.
    """
    if not trust:
        return load_object(memoryview(raw), key, "the checkpoint")
    try:
        return load_trusted(io.BytesIO(raw), repr(key))
    except (RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as exc:
        raise ConfigInvalid(
            f"{key!r} is not an object of torch.save: {str(exc)[:300]}.", f"Leave it out with --exclude {key!r}."
        ) from exc


def _write_tensors(
    archive: "_Archive", source: Source, entries: Sequence[TensorEntry], keys: Mapping[str, str], progress: CountBytes
) -> None:
    pieces = stream_tensors(source, [entry for entry in entries if entry.size_bytes])
    # Empty tensors have records, too, but `stream_tensors` has no pieces of them.
    for entry in (entry for entry in entries if not entry.size_bytes):
        archive.add(f"data/{keys[entry.key]}", b"")
    for entry in (entry for entry in entries if entry.size_bytes):
        with archive.opened(f"data/{keys[entry.key]}", entry.size_bytes) as record:
            left = entry.size_bytes
            while left:
                _, tensor = next(pieces)
                written = record.write(memory_of(tensor))
                del tensor  # before the next window is read
                progress(written)
                left -= written


class _Archive:
    """A zip file written in one pass. Sizes and CRCs follow the bytes that they describe."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._zip = zipfile.ZipFile(_Unseekable(stream), "w", zipfile.ZIP_STORED)  # type: ignore[call-overload]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._zip.close()
        else:
            self._zip.fp = None  # otherwise garbage collection writes the directory, as if the file were whole

    def add(self, name: str, data: bytes | memoryview) -> None:
        with self.opened(name, len(data)) as record:
            record.write(data)

    def opened(self, name: str, size_bytes: int) -> Any:
        """A record to write to. Its bytes begin at a multiple of 64 in the file, so that they can be mapped."""
        # Decided in advance: zipfile cannot go back to enlarge a header.
        is_large = size_bytes > _SMALL_BYTES_MAX
        entry = zipfile.ZipInfo(f"archive/{name}")
        fixed = _LOCAL_HEADER_BYTES + len(entry.filename) + (_ZIP64_EXTRA_BYTES if is_large else 0) + 4
        padding = -(self._stream.position + fixed) % _ALIGNMENT_BYTES
        entry.extra = _PADDING_ID + padding.to_bytes(2, "little") + b"Z" * padding
        return self._zip.open(entry, "w", force_zip64=is_large)


class _Unseekable:
    """A stream without seek, so that zipfile never goes back."""

    def __init__(self, stream: Stream) -> None:
        self.write = stream.write
        self.flush = stream.flush
