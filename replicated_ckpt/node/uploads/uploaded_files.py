"""The files of this node whose bytes a bucket has: a file that a later save has linked is copied there, not uploaded."""

import os
import threading

from replicated_ckpt.core.parts import Part, part_of_shard

_KNOWN_MAX = 256
_Place = tuple[str, int, int, int]


class UploadedFiles:
    """The keys of uploaded files of unchanged entries, by bucket and file. Safe for concurrent use.

    No file is written in place, so the same file has the same bytes. An agent that starts knows none, and uploads once.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keys: dict[_Place, str] = {}

    def find(self, url: str, status: os.stat_result) -> str | None:
        """The key under which the bucket has this file."""
        with self._lock:
            return self._keys.get(_place_of(url, status))

    def note(self, url: str, status: os.stat_result, name: str, key: str) -> None:
        """The bucket has this file, the shard `name`, under this key. Only those of unchanged entries are kept."""
        if part_of_shard(name) is not Part.UNCHANGED:
            return
        with self._lock:
            self._keys.pop(_place_of(url, status), None)  # the newest key last
            self._keys[_place_of(url, status)] = key
            for old in list(self._keys)[:-_KNOWN_MAX]:
                del self._keys[old]


def _place_of(url: str, status: os.stat_result) -> _Place:
    return url, status.st_ino, status.st_mtime_ns, status.st_size
