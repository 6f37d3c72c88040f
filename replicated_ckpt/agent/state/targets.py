"""The buckets that this node's ranks have named, kept across restarts, so that an agent alone can finish an upload."""

import logging
import threading
from pathlib import Path
from typing import Any

from replicated_ckpt.agent.state.note_file import NoteFile
from replicated_ckpt.errors import ConfigInvalid
from replicated_ckpt.stores.bucket.bucket import Bucket
from replicated_ckpt.stores.bucket_client.opening import open_client
from replicated_ckpt.stores.bucket_client.url import ObjectTarget

log = logging.getLogger(__name__)

_NAME = "targets.json"
_TARGETS_MAX = 64


class TargetBook:
    """Targets by URL; the file is readable by this user alone, as it holds what the ranks hold in their memory.

    Safe for concurrent use. `bucket` keeps what it has opened until the credentials change.
    """

    def __init__(self, directory: Path) -> None:
        self._file = NoteFile(directory / _NAME, 0o600)
        self._lock = threading.Lock()
        targets = self._file.read(lambda told: [target for fields in told if (target := _parse(fields))]) or []
        self._target_by_url = {target.url: target for target in targets}
        self._bucket_by_url: dict[str, Bucket] = {}

    def learn(self, target: ObjectTarget) -> bool:
        """Keeps a target, in place of an older one of the same URL; whether it is a new one.

        Raises:
            StoreError: it cannot be written, and holds until this agent ends; it is written when it is told again.
        """
        with self._lock:
            is_new = self._target_by_url.pop(target.url, None) != target
            self._target_by_url[target.url] = target
            while len(self._target_by_url) > _TARGETS_MAX:
                del self._target_by_url[next(iter(self._target_by_url))]
            if is_new:
                self._bucket_by_url.pop(target.url, None)
            self._file.write([entry.to_json() for entry in self._target_by_url.values()])
        if is_new:
            log.info("object store %s is known", target.url)
        return is_new

    def read_all(self) -> tuple[str, ...]:
        """URLs, the one that was named last comes last."""
        with self._lock:
            return tuple(self._target_by_url)

    def bucket(self, url: str) -> Bucket:
        """The bucket of a URL.

        Raises:
            ConfigInvalid: no rank of this node has named it, or its options do not fit.
        """
        with self._lock:
            known, target = self._bucket_by_url.get(url), self._target_by_url.get(url)
        if known is not None:
            return known
        if target is None:
            raise ConfigInvalid(f"No rank of this node has named the object store {url}.", UNKNOWN_HINT)
        opened = Bucket(open_client(target))  # it may look for credentials for seconds
        with self._lock:
            is_current = self._target_by_url.get(url) == target
            return self._bucket_by_url.setdefault(url, opened) if is_current else opened


def _parse(fields: Any) -> ObjectTarget | None:
    """None: this version takes it for no target. The others of the book stay."""
    try:
        return ObjectTarget.from_json(fields)
    except (ConfigInvalid, KeyError, TypeError, ValueError) as exc:
        log.warning("an object store is not known any more: %s", exc)
        return None


UNKNOWN_HINT = "It is named again when a rank here saves, or with `replicated-ckpt upload --to URL`."
