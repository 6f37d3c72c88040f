"""One small interface to a bucket: what the object tier needs of S3, of anything else that fsspec speaks, and no more."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from replicated_ckpt.stores.bucket_client.upload_source import UploadSource
from replicated_ckpt.stores.bucket_client.url import ObjectTarget

PART_BYTES = 16 << 20
"""Least size of the parts of an upload, in bytes."""
PARTS_PARALLEL = 4
AWAY_HINT = (
    "Local and peer copies are not affected. An agent tries its uploads again; else check the URL and the network."
)
ARCHIVED = "InvalidObjectState"
"""How the detail of a StoreDenied begins where an object is there and is to be restored before it can be read."""

Paced = Callable[[int], None]
"""Waits until so many bytes may be sent; raises to break the upload off."""


@dataclass(frozen=True)
class Listing:
    """One level of a bucket: sizes in bytes of the objects there, and the names of what looks like directories."""

    sizes: Mapping[str, int] = field(default_factory=dict)
    directories: tuple[str, ...] = ()


class ObjectClient(Protocol):
    """A bucket under one prefix; keys are relative to it. Safe for concurrent use by threads; not to be forked.

    All methods raise StoreDenied (credentials, permission, no such bucket), StoreUnavailable (no answer in time, throttled,
    broken connection) and StoreError, with no secret in them; those that read also ObjectMissing.
    """

    target: ObjectTarget

    def list_keys(self, directory: str) -> Listing:
        """What lies directly under `directory` ("" or "a/b/")."""

    def read(self, key: str, offset: int, target: memoryview) -> None:
        """Fills `target` from `offset` on. Raises ObjectCorrupt too: the object is shorter."""

    def size_bytes(self, key: str) -> int:
        """Size of an object."""

    def put(self, key: str, data: bytes) -> None:
        """Writes a small object, replacing what was there at once or not at all."""

    def version(self, key: str) -> str:
        """Names the bytes that an object has now, for `put_over`; "" if it is not there or the store has no such names."""

    def put_over(self, key: str, data: bytes, version: str) -> bool:
        """As `put`, but only over that version, or, with "", only where nothing is; whether it did.

        A store without conditional writes writes in any case. After a lost answer the client's own write may count as
        another's: so what lies there afterwards is to be read back either way.
        """

    def put_shard(self, key: str, source: UploadSource, paced: Paced) -> None:
        """Uploads a file in parallel parts, going on where an earlier try broke off if the store can.

        Afterwards the store has said that it holds these bytes, as far as it can tell: size, and CRC32C where it has it.
        Raises ObjectCorrupt too: it says otherwise, or the file is not what was saved.
        """

    def delete(self, keys: Sequence[str]) -> None:
        """Removes objects; one that is not there is no error."""

    def end_unfinished(self, prefix: str, older_than_s: float) -> int:
        """Aborts multipart uploads of shards whose keys begin with `prefix`, begun that long ago; returns how many."""

    def close(self) -> None:
        """Gives back connections; the client is not used afterwards."""
