"""Inspection: reads all files on this node's disk and compares them with manifests. It changes nothing."""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from replicated_ckpt.core.integrity.checksum import crc32c
from replicated_ckpt.core.inventory import Holding
from replicated_ckpt.core.layout import MANIFEST_NAME, METADATA_NAME
from replicated_ckpt.core.manifest import Manifest, ShardEntry
from replicated_ckpt.core.upkeep.repair_plan import Finding, Problem
from replicated_ckpt.core.upkeep.unclaimed_files import UnclaimedFiles
from replicated_ckpt.errors import ManifestInvalid, ManifestVersionUnknown, ObjectCorrupt, ObjectMissing, StoreError
from replicated_ckpt.stores.files.direct import page_aligned, read_past_cache
from replicated_ckpt.stores.files.durable import is_refusal, is_unreadable, translate_errors, translate_read_errors
from replicated_ckpt.stores.files.existence import closing_fd
from replicated_ckpt.stores.local.directories.committed import Committed, open_directory
from replicated_ckpt.stores.local.directories.looked import crc_of_footer
from replicated_ckpt.stores.local.shard_file import ShardFile
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.local.unclaimed import find_crc, read_unclaimed_files
from replicated_ckpt.stores.verified import Expected

PIECE_BYTES = 4 << 20
Paced = Callable[[int], None]
"""Called with the number of bytes that are read next; may wait."""


def at_once(size_bytes: int) -> None:
    """No pace: reads as fast as the disk does."""
    del size_bytes


