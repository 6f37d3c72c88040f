"""Reference implementations in memory: a bucket, a sink and a shard. Not for production."""

import threading
from collections.abc import Mapping, Sequence

from replicated_ckpt.core.integrity.checksum import BlockTable
from replicated_ckpt.errors import ObjectCorrupt, ObjectMissing
from replicated_ckpt.stores.bucket_client.client import PART_BYTES, Listing, Paced, UploadSource
from replicated_ckpt.stores.bucket_client.url import ObjectTarget
from replicated_ckpt.stores.verified import Expected, VerifiedShard


class MemoryClient:
    """An ObjectClient over a dict. Tests may read and change `objects` directly."""

    has_conditions = True

    def __init__(self, target: ObjectTarget) -> None:
        self.target = target
        self.objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def list_keys(self, directory: str) -> Listing:
        below = {key.removeprefix(directory): data for key, data in self._all().items() if key.startswith(directory)}
        sizes = {name: len(data) for name, data in below.items() if "/" not in name}
        return Listing(sizes, tuple(sorted({name.partition("/")[0] for name in below.keys() - sizes.keys()})))

    def read(self, key: str, offset: int, target: memoryview) -> None:
        data = self._get(key, "read")[offset : offset + len(target)]
        if len(data) != len(target):
            raise ObjectCorrupt(self.target.url, "read", key, f"asked for {len(target)} bytes, got {len(data)}")
        target[:] = data

    def size_bytes(self, key: str) -> int:
        return len(self._get(key, "look at"))

    def put(self, key: str, data: bytes) -> None:
        with self._lock:
            self.objects[key] = bytes(data)

    def version(self, key: str) -> str:
        data = self._all().get(key)
        return "" if data is None else data.hex() or "empty"

    def put_over(self, key: str, data: bytes, version: str) -> bool:
        with self._lock:
            found = self.objects.get(key)
            if ("" if found is None else found.hex() or "empty") != version:
                return False
            self.objects[key] = bytes(data)
            return True

    def put_shard(self, key: str, source: UploadSource, paced: Paced) -> None:
        whole = memoryview(bytearray(source.size_bytes))
        step = source.piece_bytes(PART_BYTES)
        for offset in range(0, len(whole), step):
            piece = whole[offset : offset + step]
            source.read(offset, piece)  # verifies the blocks: a damaged file must not become an object
            paced(len(piece))
        # At the end: an interrupted upload must not become an object.
        self.put(key, bytes(whole))

    def copy(self, source: str, key: str) -> None:
        self.put(key, self._get(source, "copy"))

    def delete(self, keys: Sequence[str]) -> None:
        with self._lock:
            for key in keys:
                self.objects.pop(key, None)

    def end_unfinished(self, prefix: str, older_than_s: float) -> int:
        """Does nothing: an interrupted upload leaves no parts here."""
        del prefix, older_than_s
        return 0

    def close(self) -> None:
        """Does nothing: nothing is open."""

    def _all(self) -> Mapping[str, bytes]:
        with self._lock:
            return dict(self.objects)

    def _get(self, key: str, op: str) -> bytes:
        found = self._all().get(key)
        if found is None:
            raise ObjectMissing(self.target.url, op, key, "there is no such object")
        return found


class MemorySink:
    """A Sink. `data` is the shard after `finish`, else None."""

    label = "memory"

    def __init__(self) -> None:
        self.data: bytes | None = None
        self._written = bytearray()

    def write(self, *pieces: memoryview) -> None:
        for piece in pieces:
            # A copy: the tee overwrites the memory after `write` has returned.
            self._written += piece

    def finish(self, table: BlockTable) -> None:
        if len(self._written) != table.file_bytes:
            detail = f"expected {table.file_bytes} bytes, got {len(self._written)}"
            raise ObjectCorrupt(self.label, "write", "shard", detail)
        self.data = bytes(self._written)

    def discard(self) -> None:
        self.data = None


class MemoryShard(VerifiedShard):
    """A shard in memory, read by verified ranges."""

    def __init__(self, raw: bytes, name: str, expected: Expected) -> None:
        self._raw = raw
        super().__init__("memory", name, expected)

    def _fill(self, target: memoryview, offset: int) -> None:
        data = self._raw[offset : offset + len(target)]
        if len(data) != len(target):
            raise self._corrupt("the file ended early")
        target[:] = data

    def close(self) -> None:
        """Does nothing: nothing is open."""
