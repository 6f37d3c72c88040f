"""Fetching manifest and metadata of a save from peers: each from a node that has it intact, whatever else is bad there."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from replicated_ckpt.core.integrity.checksum import crc32c
from replicated_ckpt.core.layout import MANIFEST_NAME, METADATA_NAME
from replicated_ckpt.core.manifest import Manifest, decode_manifest
from replicated_ckpt.core.upkeep.repair_plan import RestoreManifest
from replicated_ckpt.errors import ObjectCorrupt, ObjectMissing, ReplicatedCkptError
from replicated_ckpt.stores.peer.client import AgentAddress, AgentClient, file_path

T = TypeVar("T")


def fetch_manifest(action: RestoreManifest, sources: Sequence[AgentAddress]) -> tuple[Manifest, bytes]:
    """The manifest of the save, and its bytes, from the first source that has it intact.

    Raises:
        ReplicatedCkptError: none has; what the last one answered.
    """

    def fetch(client: AgentClient) -> tuple[Manifest, bytes] | None:
        raw = client.fetch("GET", file_path(action.checkpoint_id, action.save_id, MANIFEST_NAME))
        manifest = decode_manifest(raw, client.address.label)
        return (manifest, raw) if manifest.save_id == action.save_id else None

    return _fetch_first(sources, fetch, _no_source(action, MANIFEST_NAME))


def fetch_metadata(action: RestoreManifest, manifest: Manifest, sources: Sequence[AgentAddress]) -> bytes:
    """The metadata of the save from the first source that has it intact.

    Raises:
        ReplicatedCkptError: none has; what the last one answered.
    """

    def fetch(client: AgentClient) -> bytes:
        metadata = client.fetch_file(
            file_path(action.checkpoint_id, action.save_id, METADATA_NAME), manifest.metadata_bytes
        )
        if crc32c(metadata) != manifest.metadata_crc32c:
            raise ObjectCorrupt(client.address.label, "take over", METADATA_NAME, "it does not match the manifest")
        return metadata

    return _fetch_first(sources, fetch, _no_source(action, METADATA_NAME))


def _fetch_first(
    sources: Sequence[AgentAddress], fetch: Callable[[AgentClient], T | None], missing: ReplicatedCkptError
) -> T:
    """What the first source gives; `missing`, or else the last error, is raised if none gives anything."""
    last = missing
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


def _no_source(action: RestoreManifest, name: str) -> ObjectMissing:
    return ObjectMissing("the peers", "take over", f"{action.checkpoint_id}/{name}", "no source is known")
