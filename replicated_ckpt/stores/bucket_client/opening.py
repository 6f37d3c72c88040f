"""Opens the client of a bucket, and tries whether the bucket's conditional writes exclude each other."""

import importlib.util
import json
import uuid
from dataclasses import asdict, dataclass, replace
from typing import Any

from replicated_ckpt.errors import ObjectMissing
from replicated_ckpt.stores.bucket_client.client import PART_BYTES, ObjectClient
from replicated_ckpt.stores.bucket_client.directory import DirectoryClient
from replicated_ckpt.stores.bucket_client.url import ObjectTarget, missing_package
from replicated_ckpt.stores.threads import FanOut

_S3_SCHEMES = ("s3", "s3a")


def open_client(target: ObjectTarget, part_bytes: int = PART_BYTES) -> ObjectClient:
    """A client for a bucket. It sends no request yet. `part_bytes`: the least size of the parts of an upload to S3.

    For S3 this is our client over botocore, a dependency of s3fs, if it supports all options. It makes fewer copies and
    takes less CPU time than s3fs (docs/measurements.md). A directory needs only system calls, and ignores options. Anything
    else uses fsspec. Values from fsspec's configuration files apply where no option is given.

    Raises:
        ConfigInvalid: the package for this scheme is missing, or the options do not fit it.
    """
    if target.is_directory:
        return DirectoryClient(target)
    try:
        target = replace(target, options={**_read_configuration(target.scheme), **target.options})
    except ImportError as exc:
        raise missing_package(target, exc) from exc
    if target.scheme in _S3_SCHEMES and importlib.util.find_spec("botocore") is not None:
        from replicated_ckpt.stores.bucket_client.s3 import S3Client, can_honour

        if can_honour(target.options):
            return S3Client(target, part_bytes)
    from replicated_ckpt.stores.bucket_client.fsspec import FsspecClient

    return FsspecClient(target, part_bytes)


def _read_configuration(scheme: str) -> dict[str, Any]:
    """fsspec's own configuration of a scheme, as this process has it."""
    import fsspec.config  # imported late: without a bucket an agent's start saves 35 ms

    return dict(fsspec.config.conf.get(scheme, {}))


TRIED_NAME = ".conditional-writes"
"""Object below the prefix with the outcome of the trial. While it exists, no agent tries again."""
WRITERS = 8


@dataclass(frozen=True)
class Trial:
    """How many of `writers` concurrent writers created an object (If-None-Match), and how many replaced it (If-Match)."""

    writers: int
    created: int
    replaced: int

    def describe_weakness(self, url: str) -> str:
        """The text of a warning if several writers succeeded; else ""."""
        if max(self.created, self.replaced) <= 1:
            return ""
        return (
            f"conditional writes to {url} do not exclude each other: of {self.writers} writers at once, {self.created} "
            f"created one object (If-None-Match) and {self.replaced} replaced it (If-Match). If two jobs save under one "
            "name at the same time, the older save may replace the newer one in the bucket. Give each job its own prefix, "
            "or upgrade the object store"
        )

    def keep(self, client: ObjectClient) -> None:
        """Writes the outcome to the bucket, so that `try_conditions` does not try again. Raises StoreError."""
        client.put(TRIED_NAME, json.dumps(asdict(self)).encode())


def try_conditions(client: ObjectClient) -> Trial | None:
    """Lets WRITERS writers at once create one object, and then replace it.

    None: the bucket has an outcome already, or the client has no conditional writes.

    Raises:
        StoreError: the bucket refused or did not answer.
    """
    if not client.has_conditions:
        return None
    try:
        client.size_bytes(TRIED_NAME)
    except ObjectMissing:
        key = f"{TRIED_NAME}.{uuid.uuid4().hex}"
        plain = [f"{key}.{number}" for number in range(WRITERS)]
    else:
        return None
    try:
        # First opens the connections, so that the conditional writes arrive together. Also shows whether checksums work.
        # Each writer has its own object: a server may answer one of several plain writes to one object with an error.
        FanOut.run(plain, lambda name: client.put(name, b"")).raise_first()
        created = _count_winners(client, key, "")
        return Trial(WRITERS, created, _count_winners(client, key, client.version(key)))
    finally:
        client.delete([*plain, key])


def _count_winners(client: ObjectClient, key: str, version: str) -> int:
    """How many of WRITERS replaced the version. Raises StoreError: none did, and one got an error."""

    def write(number: int) -> bool:
        # Each write has other bytes: an ETag is often their hash, and equal bytes would show the old version again.
        return client.put_over(key, f"{version} {number}".encode(), version)

    outcome = FanOut.run(range(WRITERS), write)
    winners = sum(outcome.results.values())
    # A server may answer a writer that lost with an error, such as 503. That writer has not written.
    if not winners:
        outcome.raise_first()
    return winners
