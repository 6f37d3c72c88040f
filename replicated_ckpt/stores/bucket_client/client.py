"""The interface to a bucket that the object tier needs, for S3, directories and the back ends of fsspec."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from replicated_ckpt.stores.bucket_client.upload_source import UploadSource
from replicated_ckpt.stores.bucket_client.url import ObjectTarget

PART_BYTES = 16 << 20
"""Least size of the parts of an upload, in bytes, unless the agent has another one (`--upload-part-mib`)."""
PARTS_PARALLEL = 4
AWAY_HINT = "The nodes' copies are safe, and agents retry uploads. If it still fails, check the URL and the network."
ARCHIVED = "InvalidObjectState"
"""Start of a StoreDenied's detail for an archived object, which must be restored before it can be read."""

Paced = Callable[[int], None]
"""Waits until that many bytes may be sent; raises to abort the upload."""


@dataclass(frozen=True)
class Listing:
    """One level of a bucket: its objects with their sizes in bytes, and its common prefixes as directories."""

    sizes: Mapping[str, int] = field(default_factory=dict)
    directories: tuple[str, ...] = ()


class ObjectClient(Protocol):
    """A bucket under one prefix; keys are relative to it. Safe for concurrent use by threads; not to be forked.

    All methods raise StoreDenied (credentials, permission, no such bucket), StoreUnavailable (no answer in time, throttled,
    broken connection) and StoreError, with no secret in them; those that read also ObjectMissing.
    """

    target: ObjectTarget
    has_conditions: bool
    """Whether `put_over` asks the store for a conditional write. The store may still ignore the condition."""

    def list_keys(self, directory: str) -> Listing:
        """Objects and directories directly under `directory` ("" or "a/b/"); empty if there are none."""

    def read(self, key: str, offset: int, target: memoryview) -> None:
        """Fills `target` from `offset` on. Also raises ObjectCorrupt: the object is too short."""

    def size_bytes(self, key: str) -> int:
        """Size of an object."""

    def put(self, key: str, data: bytes) -> None:
        """Writes a small object. Replaces an existing one atomically, or not at all."""

    def version(self, key: str) -> str:
        """An identifier of an object's current bytes, for `put_over`; "" if there is none, or the store has no versions."""

    def put_over(self, key: str, data: bytes, version: str) -> bool:
        """As `put`, but only over that version, or, with "", only if the object is missing. True if it was written.

        A store without conditional writes always writes. After a lost answer a retry may meet the client's own first
        write and return False. So the caller must read the object back in either case.
        """

    def put_shard(self, key: str, source: UploadSource, paced: Paced) -> None:
        """Uploads a file in parallel parts. Continues an earlier aborted try if the store supports that.

        Afterwards the store has confirmed the object's size, and its CRC32C if it has checksums.
        Also raises ObjectCorrupt: the store's size or checksum differs, or the file is damaged.
        """

    def copy(self, source: str, key: str) -> None:
        """Copies an object inside the bucket; no byte of it passes through this process. An error may leave a part of
        it.

        A store that ignores the request may have written other bytes, so the caller checks the copy.
        """

    def delete(self, keys: Sequence[str]) -> None:
        """Removes objects; a missing one is not an error."""

    def end_unfinished(self, prefix: str, older_than_s: float) -> int:
        """Aborts multipart uploads of shards under `prefix` that are older than `older_than_s`; returns their number."""

    def close(self) -> None:
        """Closes connections; the client must not be used afterwards."""
