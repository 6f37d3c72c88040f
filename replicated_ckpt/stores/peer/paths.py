"""URL paths of the files that an agent gives out."""

import urllib.parse


def file_path(checkpoint_id: str, save_id: str, name: str) -> str:
    return f"/v1/files/{save_id}/{name}?{urllib.parse.urlencode({'checkpoint_id': checkpoint_id})}"


def unmanaged_path(checkpoint_id: str, name: str, size_bytes: int) -> str:
    """URL path of one file, of this size, of a checkpoint without a manifest."""
    query = urllib.parse.urlencode({"checkpoint_id": checkpoint_id, "size_bytes": size_bytes})
    return f"/v1/unmanaged/{name}?{query}"
