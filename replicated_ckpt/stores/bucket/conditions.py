"""The first use of a bucket: a trial whether its conditional writes exclude each other."""

import json
import uuid
from dataclasses import asdict, dataclass

from replicated_ckpt.errors import ObjectMissing
from replicated_ckpt.stores.bucket_client.client import ObjectClient
from replicated_ckpt.stores.peer.fan_out import FanOut

TRIED_NAME = ".conditional-writes"
"""Object below the prefix that has the outcome. While it is there, no agent tries again."""
WRITERS = 8


@dataclass(frozen=True)
class Trial:
    """How many of `writers` at once created one object (If-None-Match), and how many then replaced it (If-Match)."""

    writers: int
    created: int
    replaced: int

    def describe_weakness(self, url: str) -> str:
        """What is at risk if several writers succeeded; else ""."""
        if max(self.created, self.replaced) <= 1:
            return ""
        return (
            f"conditional writes to {url} do not exclude each other: of {self.writers} writers at once, {self.created} "
            f"created one object (If-None-Match) and {self.replaced} replaced it (If-Match). If two jobs save under one "
            "name at the same time, the older save may replace the newer one in the bucket. Give each job its own prefix, "
            "or upgrade the object store"
        )

    def keep(self, client: ObjectClient) -> None:
        """Puts the outcome into the bucket: `try_conditions` then tries no more. Raises StoreError."""
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
        plain, key = (f"{TRIED_NAME}.{uuid.uuid4().hex}.{kind}" for kind in ("plain", "conditional"))
    else:
        return None
    try:
        # Opens the connections, so that the writers' requests come at one time; and shows whether checksums are taken.
        FanOut.run(range(WRITERS), lambda _: client.put(plain, b"")).raise_first()
        created = _count_winners(client, key, "")
        return Trial(WRITERS, created, _count_winners(client, key, client.version(key)))
    finally:
        client.delete([plain, key])


def _count_winners(client: ObjectClient, key: str, version: str) -> int:
    """How many of WRITERS wrote over the version. Raises StoreError: none did, and one got an error."""

    def write(number: int) -> bool:
        # No two writes have the same bytes: an ETag is often their hash, and would show the old version again.
        return client.put_over(key, f"{version} {number}".encode(), version)

    outcome = FanOut.run(range(WRITERS), write)
    winners = sum(outcome.results.values())
    # A server may answer a loser by an error, such as 503: it has not written.
    if not winners:
        outcome.raise_first()
    return winners
