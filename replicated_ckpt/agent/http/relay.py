"""Sends `.metadata` from agent to agent: the coordinator's link alone would be too slow for a thousand nodes."""

import contextlib
import os
from collections.abc import Callable, Iterator
from functools import partial

from replicated_ckpt.agent.http.request import Request
from replicated_ckpt.core.integrity.checksum import crc32c
from replicated_ckpt.core.layout import METADATA_NAME
from replicated_ckpt.errors import ObjectCorrupt, ObjectMissing, PeerProtocolError
from replicated_ckpt.node.saves.receive import Received, taking_metadata
from replicated_ckpt.node.saves.service import NodeService
from replicated_ckpt.stores.files.durable import read_exactly, translate_errors
from replicated_ckpt.stores.files.existence import closing_fd, open_plain
from replicated_ckpt.stores.local.shard_file import FileSink
from replicated_ckpt.stores.local.versions.recycled import RecycledFiles
from replicated_ckpt.stores.peer.answer import metadata_path, parsing
from replicated_ckpt.stores.peer.client import AgentAddress, AgentClient

_PIECE_BYTES = 4 << 20


def pull_metadata(service: NodeService, save_id: str, request: Request) -> Received:
    """Stages `.metadata` of an open save, copied from another agent or from another save here. Durable afterwards.

    Raises:
        PeerProtocolError: the request names no valid file or source. ObjectMissing: the named node was not introduced here,
            or the named save is not here. ObjectCorrupt: the source has other bytes. SaveAborted, StoreError: the other
            agent refused, or the node's own store.
    """
    fields = request.document()
    with parsing("Metadata cannot be pulled"):
        wanted = Received(int(fields["size_bytes"]), int(fields["crc32c"]))
        if "same_as" in fields:
            other = fields["same_as"]
            opened = partial(_open_here, service, str(other["checkpoint_id"]), str(other["save_id"]))
        else:
            opened = partial(_open_at_peer, service.peers.address_of(str(fields["from"])), save_id)
    # A negative size would pass every bound below.
    if wanted.size_bytes < 0:
        raise PeerProtocolError(f"{wanted.size_bytes} bytes is not a possible size of .metadata.")
    service.check_open(save_id)
    with taking_metadata(service.store.intent_of(save_id), wanted.size_bytes):
        pass  # refuses a size over the bound before any byte is copied
    path, pool = service.store.path_of_staged(save_id, METADATA_NAME), RecycledFiles(service.store.root)
    with FileSink.create(path, recycled=pool) as sink, request.heartbeat, opened() as (label, read):
        _copy(label, read, wanted, sink)
        sink.finish_durably()
    return wanted


Read = Callable[[int, memoryview], object]
"""Fills the memory with the bytes of `.metadata` from an offset on."""


@contextlib.contextmanager
def _open_at_peer(source: AgentAddress, save_id: str) -> Iterator[tuple[str, Read]]:
    with AgentClient(source) as client:
        yield client.address.label, partial(client.read_range, metadata_path(save_id))


@contextlib.contextmanager
def _open_here(service: NodeService, checkpoint_id: str, save_id: str) -> Iterator[tuple[str, Read]]:
    root, fd = str(service.store.root), service.store.open_file(checkpoint_id, save_id, METADATA_NAME)
    with closing_fd(fd), translate_errors(root, "read", METADATA_NAME):
        yield root, partial(_read_file, root, fd)


def _read_file(root: str, fd: int, start: int, piece: memoryview) -> None:
    # Otherwise, after a short read, old bytes of the buffer would get into the copy.
    if read_exactly(fd, piece, start) != len(piece):
        raise ObjectCorrupt(root, "read", METADATA_NAME, "it is shorter than requested")


def _copy(label: str, read: Read, wanted: Received, sink: FileSink) -> None:
    """Copies `.metadata` into `sink`, and compares its checksum with the wanted one."""
    crc, buffer = 0, memoryview(bytearray(min(_PIECE_BYTES, wanted.size_bytes)))
    for start in range(0, wanted.size_bytes, _PIECE_BYTES):
        piece = buffer[: wanted.size_bytes - start]
        read(start, piece)
        sink.write(piece)
        crc = crc32c(piece, crc)
    # Compared with the coordinator's checksum: the source may have a damaged file.
    if crc != wanted.crc32c:
        detail = f"expected CRC32C {wanted.crc32c:08x}, found {crc:08x}"
        raise ObjectCorrupt(label, "pull", METADATA_NAME, detail)


def open_metadata(service: NodeService, save_id: str) -> int:
    """A file descriptor of `.metadata` of a save that is open or committed here. The caller closes it."""
    store = service.store
    # Staging first: if the save is committed meanwhile, the second look finds it.
    with translate_errors(str(store.root), "open", METADATA_NAME), contextlib.suppress(FileNotFoundError):
        return open_plain(store.path_of_staged(save_id, METADATA_NAME), os.O_NOFOLLOW)
    checkpoint_id = store.catalog.checkpoint_of(save_id)
    if checkpoint_id is None:
        raise ObjectMissing(str(store.root), "open", METADATA_NAME, f"save {save_id} is not here")
    return store.open_file(checkpoint_id, save_id, METADATA_NAME)
