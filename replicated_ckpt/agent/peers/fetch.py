"""Fetching manifest and metadata of a save from peers: each from a node that has it intact, whatever else is bad there."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from replicated_ckpt.core.integrity.checksum import crc32c
from replicated_ckpt.core.layout import MANIFEST_NAME, METADATA_NAME
from replicated_ckpt.core.manifest import Manifest, decode_manifest
from replicated_ckpt.errors import ObjectCorrupt, ObjectMissing, ReplicatedCkptError
from replicated_ckpt.stores.peer.client import AgentAddress, AgentClient
from replicated_ckpt.stores.peer.paths import file_path

T = TypeVar("T")


def fetch_manifest(checkpoint_id: str, save_id: str, sources: Sequence[AgentAddress]) -> tuple[Manifest, bytes]:
    """The manifest of the save, and its bytes, from the first source that has it intact.

    Raises:
        ReplicatedCkptError: none has; what the last one answered.
    """

    def fetch(client: AgentClient) -> tuple[Manifest, bytes] | None:
        raw = client.fetch("GET", file_path(checkpoint_id, save_id, MANIFEST_NAME))
        manifest = decode_manifest(raw, client.address.label)
        return (manifest, raw) if manifest.save_id == save_id else None

    return fetch_first(sources, fetch, f"{checkpoint_id}/{MANIFEST_NAME}")


def fetch_metadata(checkpoint_id: str, manifest: Manifest, sources: Sequence[AgentAddress]) -> bytes:
    """The same of the metadata of the manifest's save, under `checkpoint_id`."""

    def fetch(client: AgentClient) -> bytes:
        path = file_path(checkpoint_id, manifest.save_id, METADATA_NAME)
        metadata = client.fetch_file(path, manifest.metadata_bytes)
        if crc32c(metadata) != manifest.metadata_crc32c:
            raise ObjectCorrupt(client.address.label, "take over", METADATA_NAME, "it does not match the manifest")
        return metadata

    return fetch_first(sources, fetch, f"{checkpoint_id}/{METADATA_NAME}")


def fetch_first(sources: Sequence[AgentAddress], fetch: Callable[[AgentClient], T | None], what: str) -> T:
    """What the first source gives that gives any.

    Raises:
        ObjectMissing: there is no source, or all gave None. ReplicatedCkptError: what the last one that failed answered.
    """
    last: ReplicatedCkptError = ObjectMissing("the peers", "take over", what, "no source is known")
    for address in sources:
        try:
            with AgentClient(address) as client:
                found = fetch(client)
        except ReplicatedCkptError as exc:
            last = exc
            continue
        if found is not None:
            return found
    raise last
