"""Fetching manifest and metadata of a save from peers: each from a node that has it intact, whatever else is bad there."""

from collections.abc import Sequence

from replicated_ckpt.core.integrity.checksum import crc32c
from replicated_ckpt.core.layout import MANIFEST_NAME, METADATA_NAME
from replicated_ckpt.core.manifest import Manifest, decode_manifest
from replicated_ckpt.core.upkeep.repair_plan import RestoreManifest
from replicated_ckpt.errors import ObjectCorrupt, ObjectMissing, ReplicatedCkptError
from replicated_ckpt.stores.peer.client import AgentAddress, AgentClient, file_path


def fetch_manifest(action: RestoreManifest, sources: Sequence[AgentAddress]) -> tuple[Manifest, bytes]:
    """The manifest of the save, and its bytes, from the first source that has it intact.

    Raises:
        ReplicatedCkptError: none has; what the last one answered.
    """
    last: ReplicatedCkptError = _no_source(action, MANIFEST_NAME)
    for address in sources:
        try:
            with AgentClient(address) as client:
                raw = client.fetch("GET", file_path(action.checkpoint_id, action.save_id, MANIFEST_NAME))
            manifest = decode_manifest(raw, address.label)
        except ReplicatedCkptError as exc:
            last = exc
            continue
        if manifest.save_id == action.save_id:
            return manifest, raw
    raise last


def fetch_metadata(action: RestoreManifest, manifest: Manifest, sources: Sequence[AgentAddress]) -> bytes:
    """The metadata of the save from the first source that has it intact.

    Raises:
        ReplicatedCkptError: none has; what the last one answered.
    """
    last: ReplicatedCkptError = _no_source(action, METADATA_NAME)
    for address in sources:
        try:
            with AgentClient(address) as client:
                path = file_path(action.checkpoint_id, action.save_id, METADATA_NAME)
                metadata = client.fetch_file(path, manifest.metadata_bytes)
        except ReplicatedCkptError as exc:
            last = exc
            continue
        if crc32c(metadata) == manifest.metadata_crc32c:
            return metadata
        last = ObjectCorrupt(address.label, "take over", METADATA_NAME, "it does not match the manifest")
    raise last


def _no_source(action: RestoreManifest, name: str) -> ObjectMissing:
    return ObjectMissing("the peers", "take over", f"{action.checkpoint_id}/{name}", "no source is known")
