"""Reads what lies on the disks without using the package: the parts of each attempt, on each node, published or staged."""

import contextlib
import json
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha1
from pathlib import Path
from typing import Any

from tests.fault.torture.contents import contents

MANIFEST, METADATA, SHARD = ".manifest.json", ".metadata", ".distcp"
REPLACED, GONE = ".replaced.", ".gone."
"""Prefixes of manifests of replaced versions, and of versions being removed. The save id and `.json` follow."""
STAGING = ".staging"


@dataclass(frozen=True)
class FoundVersion:
    """One version of a checkpoint in one directory of a node: the hashes and paths of its files.

    Manifest and metadata have the same names here, whatever their names on the disk. A version that is being published
    may lie in two directories. `is_named`: it has its checkpoint's name. `is_published`: it has that name, or had it
    and was replaced. `checkpoint_id`: the id of the directory; for a staged save the id in its manifest, or "" without
    a manifest. `save_id`: "" if neither a manifest nor a file name contains one.
    """

    node: int
    place: Path
    checkpoint_id: str
    save_id: str
    is_published: bool
    is_named: bool
    paths: dict[str, Path]
    files: dict[str, str]
    manifest: dict[str, Any] | None

    @property
    def manifest_path(self) -> Path:
        """The path of its manifest, which may not exist."""
        return self.paths.get(MANIFEST, self.place / MANIFEST)


