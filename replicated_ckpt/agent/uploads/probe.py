"""Probes: a look into a bucket before a save. The save waits for a bounded time, however slow the bucket is."""

import threading
from collections.abc import Mapping
from typing import Any

from replicated_ckpt.agent.state.upload_book import UploadBook
from replicated_ckpt.core.inventory import Holding
from replicated_ckpt.core.layout import SEQUENCE_FLOOR_MAX
from replicated_ckpt.core.lineage import histories_of
from replicated_ckpt.core.upkeep.policy import scope_of
from replicated_ckpt.errors import ReplicatedCkptError, StoreUnavailable
from replicated_ckpt.stores.bucket.bucket import Bucket
from replicated_ckpt.stores.bucket_client.client import AWAY_HINT
from replicated_ckpt.stores.thread_start import start_worker

FIRST_WAIT_S, WAIT_S = 10.0, 2.0
"""How long a save waits for a bucket: the first time, when all its checkpoints are listed, and later."""
_NOTHING = {"is_empty": False, "save_id": "", "lineage": "", "histories": {}, "error": "", "kind": ""}


class Prober:
    """Runs at most one probe of a bucket at a time, each on its own thread. Safe for concurrent use."""

    def __init__(self, book: UploadBook) -> None:
        self._book = book
        self._lock = threading.Lock()
        self._under_way: set[str] = set()
        self._begun: set[str] = set()
        self._holdings_by_url: dict[str, tuple[Holding, ...]] = {}

    def probe(self, url: str, checkpoint_id: str) -> Mapping[str, Any]:
        """Whether a bucket can be reached, what lies under a checkpoint's name, and the lineages in its directory of ids.

        A bucket that does not answer in time counts as unavailable; while its last probe still runs, at once.
        """
        with self._lock:
            # A bucket that hangs must not get one more thread with each save.
            is_late = url in self._under_way
            wait_s = WAIT_S if url in self._begun else FIRST_WAIT_S
            self._under_way.add(url)
            self._begun.add(url)
        found: list[Mapping[str, Any]] = []
        if not is_late:
            try:
                thread = start_worker(self._probe, url, checkpoint_id, found, name="rckpt-probe")
            except StoreUnavailable as exc:
                with self._lock:
                    self._under_way.discard(url)
                return _describe_failure(exc)
            thread.join(wait_s)
        late = StoreUnavailable(url, "probe", checkpoint_id, "it has not answered yet", AWAY_HINT)
        return found[0] if found else _describe_failure(late)

    def _probe(self, url: str, checkpoint_id: str, found: list[Mapping[str, Any]]) -> None:
        try:
            bucket = self._book.bucket(url)
            is_empty = bucket.is_empty(checkpoint_id)
            there = None if is_empty else bucket.save_of(checkpoint_id)
            histories = self._histories(url, bucket, scope_of(checkpoint_id))
            told = {"is_empty": is_empty, "histories": histories}
            if there is not None:
                told |= {"save_id": there.save_id, "lineage": there.mark.lineage if there.mark else ""}
            found.append({**_NOTHING, **told})
        except ReplicatedCkptError as exc:
            found.append(_describe_failure(exc))
        finally:
            with self._lock:
                self._under_way.discard(url)

    def _histories(self, url: str, bucket: Bucket, scope: str) -> Mapping[str, Any]:
        """The histories in the bucket. It is listed once: from then on this run makes the newest saves."""
        # Listing a large bucket takes seconds, and each save would wait for it.
        if url not in self._holdings_by_url:
            self._holdings_by_url[url] = tuple(save.holding for save in bucket.saves() if save.mark is not None)
        held = (holding for holding in self._holdings_by_url[url] if scope_of(holding.checkpoint_id) == scope)
        versions = (holding.version for holding in held if holding.sequence <= SEQUENCE_FLOOR_MAX)
        return {lineage: history.to_json() for lineage, history in histories_of(versions).items()}


def _describe_failure(error: ReplicatedCkptError) -> Mapping[str, Any]:
    return {**_NOTHING, "error": str(error), "kind": type(error).__name__}
