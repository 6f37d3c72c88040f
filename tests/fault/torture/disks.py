"""What lies on the disks, read without the package: which attempt's parts, on which node, published or on the way."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha1
from pathlib import Path
from typing import Any

from tests.fault.torture.contents import contents

MANIFEST, METADATA, SHARD = ".manifest.json", ".metadata", ".distcp"
STAGING = ".staging"


@dataclass(frozen=True)
class Lying:
    """One directory of one save on one node: the hashes of its files by name.

    `is_named`: it has its checkpoint's name; `is_published`: it has, or had and is set aside. `checkpoint_id` is "" for a
    save that is staged: its manifest says it, once there is one. `save_id` is "" where no manifest is read, but for a
    staged save, which has it as its directory's name. (A replaced version that nothing else names has its replacer's.)
    """

    node: int
    place: Path
    checkpoint_id: str
    save_id: str
    is_published: bool
    is_named: bool
    files: dict[str, str]
    manifest: dict[str, Any] | None


class Disks:
    """Reads the roots of all nodes, whether anything runs there or not. A file is read again only if it changed."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self._roots = list(roots)
        self._known: dict[Path, tuple[tuple[int, int, int], str]] = {}

    def lying(self) -> Iterator[Lying]:
        """Everything that looks like a save or a part of one."""
        for node, root in enumerate(self._roots):
            for place in sorted(root.glob("*/")) if root.is_dir() else ():
                if not place.name.startswith("."):
                    yield from self._in(node, place, place.name, is_published=True)
            for place in sorted((root / ".replaced").glob("*/")):
                yield from self._in(node, place, "", is_published=True)
            for place in sorted((root / STAGING).glob("*/")):
                yield from self._in(node, place, "", is_published=False)

    def _in(self, node: int, place: Path, checkpoint_id: str, *, is_published: bool) -> Iterator[Lying]:
        files, manifest = self._read(place)
        if not files:
            return
        save_id = "" if manifest is None else str(manifest["save_id"])
        if manifest is not None and not checkpoint_id:
            checkpoint_id = str(manifest["checkpoint_id"])
        is_named = not place.parent.name.startswith(".")
        save_id = save_id or (place.name if place.parent.name == STAGING else "")
        yield Lying(node, place, checkpoint_id, save_id, is_published, is_named, files, manifest)

    def _read(self, place: Path) -> tuple[dict[str, str], dict[str, Any] | None]:
        """The files of one directory: a real agent may give its name to another one in between."""
        while place.is_dir():
            with contextlib.suppress(FileNotFoundError):
                directory = place.stat()
                files = {path.name: self._hash(path) for path in sorted(place.iterdir()) if _counts(path)}
                manifest = read_manifest(place)
                if place.stat().st_ino == directory.st_ino:
                    return files, manifest
        return {}, None

    def _hash(self, path: Path) -> str:
        status = path.stat()
        signature = (status.st_ino, status.st_mtime_ns, status.st_size)
        known = self._known.get(path)
        if known is None or known[0] != signature:
            known = self._known[path] = (signature, sha1(path.read_bytes(), usedforsecurity=False).hexdigest())
        return known[1]


def _counts(path: Path) -> bool:
    return path.name in (MANIFEST, METADATA) or path.name.endswith(SHARD)


def read_manifest(place: Path) -> dict[str, Any] | None:
    """The manifest, if it can be parsed: whether it is the one that was written, its hash tells."""
    try:
        manifest = json.loads((place / MANIFEST).read_bytes())["manifest"]
        are_there = all(isinstance(manifest[name], str) for name in ("save_id", "checkpoint_id"))
        return manifest if are_there and isinstance(manifest["shards"], dict) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def holds_tensor_of(raw: bytes, attempt: int, ranks: int) -> bool:
    """Whether a shard's bytes are some rank's of this attempt: what it saved tells it from every other."""
    state = contents(attempt, ranks)
    return any(state[f"rank{rank}"].numpy().tobytes() in raw for rank in range(ranks))