class Disks:
    """Reads the roots of all nodes, whether or not anything runs there. A file is read again only if it has changed."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self._roots = list(roots)
        self._known: dict[Path, tuple[tuple[int, int, int], str]] = {}
        self._shards: dict[str, frozenset[str]] = {}

    def find_versions(self) -> Iterator[FoundVersion]:
        """Every version on the disks, complete or not."""
        for node, root in enumerate(self._roots):
            staged = [self._read_staged(root, place) for place in sorted((root / STAGING).glob("*/"))]
            for place in sorted(root.glob("*/")) if root.is_dir() else ():
                if not place.name.startswith("."):
                    moved = {path for paths, _ in staged for path in paths.values()}
                    yield from self._in(node, place, moved)
            for place, (paths, manifest) in zip(sorted((root / STAGING).glob("*/")), staged, strict=False):
                checkpoint_id = "" if manifest is None else str(manifest["checkpoint_id"])
                save_id = place.name if manifest is None else str(manifest["save_id"])
                yield from self._version(node, place, checkpoint_id, save_id, paths, manifest)

    def _read_staged(self, root: Path, place: Path) -> tuple[dict[str, Path], dict[str, Any] | None]:
        """The files of a staged save, including those that a process had published when it died."""
        manifest = read_manifest(place / MANIFEST)
        paths = {path.name: path for path in _list(place) if _counts(path.name)}
        final = None if manifest is None else root / manifest["checkpoint_id"]
        if manifest is not None and final is not None:
            there = {path.name for path in _list(final)}
            named = read_manifests(final, there)
            free = set(manifest["shards"]) & there - set().union(*(one["shards"] for one in named.values()))
            paths |= {name: final / name for name in free - paths.keys()}
        return paths, manifest

    def _in(self, node: int, place: Path, moved: Collection[Path]) -> Iterator[FoundVersion]:
        """The versions in the directory of a checkpoint, distinguished by their manifests."""
        names = sorted(path.name for path in _list(place))
        shards = {name for name in names if name.endswith(SHARD) and place / name not in moved}
        manifests = read_manifests(place, names)
        published = manifests.get(MANIFEST)
        own_id = "" if published is None else str(published["save_id"])
        for name, manifest in manifests.items():
            save_id = str(manifest["save_id"])
            self._shards.setdefault(save_id, frozenset(manifest["shards"]))
            if name == MANIFEST or save_id != own_id:
                yield from self._of_manifest(
                    node, place, name, save_id, names, set(manifest["shards"]) & shards, manifest
                )
        shards = shards.difference(*(manifest["shards"] for manifest in manifests.values()))
        for name in names:
            if name.startswith(REPLACED) and name.endswith(".json") and name not in manifests:  # it cannot be read
                save_id = _save_id_in(name)
                its = shards & self._shards.get(save_id, frozenset())
                shards -= its
                yield from self._of_manifest(node, place, name, save_id, names, its, None)
            elif name.startswith(GONE):
                gone = read_manifest(place / name)
                shards -= set() if gone is None else set(gone["shards"])
        yield from self._nameless(node, place, names, shards, has_name=published is None)

    def _of_manifest(
        self,
        node: int,
        place: Path,
        name: str,
        save_id: str,
        names: Collection[str],
        shards: Collection[str],
        manifest: dict[str, Any] | None,
    ) -> Iterator[FoundVersion]:
        paths = {shard: place / shard for shard in sorted(shards)} | {MANIFEST: place / name}
        own = f"{METADATA}.{save_id}"
        if own in names or (name == MANIFEST and METADATA in names):
            paths[METADATA] = place / (own if own in names else METADATA)
        is_named = name == MANIFEST
        yield from self._version(
            node, place, place.name, save_id, paths, manifest, is_published=True, is_named=is_named
        )

    def _nameless(
        self, node: int, place: Path, names: Collection[str], shards: Collection[str], *, has_name: bool
    ) -> Iterator[FoundVersion]:
        """Shards that no manifest lists, grouped by the number in their names. An unreadable manifest belongs to the
        last group.
        """
        by_number: dict[str, dict[str, Path]] = defaultdict(dict)
        for shard in sorted(shards):
            by_number[shard.rpartition("_")[2]][shard] = place / shard
        if has_name:
            last = max(by_number, default="")
            by_number[last] |= {name: place / name for name in (MANIFEST, METADATA) if name in names}
        for paths in by_number.values():
            yield from self._version(node, place, place.name, "", paths, None, is_published=True, is_named=has_name)

    def _version(
        self,
        node: int,
        place: Path,
        checkpoint_id: str,
        save_id: str,
        paths: dict[str, Path],
        manifest: dict[str, Any] | None,
        *,
        is_published: bool = False,
        is_named: bool = False,
    ) -> Iterator[FoundVersion]:
        """The version with these files, or none if no file exists: a real agent may have removed or renamed a listed
        one.
        """
        files = {}
        for name, path in paths.items():
            with contextlib.suppress(FileNotFoundError):
                files[name] = self._hash(path)
        if files:
            there = {name: paths[name] for name in files}
            yield FoundVersion(node, place, checkpoint_id, save_id, is_published, is_named, there, files, manifest)

    def _hash(self, path: Path) -> str:
        status = path.stat()
        signature = (status.st_ino, status.st_mtime_ns, status.st_size)
        known = self._known.get(path)
        if known is None or known[0] != signature:
            known = self._known[path] = (signature, sha1(path.read_bytes(), usedforsecurity=False).hexdigest())
        return known[1]


def _list(place: Path) -> list[Path]:
    try:
        return sorted(place.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _counts(name: str) -> bool:
    return name in (MANIFEST, METADATA) or name.endswith(SHARD)


def _save_id_in(name: str) -> str:
    return name.removeprefix(REPLACED).removesuffix(".json")


def read_manifests(place: Path, names: Collection[str]) -> dict[str, dict[str, Any]]:
    """The manifests in a directory that can be parsed, by file name: of the published version and of replaced ones."""
    found = {name: read_manifest(place / name) for name in names if name == MANIFEST or name.startswith(REPLACED)}
    return {
        name: manifest
        for name, manifest in found.items()
        if manifest is not None and name in (MANIFEST, f"{REPLACED}{manifest['save_id']}.json")
    }


def read_manifest(path: Path) -> dict[str, Any] | None:
    """The manifest, if it can be parsed. Its hash shows whether it is the original."""
    try:
        manifest = json.loads(path.read_bytes())["manifest"]
        are_there = all(isinstance(manifest[name], str) for name in ("save_id", "checkpoint_id"))
        return manifest if are_there and isinstance(manifest["shards"], dict) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def holds_tensor_of(raw: bytes, attempt: int, ranks: int) -> bool:
    """Whether the bytes of a shard belong to some rank of this attempt. The tensors of each attempt are different."""
    state = contents(attempt, ranks)
    return any(state[f"rank{rank}"].numpy().tobytes() in raw for rank in range(ranks))
