"""Writes a plain DCP directory, as stock torch's FileSystemReader reads it, in one pass and to any output."""

import io
from collections import deque
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import StorageMeta

from replicated_ckpt.core.layout import METADATA_NAME, ShardName
from replicated_ckpt.dcp.convert.entries.save_planner import SourcePlanner
from replicated_ckpt.dcp.convert.entries.source import Contents, CountBytes, Source
from replicated_ckpt.dcp.metadata.metadata import decode_metadata, encode_metadata
from replicated_ckpt.dcp.runtime.torch_private import StorageInfo, metadata_version
from replicated_ckpt.dcp.tensors.torch_save import save_tensor
from replicated_ckpt.errors import ObjectCorrupt
from replicated_ckpt.stores.output.output import READ_BACK_HINT, Output, Stream


class DcpSink:
    """`.metadata` and shards `__0_0.distcp`, `__0_1.distcp`, ...; a new one begins beyond `shard_bytes_max`."""

    is_directory = True

    def __init__(self, *, shard_bytes_max: int) -> None:
        self._shard_bytes_max = shard_bytes_max

    def write(self, source: Source, contents: Contents, output: Output, progress: CountBytes) -> None:
        """Writes all of it. `.metadata` comes last, so an incomplete output is not a checkpoint."""
        planner = SourcePlanner(source, contents, progress)
        (plan,), metadata = planner.create_global_plan([planner.create_local_plan()])
        metadata.storage_data = {}
        items = deque(plan.items)
        while items:
            name = str(ShardName(0, len(output.written)))
            with output.create(name) as stream:
                while items and stream.position < self._shard_bytes_max:
                    item = items.popleft()
                    metadata.storage_data[item.index] = _write_item(stream, name, planner.resolve_data(item))
        metadata.storage_meta = StorageMeta()
        version = metadata_version()
        # torch 2.7 has no version to write.
        if version is not None:
            metadata.version = version
        with output.create(METADATA_NAME) as stream:
            stream.write(encode_metadata(metadata))

    def check(self, path: Path, contents: Contents) -> None:
        """Reads the metadata back.

        Raises:
            ObjectCorrupt: it does not describe the state that was written.
        """
        metadata = decode_metadata((path / METADATA_NAME).read_bytes(), str(path))
        wanted = {entry.name for entry in contents.entries}
        if set(metadata.state_dict_metadata) != wanted or {index.fqn for index in metadata.storage_data} != wanted:
            raise ObjectCorrupt(
                str(path), "read back", METADATA_NAME, "it describes another state dict", READ_BACK_HINT
            )

    def may_replace(self, name: str) -> bool:
        return name == METADATA_NAME or name.endswith(".distcp")


def _write_item(stream: Stream, name: str, data: torch.Tensor | io.BytesIO) -> StorageInfo:
    """Appends one item, as FileSystemWriter does."""
    start = stream.position
    if isinstance(data, io.BytesIO):
        stream.write(data.getbuffer())
    else:
        save_tensor(data, stream)
    return StorageInfo(name, start, stream.position - start)
