"""Writes a state dict as one file that `torch.load` reads, entry by entry, so that no more than a window is in memory."""

import io
import pickle
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from replicated_ckpt.core.key_rules import nest
from replicated_ckpt.dcp.convert.entries.source import (
    Contents,
    CountBytes,
    ObjectEntry,
    Source,
    TensorEntry,
    stream_tensors,
)
from replicated_ckpt.dcp.convert.torch_file.pickling import Absent, StatePickler
from replicated_ckpt.dcp.convert.torch_file.source import load_file, load_trusted
from replicated_ckpt.dcp.objects.weights_only import load_object
from replicated_ckpt.dcp.tensors.memory import memory_of
from replicated_ckpt.errors import ConfigInvalid, ObjectCorrupt
from replicated_ckpt.stores.output.output import READ_BACK_HINT, Output, Stream

_ALIGNMENT_BYTES = 64
_LOCAL_HEADER_BYTES = 30
_ZIP64_EXTRA_BYTES = 20
_PADDING_ID = b"FB"
_UNTOUCHED = zipfile.ZIP64_LIMIT // 2
"""Entries below this are certain not to need the long fields of zip, whatever is in front of them."""


class TorchSink:
    """`archive/data.pkl` and one record for each tensor, as `torch.save` writes them: stored, aligned to 64 bytes."""

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
            raise ConfigInvalid(f"The state dict cannot be pickled: {exc}.", "Leave the entry out: --exclude.") from exc

    def check(self, path: Path, contents: Contents) -> None:
        """Loads the file, without reading its tensors.

        Raises:
            ObjectCorrupt: it is not the state dict that was to be written.
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
    """What `torch.save` wrote, made without running code of its choosing unless it is trusted.

    Raises:
        ObjectUnsafe: it names what nothing allows, or is no object of `torch.save`.
    """
    if not trust:
        return load_object(memoryview(raw), key, "the checkpoint")
    try:
        return load_trusted(io.BytesIO(raw), repr(key))
    except (RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as exc:
        raise ConfigInvalid(
            f"{key!r} is no object of torch.save: {str(exc)[:300]}.", f"Leave it out: --exclude {key!r}."
        ) from exc


def _write_tensors(
    archive: "_Archive", source: Source, entries: Sequence[TensorEntry], keys: Mapping[str, str], progress: CountBytes
) -> None:
    pieces = stream_tensors(source, [entry for entry in entries if entry.size_bytes])
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
    """A zip file written in one pass; sizes and CRCs stand behind the bytes that they are of."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._zip = zipfile.ZipFile(_Unseekable(stream), "w", zipfile.ZIP_STORED)  # type: ignore[call-overload]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._zip.close()
        else:
            self._zip.fp = None  # else it would write its directory when it is collected

    def add(self, name: str, data: bytes | memoryview) -> None:
        with self.opened(name, len(data)) as record:
            record.write(data)

    def opened(self, name: str, size_bytes: int) -> Any:
        """A record to write to; its bytes begin at a multiple of 64 in the file, so that they can be mapped."""
        is_large = size_bytes > _UNTOUCHED
        entry = zipfile.ZipInfo(f"archive/{name}")
        fixed = _LOCAL_HEADER_BYTES + len(entry.filename) + (_ZIP64_EXTRA_BYTES if is_large else 0) + 4
        padding = -(self._stream.position + fixed) % _ALIGNMENT_BYTES
        entry.extra = _PADDING_ID + padding.to_bytes(2, "little") + b"Z" * padding
        return self._zip.open(entry, "w", force_zip64=is_large)


class _Unseekable:
    """What zipfile is given, so that it never goes back."""

    def __init__(self, stream: Stream) -> None:
        self.write = stream.write
        self.flush = stream.flush
