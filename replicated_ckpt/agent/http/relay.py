"""`.metadata` of a save from agent to agent: large ones do not reach a thousand nodes over the coordinator's link alone."""

import contextlib
import os

from replicated_ckpt.agent.requests.request import Request
from replicated_ckpt.agent.saves.intake import taking_metadata
from replicated_ckpt.agent.saves.receive import Received
from replicated_ckpt.agent.saves.service import NodeService
from replicated_ckpt.core.integrity.checksum import crc32c
from replicated_ckpt.core.layout import METADATA_NAME
from replicated_ckpt.errors import ObjectCorrupt, ObjectMissing, PeerProtocolError
from replicated_ckpt.stores.files.durable import translate_errors
from replicated_ckpt.stores.files.plain import open_plain
from replicated_ckpt.stores.local.directories.intent import Intent
from replicated_ckpt.stores.local.shard_file import FileSink
from replicated_ckpt.stores.peer.client import AgentClient

_PIECE_BYTES = 4 << 20


def pull_metadata(service: NodeService, save_id: str, request: Request) -> Received:
    """Stages `.metadata` of an open save as another agent of the save has it; durable afterwards.

    Raises:
        PeerProtocolError: the request does not say what from whom. ObjectMissing: that node was not introduced here.
        ObjectCorrupt: it is not what the other agent has.
        SaveAborted, StoreError: what the other agent, or the own store, refused with.
    """
    fields = request.document()
    try:
        source = service.peers.address_of(str(fields["from"]))
        wanted = Received(int(fields["size_bytes"]), int(fields["crc32c"]))
    except (KeyError, TypeError, ValueError, OverflowError) as exc:
        raise PeerProtocolError(f"Metadata cannot be pulled with {type(exc).__name__}: {exc}.") from exc
    if wanted.size_bytes < 0:
        raise PeerProtocolError(f"No metadata has {wanted.size_bytes} bytes.")
    service.check_open(save_id)
    with taking_metadata(Intent.read(save_id, service.store.intent_path(save_id)), wanted.size_bytes):
        pass  # nothing is taken of what would be too much
    sink = FileSink(service.store.path_of_staged(save_id, METADATA_NAME))
    try:
        with request.heartbeat, AgentClient(source) as client:
            _copy(client, save_id, wanted, sink)
            sink.finish_durably()
    except BaseException:
        sink.discard()
        raise
    return wanted


def _copy(client: AgentClient, save_id: str, wanted: Received, sink: FileSink) -> None:
    """Copies the other agent's `.metadata` into `sink`, and holds it against what is wanted."""
    crc, buffer = 0, memoryview(bytearray(min(_PIECE_BYTES, wanted.size_bytes)))
    for start in range(0, wanted.size_bytes, _PIECE_BYTES):
        piece = buffer[: wanted.size_bytes - start]
        client.read_range(f"/v1/saves/{save_id}/{METADATA_NAME}", start, piece)
        sink.write(piece)
        crc = crc32c(piece, crc)
    if crc != wanted.crc32c:
        detail = f"expected CRC32C {wanted.crc32c:08x}, found {crc:08x}"
        raise ObjectCorrupt(client.address.label, "pull", METADATA_NAME, detail)


def open_metadata(service: NodeService, save_id: str) -> int:
    """A file descriptor of `.metadata` of a save that is open or committed here; the caller closes it.

    Raises:
        ObjectMissing, StoreError
    """
    store = service.store
    with translate_errors(str(store.root), "open", METADATA_NAME), contextlib.suppress(FileNotFoundError):
        return open_plain(store.path_of_staged(save_id, METADATA_NAME), os.O_NOFOLLOW)
    checkpoint_id = store.catalog.checkpoint_of(save_id)
    if checkpoint_id is None:
        raise ObjectMissing(str(store.root), "open", METADATA_NAME, f"save {save_id} is not here")
    return store.open_file(checkpoint_id, save_id, METADATA_NAME)