class Inspector:
    """Reads the checkpoints of one store. A file that fails its checksum is read again before it counts as damaged.

    A file that the system refuses to read ends the inspection: it is neither intact nor damaged.

    Afterwards `holdings` has the files of each inspected checkpoint, with bad shards marked as damaged. `unclaimed` has
    the files without a valid manifest.
    """

    def __init__(self, store: LocalStore, node_id: str, paced: Paced = at_once) -> None:
        self._store = store
        self._node_id = node_id
        self._paced = paced
        self._scratch = page_aligned(PIECE_BYTES)
        self.holdings: list[Holding] = []
        self.unclaimed: list[UnclaimedFiles] = []
        self.bytes_read = 0

    def inspect(self, checkpoint_id: str | None = None) -> Iterator[Finding]:
        """Findings of one checkpoint, or of all. A checkpoint that disappears meanwhile is skipped.

        Raises:
            StoreError: the disk cannot be listed, or a file may not be read.
        """
        catalog = self._store.catalog
        every = {*catalog.directories(), *catalog.without_manifest()} if checkpoint_id is None else {checkpoint_id}
        for found in sorted(every):
            yield from self._of_id(found)

    def sum_sizes(self, checkpoint_id: str | None = None) -> int:
        """The number of bytes that `inspect` has to read, from the present file sizes. For a display of progress."""
        catalog = self._store.catalog
        ids = catalog.directories() if checkpoint_id is None else [checkpoint_id]
        return sum(size for found in ids for size in catalog.look(found).sizes.values())

    def _of_id(self, checkpoint_id: str) -> Iterator[Finding]:
        catalog = self._store.catalog
        try:
            with open_directory(self._store.root, checkpoint_id) as directory:
                yield from self._of_directory(directory)
                for manifest in catalog.replaced_in(catalog.look(checkpoint_id)):
                    yield from self._of_save(directory.of_save(manifest.save_id, is_replaced=True), manifest)
        except ObjectMissing:
            return
        except StoreError as exc:
            if not is_unreadable(exc):
                raise
            # The disk has lost the directory itself. It counts as damaged, and the inspection goes on.
            self.unclaimed.append(UnclaimedFiles(self._node_id, checkpoint_id, is_ours=True))
            path = str(self._store.root / checkpoint_id)
            what = "", MANIFEST_NAME, path, Problem.CORRUPT, "a directory", exc.detail
            yield Finding(self._node_id, checkpoint_id, *what)

    def _of_directory(self, directory: Committed) -> Iterator[Finding]:
        try:
            manifest = directory.manifest()
        except ManifestVersionUnknown:
            return
        except (ManifestInvalid, ObjectMissing) as exc:
            yield from self._of_unclaimed_files(directory, exc)
        else:
            found = list(self._of_save(directory.of_manifest(manifest), manifest))
            if found and (slim := self._find_slimmed(directory, manifest)) is not None:
                self.holdings.pop()  # its optimizer was removed during the read
                found = list(self._of_save(directory.of_manifest(slim), slim))
            yield from found

    def _find_slimmed(self, directory: Committed, manifest: Manifest) -> Manifest | None:
        """The manifest of the same save, if it was slimmed since `manifest` was read."""
        with contextlib.suppress(ManifestInvalid, ObjectMissing):
            now = directory.manifest()
            if now.save_id == manifest.save_id and now.is_slim and not manifest.is_slim:
                return now
        return None

    def _of_save(self, directory: Committed, manifest: Manifest) -> Iterator[Finding]:
        """Findings of a published or replaced save."""
        problem = self.metadata_problem(directory, manifest)
        if problem is not None:
            yield problem
        damaged, footer_damaged = [], []
        for shard in sorted(manifest.shards):
            found = self.shard_problem(directory, manifest, shard)
            if found is not None:
                yield found
                damaged.append(shard)
                footer_damaged += [shard] if self.has_damaged_footer(directory, manifest, shard) else []
        catalog = self._store.catalog
        # Once for a directory, with its published version: else each stray would be reported twice.
        strays = [] if directory.is_replaced else catalog.list_strays(catalog.look(directory.checkpoint_id))
        for name in strays:
            yield self._finding(directory, manifest.save_id, name, Problem.UNKNOWN, "no such file", "one")
        looked = catalog.look(directory.checkpoint_id).sizes
        sizes = {name: size for name, size in looked.items() if name in manifest.shards or name in strays}
        bad = tuple(name for name in damaged if name in sizes)
        held = Holding.of_save(manifest, self._node_id, directory.checkpoint_id, problem is None, sizes)
        self.holdings.append(
            replace(held, damaged=bad, is_replaced=directory.is_replaced, footer_damaged=tuple(footer_damaged))
        )

    def _of_unclaimed_files(self, directory: Committed, why: ManifestInvalid | ObjectMissing) -> Iterator[Finding]:
        """Findings of a directory without a valid manifest. A checkpoint of stock torch needs none: no findings."""
        claimed = self._store.catalog.list_claimed(directory.checkpoint_id)
        unclaimed = read_unclaimed_files(directory, self._node_id, find_crc, self._holds, claimed)
        if unclaimed is None:
            return
        self.unclaimed.append(unclaimed)
        if isinstance(why, ManifestInvalid):
            found = Problem.CORRUPT, "a valid manifest", why.message
        else:
            found = Problem.MISSING, "a manifest", "none"
        if unclaimed.is_ours:
            yield self._finding(directory, "", MANIFEST_NAME, *found)

    def _holds(self, fd: int, crc: int) -> bool:
        return self._hash_open(fd)[1] == crc

    def has_damaged_footer(self, directory: Committed, manifest: Manifest, shard: str) -> bool:
        """Whether only the footer of a damaged shard is damaged, missing or unreadable, and its data is intact."""
        entry, root, label = manifest.shards[shard], str(self._store.root), f"{directory.checkpoint_id}/{shard}"
        expected = Expected(entry.size_bytes, entry.crc32c, has_damaged_footer=True)
        try:
            fd = directory.open(shard)
        except StoreError:
            return False
        try:
            with translate_errors(root, "read", label):
                with contextlib.suppress(ObjectCorrupt), translate_read_errors(root, "read", label):
                    if crc_of_footer(fd) == entry.crc32c:
                        return False  # the footer is the saved one: the data is damaged
                self._paced(entry.size_bytes)
                found = ShardFile(partial(os.dup, fd), root, label, expected).open()
        except StoreError:
            return False
        finally:
            os.close(fd)
        found.close()
        self.bytes_read += found.bytes_read
        return True

    def _absent(self, directory: Committed, manifest: Manifest, shard: str) -> Finding | None:
        # A shard that this node never had is not missing here.
        if self._node_id not in manifest.shards[shard].holders:
            return None
        expected = f"a copy of {manifest.shards[shard].size_bytes} bytes"
        return self._finding(directory, manifest.save_id, shard, Problem.MISSING, expected, "none")

    def metadata_problem(self, directory: Committed, manifest: Manifest) -> Finding | None:
        """The finding of a damaged `.metadata`; None if it is intact."""
        expected = f"{manifest.metadata_bytes} bytes of CRC32C {manifest.metadata_crc32c:08x}"
        try:
            size, crc = self._hash(directory, METADATA_NAME)
        except ObjectMissing:
            return self._finding(directory, manifest.save_id, METADATA_NAME, Problem.MISSING, expected, "none")
        except StoreError as exc:
            if is_refusal(exc):
                raise
            return self._finding(directory, manifest.save_id, METADATA_NAME, Problem.CORRUPT, expected, exc.detail)
        if (size, crc) == (manifest.metadata_bytes, manifest.metadata_crc32c):
            return None
        found = f"{size} bytes of CRC32C {crc:08x}"
        return self._finding(directory, manifest.save_id, METADATA_NAME, Problem.CORRUPT, expected, found)

    def shard_problem(self, directory: Committed, manifest: Manifest, shard: str) -> Finding | None:
        """The finding of a damaged or missing shard file; None if it is intact."""
        entry: ShardEntry = manifest.shards[shard]
        expected = f"{entry.size_bytes} bytes of CRC32C {entry.crc32c:08x}"
        found = ""
        # A flip in memory is gone at the second read; damage on the disk stays.
        for _ in range(2):
            try:
                size, crc = self._hash(directory, shard)
            except ObjectMissing:
                return self._absent(directory, manifest, shard)
            except StoreError as exc:
                # Out of descriptors, or no permission: no evidence of damage, so no finding.
                if is_refusal(exc):
                    raise
                found = exc.detail
                continue
            if (size, crc) == (entry.size_bytes, entry.crc32c):
                return None
            found = f"{size} bytes of CRC32C {crc:08x}"
        return self._finding(directory, manifest.save_id, shard, Problem.CORRUPT, expected, found)

    def _hash(self, directory: Committed, name: str) -> tuple[int, int]:
        """Size and CRC32C of a file, as the disk returns it now."""
        where = f"{directory.checkpoint_id}/{name}"
        with closing_fd(directory.open(name)) as fd, translate_errors(str(self._store.root), "read", where):
            return self._hash_open(fd)

    def _hash_open(self, fd: int) -> tuple[int, int]:
        size = crc = 0
        file_bytes = os.fstat(fd).st_size
        # Past the page cache: a scrub must neither evict the training's pages nor check cached bytes.
        pieces = read_past_cache(fd, self._scratch)
        while True:
            self._paced(max(0, min(PIECE_BYTES, file_bytes - size)))
            piece = next(pieces, None)
            if piece is None:
                break
            crc = crc32c(piece, crc)
            size += len(piece)
            self.bytes_read += len(piece)
        return size, crc

    def _finding(
        self, directory: Committed, save_id: str, name: str, problem: Problem, expected: str, found: str
    ) -> Finding:
        path = self._store.root / directory.checkpoint_id / directory.disk_name(name)
        return Finding(self._node_id, directory.checkpoint_id, save_id, name, str(path), problem, expected, found)
