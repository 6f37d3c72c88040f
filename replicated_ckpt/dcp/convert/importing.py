"""Import: a torch file, safetensors, or a stock DCP directory as one of our checkpoints."""

import os
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, get_args

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from replicated_ckpt.core.key_rules import KeyRules
from replicated_ckpt.dcp.convert.dcp_format import (
    SourcePlanner,
    checkpoint_source,
    dcp_directory,
    parts_of,
    range_reader,
)
from replicated_ckpt.dcp.convert.export import Format
from replicated_ckpt.dcp.convert.safetensors import safetensors_files
from replicated_ckpt.dcp.convert.source import Converted, Progress, Reporter, Source, windows
from replicated_ckpt.dcp.convert.torch_file import TorchFile
from replicated_ckpt.dcp.load.reader import ReplicatedReader
from replicated_ckpt.dcp.save.writer import ReplicatedWriter
from replicated_ckpt.errors import ConfigInvalid, StoreFull
from replicated_ckpt.stores.files.durable import translate_errors
from replicated_ckpt.stores.files.existence import is_there
from replicated_ckpt.stores.files.room import find_free_bytes


def import_checkpoint(
    path: str | os.PathLike[str],
    checkpoint_id: str,
    *,
    format: Format,  # noqa: A002 - the word that callers look for
    root: str | os.PathLike[str],
    object_store: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    copies: int = 2,
    keys: KeyRules | None = None,
    overwrite: bool = False,
    trust_pickles: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> Converted:
    """Makes a checkpoint in this node's store from the files at `path`. With `keys`, only from the selected entries.

    ReplicatedWriter saves it in this process, a window of 64 MiB at a time. Then it is read back and compared with its
    checksums. This node has the only copy until its agent runs and the agents make the others. With an object store,
    the checkpoint is committed there, too, when this returns.

    Args:
        path: a file of `torch.save`; a `.safetensors` file or a directory of them; or a directory with `.metadata` and
            all shards.
        copies, object_store, storage_options: as for ReplicatedWriter.
        overwrite: replace a checkpoint of this id. Otherwise CheckpointExists is raised.
        trust_pickles: unpickle a torch file that otherwise raises ObjectUnsafe. Its writer can then run code here.

    Raises:
        ConfigInvalid: `path` has another format, or a key rule matches no name. ObjectCorrupt: an item is smaller than
            .metadata states. StoreFull: there is too little room for all of it; nothing was written. CheckpointExists,
            StoreError, UploadFailed: as in a save.
    """
    started_at = time.monotonic()
    with closing(open_source(Path(path), format, trust_pickles=trust_pickles)) as source:
        contents = source.contents.chosen(keys or KeyRules())
        source.check(contents)
        _check_room(Path(root), contents.size_bytes)
        reporter = Reporter(contents.size_bytes, progress)
        planner = SourcePlanner(source, contents, reporter.more)
        writer = ReplicatedWriter(
            root, copies=copies, overwrite=overwrite, object_store=object_store, storage_options=storage_options
        )
        _save(writer, checkpoint_id, planner)
    reporter.verifying()
    # Read back before the import is reported: the user may then delete the source.
    _read_back(range_reader(root), checkpoint_id)
    writer.wait()
    return Converted.of(contents, checkpoint_id, str(root), time.monotonic() - started_at, ())


def open_source(path: Path, format_: Format, *, trust_pickles: bool) -> Source:
    """The source at `path`.

    Raises:
        ConfigInvalid: it is not of that format. StoreError: it cannot be read.
    """
    if format_ == "torch":
        return TorchFile(path, trust_pickles=trust_pickles)
    if format_ == "safetensors":
        return safetensors_files(path)
    if format_ == "dcp":
        return dcp_directory(path)
    raise ConfigInvalid(f"format must be one of {get_args(Format)}, not {format_!r}.")


def _check_room(root: Path, size_bytes: int) -> None:
    """Raises StoreFull before the windows of all tensors are listed: a small file may describe tensors of any size."""
    place = next(path for path in (root.absolute(), *root.absolute().parents) if is_there(path))
    with translate_errors(str(root), "import", str(root)):
        free = find_free_bytes(place)
    if size_bytes > free:
        raise StoreFull(str(root), "import", str(root), f"it needs {size_bytes} bytes, but only {free} are free")


def _save(writer: ReplicatedWriter, checkpoint_id: str, planner: SourcePlanner) -> None:
    try:
        dcp.save({}, checkpoint_id=checkpoint_id, storage_writer=writer, planner=planner, no_dist=True)
    except CheckpointException as exc:  # DCP wraps each error of this process, even an interrupt
        ((error, _),) = exc.failures.values()
        raise error from exc


def _read_back(reader: ReplicatedReader, checkpoint_id: str) -> None:
    source = checkpoint_source(reader, checkpoint_id)
    for objects in windows(source.contents.objects):
        source.read_objects(objects)
    for parts in windows([part for entry in source.contents.tensors for part in parts_of(entry)]):
        source.read(parts)
