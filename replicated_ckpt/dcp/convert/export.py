"""Export: one of our checkpoints as a torch file, safetensors, or a plain DCP directory."""

import os
import re
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from replicated_ckpt.core.key_rules import KeyRules
from replicated_ckpt.dcp.convert.dcp_format import DcpSink, checkpoint_source, range_reader
from replicated_ckpt.dcp.convert.safetensors import SafetensorsSink
from replicated_ckpt.dcp.convert.source import Contents, Converted, CountBytes, Progress, Reporter, Source
from replicated_ckpt.dcp.convert.torch_file import TorchSink
from replicated_ckpt.environment import make_absolute
from replicated_ckpt.errors import ConfigInvalid
from replicated_ckpt.stores.files.durable import translate_errors
from replicated_ckpt.stores.output.output import LocalOutput, Output

Format = Literal["torch", "safetensors", "dcp"]
SHARD_BYTES_MAX = 5_000_000_000
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


class Sink(Protocol):
    """Writes one format."""

    is_directory: bool

    def write(self, source: Source, contents: Contents, output: Output, progress: CountBytes) -> None: ...

    def check(self, path: Path, contents: Contents) -> None: ...

    def may_replace(self, name: str) -> bool: ...


def export_checkpoint(
    checkpoint_id: str,
    to: str | os.PathLike[str],
    *,
    format: Format,  # noqa: A002 - the word that callers look for
    root: str | os.PathLike[str] | None = None,
    object_store: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    keys: KeyRules | None = None,
    shard_size_limit: int | str = SHARD_BYTES_MAX,
    overwrite: bool = False,
    trust_pickles: bool = False,
    to_options: Mapping[str, Any] | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Converted:
    """Writes a checkpoint, or the entries of it that `keys` selects, in another format.

    This process reads it as ReplicatedReader does: from its own store, peers or the object store, with every byte
    verified. At most a window of 64 MiB, and all objects that are not tensors, are in memory. The output appears at
    `to` after all of it was written and read back. On failure nothing appears.

    Args:
        to: a path, or a URL that fsspec supports. "torch" makes a file; the other formats make a directory.
        shard_size_limit: size of one safetensors or DCP file, in bytes or as "5GB".
        trust_pickles: unpickle objects that a load refuses (ObjectUnsafe). Their writer can then run code here.
        storage_options, to_options: access to the object store, and to `to`, as fsspec takes them.
        progress: called repeatedly while it works.

    Raises:
        ConfigInvalid: an argument is invalid, a key rule matches nothing, or `to` exists and `overwrite` is False.
        CheckpointNotFound, ShardLost, MetadataUnsafe, ObjectUnsafe: as in a load. StoreFull, StoreError: of the output.
    """
    started_at = time.monotonic()
    if format not in get_args(Format):
        raise ConfigInvalid(f"format must be one of {get_args(Format)}, not {format!r}.")
    reader = range_reader(root, object_store, storage_options)
    with closing(checkpoint_source(reader, checkpoint_id)) as source:
        chosen = source.contents.chosen(keys or KeyRules())
        contents = chosen.without_objects() if format == "safetensors" else chosen
        source.check(contents)
        name = os.fspath(to).rstrip("/").rpartition("/")[2]
        sink = _sink(format, name, contents, size_of(shard_size_limit), trust_pickles=trust_pickles)
        output = _place(to, sink, contents, to_options, overwrite=overwrite)
        _write(sink, source, contents, output, Reporter(contents.size_bytes, progress))
    # Safetensors have no place for objects: the report lists them, instead of losing them silently.
    kept = set(contents.order)
    skipped = tuple(key for key in chosen.order if key not in kept)
    return Converted.of(contents, reader.checkpoint_id, os.fspath(to), time.monotonic() - started_at, skipped)


def _sink(format_: Format, name: str, contents: Contents, shard_bytes_max: int, *, trust_pickles: bool) -> Sink:
    if format_ == "torch":
        return TorchSink(name, trust_pickles=trust_pickles)
    if format_ == "safetensors":
        return SafetensorsSink(contents, shard_bytes_max=shard_bytes_max)
    return DcpSink(shard_bytes_max=shard_bytes_max)


def _place(
    to: str | os.PathLike[str], sink: Sink, contents: Contents, options: Mapping[str, Any] | None, *, overwrite: bool
) -> Output:
    may_replace = sink.may_replace if overwrite else None
    text = os.fspath(to)
    # System calls refuse NUL with a ValueError that names no path.
    if "\0" in text:
        raise ConfigInvalid(f"{text!r} is not a valid path: it contains NUL.")
    if "://" in text:
        from replicated_ckpt.stores.output.url_output import UrlOutput

        return UrlOutput(text, options, is_directory=sink.is_directory, may_replace=may_replace)
    path = Path(make_absolute(text))
    size_bytes = contents.size_bytes
    return LocalOutput(path, is_directory=sink.is_directory, size_bytes=size_bytes, may_replace=may_replace)


def _write(sink: Sink, source: Source, contents: Contents, output: Output, reporter: Reporter) -> None:
    with output:
        sink.write(source, contents, output, reporter.more)
        reporter.verifying()
        output.verify()
        # Only a local file can be read back by its format's own reader.
        if isinstance(output, LocalOutput):
            name = next(iter(output.written))
            with translate_errors(output.label, "read back", name):
                sink.check(output.part("" if sink.is_directory else name), contents)
        # Only after it was read back: an output under its final name is always complete.
        output.publish()


def size_of(limit: int | str) -> int:
    """Bytes in a size such as "5GB" or "500 MiB".

    Raises:
        ConfigInvalid: it is not a size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]i?)?B?\s*", str(limit), flags=re.IGNORECASE)
    size = 0 if match is None else int(float(match[1]) * _UNITS[(match[2] or "").upper()])
    if size < 1:
        raise ConfigInvalid(f"{limit!r} is not a size such as 5GB or 500MiB.")
    return size
