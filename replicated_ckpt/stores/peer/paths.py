"""URL paths of the files that an agent gives out: what a file is one of is in the query."""

import urllib.parse

from replicated_ckpt.core.layout import METADATA_NAME


def file_path(checkpoint_id: str, save_id: str, name: str) -> str:
    """Of a committed checkpoint, if it is of this save."""
    return _path(name, checkpoint_id=checkpoint_id, save_id=save_id)


def unmanaged_path(checkpoint_id: str, name: str, size_bytes: int) -> str:
    """Of a checkpoint without a manifest, if the file has this size."""
    return _path(name, checkpoint_id=checkpoint_id, size_bytes=size_bytes)


def metadata_path(save_id: str) -> str:
    """`.metadata` of a save that is open or committed."""
    return _path(METADATA_NAME, save_id=save_id)


def _path(name: str, **of: str | int) -> str:
    return f"/v1/files/{name}?{urllib.parse.urlencode(of)}"
