"""Uploads ordered by hand, for checkpoints whose manifest asks for none; kept until they are done."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from replicated_ckpt.agent.state.note_file import NoteFile
from replicated_ckpt.core.manifest import Manifest, UploadEntry

_NAME = "orders.json"


class OrderBook:
    """URLs by save id. Safe for concurrent use."""

    def __init__(self, directory: Path) -> None:
        self._file = NoteFile(directory / _NAME, 0o600)
        self._lock = threading.Lock()
        self._url_by_save = self._file.read(_parse) or {}

    def apply(self, manifest: Manifest) -> Manifest:
        """The manifest as if the order were written in it: an order goes before what was decided at the save."""
        with self._lock:
            url = self._url_by_save.get(manifest.save_id)
        if url is None:
            return manifest
        if manifest.upload is not None:
            return replace(manifest, upload=replace(manifest.upload, url=url))
        entry = UploadEntry(url, False, manifest.metadata_bytes, manifest.metadata_crc32c)
        return replace(manifest, upload=entry)

    def read_all(self) -> frozenset[str]:
        with self._lock:
            return frozenset(self._url_by_save)

    def is_ordered(self, save_id: str) -> bool:
        with self._lock:
            return save_id in self._url_by_save

    def take(self, save_id: str, url: str) -> None:
        """Keeps an order. Raises StoreError: it is not kept."""
        with self._lock:
            found = {**self._url_by_save, save_id: url}
            self._file.write(found)
            self._url_by_save = found

    def forget(self, save_id: str) -> None:
        with self._lock:
            if self._url_by_save.pop(save_id, None) is not None:
                self._file.write(self._url_by_save)


def _parse(document: Any) -> dict[str, str]:
    return {str(save_id): str(url) for save_id, url in dict(document).items()}
