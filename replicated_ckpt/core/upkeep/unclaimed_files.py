"""Files of a checkpoint with a damaged or missing manifest. Their checksums show which save they belong to."""

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from operator import index
from typing import Any

from replicated_ckpt.core.integrity.checksum import size_with_footer
from replicated_ckpt.core.inventory import Holding, SaveFound
from replicated_ckpt.core.layout import MANIFEST_NAME, METADATA_NAME, is_checkpoint_file, is_checkpoint_id
from replicated_ckpt.core.manifest import Manifest
from replicated_ckpt.wording import one_line


@dataclass(frozen=True)
class UnclaimedFiles:
    """The files of one node in a checkpoint's directory without a valid manifest.

    `sizes` maps each file except the manifest to its bytes. `crcs` has the CRC32C of a shard from its own footer, and that
    of `.metadata` from its bytes. A shard with a damaged footer is only in `sizes`. `is_ours`: the directory has a damaged
    manifest, or a footer of ours; otherwise stock torch may have written it.
    """

    node_id: str
    checkpoint_id: str
    is_ours: bool
    sizes: Mapping[str, int] = field(default_factory=dict)
    crcs: Mapping[str, int] = field(default_factory=dict)

    def matching(self, manifest: Manifest) -> frozenset[str]:
        """The files that belong to this save by their own checksums."""
        wanted = {name: (entry.size_bytes, entry.crc32c) for name, entry in manifest.shards.items()}
        wanted[METADATA_NAME] = (manifest.metadata_bytes, manifest.metadata_crc32c)
        return frozenset(name for name, crc in self.crcs.items() if (self.sizes[name], crc) == wanted.get(name))

    def may_be_of(self, manifest: Manifest) -> bool:
        """Whether a shard has the size of this save's shard without its footer: stock torch wrote it, or it was cut.

        The checksums of the save then verify its bytes.
        """
        is_others = METADATA_NAME in self.crcs and METADATA_NAME not in self.matching(manifest)
        return not (self.is_ours or is_others) and any(
            size_with_footer(self.sizes[name]) == entry.size_bytes
            for name, entry in manifest.shards.items()
            if name in self.sizes
        )

    def foreign(self, manifest: Manifest) -> frozenset[str]:
        """The shards that belong to another save by their own checksums. Swapped shards of this save do not count."""
        own = {(entry.size_bytes, entry.crc32c) for entry in manifest.shards.values()}
        shards = self.crcs.keys() - {METADATA_NAME}
        return frozenset(name for name in shards if (self.sizes[name], self.crcs[name]) not in own)

    def holding(self, manifest: Manifest) -> Holding:
        """The files as a holding of this save. Shards that do not match, but may be this save's, are listed as damaged."""
        matching, foreign = self.matching(manifest), self.foreign(manifest)
        sizes = {name: size for name, size in self.sizes.items() if name in manifest.shards and name not in foreign}
        found = Holding.of_save(manifest, self.node_id, self.checkpoint_id, METADATA_NAME in matching, sizes)
        return replace(found, damaged=tuple(sorted(set(sizes) - matching)))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "UnclaimedFiles":
        """Raises ValueError, KeyError, TypeError: the fields are not valid; the caller names the peer that sent them."""
        sizes = {str(name): index(size) for name, size in dict(fields["sizes"]).items()}
        crcs = {str(name): index(crc) for name, crc in dict(fields["crcs"]).items() if name in sizes}
        unclaimed = cls(one_line(fields["node_id"]), str(fields["checkpoint_id"]), bool(fields["is_ours"]), sizes, crcs)
        if not is_checkpoint_id(unclaimed.checkpoint_id) or not all(map(is_checkpoint_file, sizes)):
            raise ValueError(f"not a valid list of unclaimed files: {unclaimed!r}"[:500])
        return unclaimed


def with_unclaimed_files(save: SaveFound, manifest: Manifest, unclaimed: Iterable[UnclaimedFiles]) -> SaveFound:
    """The save, with the unclaimed files that belong to it, or may belong to it. Every read verifies them."""
    of_id = (one for one in unclaimed if one.checkpoint_id == save.checkpoint_id)
    more = [holding for one in of_id if (holding := one.holding(manifest)).sizes or holding.has_metadata]
    return replace(save, holdings=(*save.holdings, *more)) if more else save


def note_lost_manifests(unclaimed: Iterable[UnclaimedFiles], damaged: MutableMapping[str, str]) -> list[str]:
    """Adds the lost manifests to `damaged`, by checkpoint; returns a text for each node with one."""
    ours = [one for one in unclaimed if one.is_ours]
    for one in ours:
        damaged.setdefault(one.checkpoint_id, MANIFEST_NAME)
    return [f"node {one.node_id}: its manifest of {one.checkpoint_id!r} is damaged or missing" for one in ours]


def recognize(unclaimed: UnclaimedFiles, manifests: Sequence[Manifest]) -> Manifest | None:
    """The save of the files; of several possible ones, the first in `manifests`. None: no known save.

    Shards decide, since different saves of one checkpoint often have equal metadata. Without a recognized shard the
    metadata decides. If that matches no save either, the files may belong to any save.
    """
    by_shards = [(len(unclaimed.matching(manifest) - {METADATA_NAME}), manifest) for manifest in manifests]
    most = max((count for count, _ in by_shards), default=0)
    if most:
        return next(manifest for count, manifest in by_shards if count == most)
    possible = [manifest for manifest in manifests if not unclaimed.foreign(manifest)]
    return next((manifest for manifest in possible if unclaimed.matching(manifest)), next(iter(possible), None))
