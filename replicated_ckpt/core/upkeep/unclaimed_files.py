"""Files of a checkpoint whose manifest is damaged or gone. Their checksums show to which save they belong."""

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
    """What one node has in a checkpoint's directory without a manifest that can be believed.

    `sizes` maps each file but the manifest to its bytes. `crcs` has the CRC32C of those that tell it: a shard by its own
    footer, `.metadata` by being read. A shard whose footer is damaged is in `sizes` alone. `is_ours`: the directory has a
    manifest, if a damaged one, or a footer of ours; otherwise stock torch may have written it.
    """

    node_id: str
    checkpoint_id: str
    is_ours: bool
    sizes: Mapping[str, int] = field(default_factory=dict)
    crcs: Mapping[str, int] = field(default_factory=dict)

    def matching(self, manifest: Manifest) -> frozenset[str]:
        """The files that are, by their own checksums, those of this save."""
        wanted = {name: (entry.size_bytes, entry.crc32c) for name, entry in manifest.shards.items()}
        wanted[METADATA_NAME] = (manifest.metadata_bytes, manifest.metadata_crc32c)
        return frozenset(name for name, crc in self.crcs.items() if (self.sizes[name], crc) == wanted.get(name))

    def may_be_of(self, manifest: Manifest) -> bool:
        """Whether shards are as long as those of this save without footers: stock torch's, or cut ones.

        Which bytes they are, the checksums of the save tell.
        """
        is_others = METADATA_NAME in self.crcs and METADATA_NAME not in self.matching(manifest)
        return not (self.is_ours or is_others) and any(
            size_with_footer(self.sizes[name]) == entry.size_bytes
            for name, entry in manifest.shards.items()
            if name in self.sizes
        )

    def foreign(self, manifest: Manifest) -> frozenset[str]:
        """The shards that are, by their own checksums, of another save; not one with the bytes of another shard."""
        own = {(entry.size_bytes, entry.crc32c) for entry in manifest.shards.values()}
        shards = self.crcs.keys() - {METADATA_NAME}
        return frozenset(name for name in shards if (self.sizes[name], self.crcs[name]) not in own)

    def holding(self, manifest: Manifest) -> Holding:
        """What they are as a holding of this save; a shard that may be a damaged one of it counts as one."""
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
            raise ValueError(f"no valid list of unclaimed files: {unclaimed!r}"[:500])
        return unclaimed


def with_unclaimed_files(save: SaveFound, manifest: Manifest, unclaimed: Iterable[UnclaimedFiles]) -> SaveFound:
    """The save with the files that are of it by their checksums, or may be: what is read of them is checked anyway."""
    of_id = (one for one in unclaimed if one.checkpoint_id == save.checkpoint_id)
    more = [holding for one in of_id if (holding := one.holding(manifest)).sizes or holding.has_metadata]
    return replace(save, holdings=(*save.holdings, *more)) if more else save


def note_lost_manifests(unclaimed: Iterable[UnclaimedFiles], damaged: MutableMapping[str, str]) -> list[str]:
    """Notes in `damaged`, by checkpoint, that its manifest is; returns in words where that was seen."""
    ours = [one for one in unclaimed if one.is_ours]
    for one in ours:
        damaged.setdefault(one.checkpoint_id, MANIFEST_NAME)
    return [f"node {one.node_id}: its manifest of {one.checkpoint_id!r} is damaged or gone" for one in ours]


def recognize(unclaimed: UnclaimedFiles, manifests: Sequence[Manifest]) -> Manifest | None:
    """The save to which the files belong; of several possible ones, the first in `manifests`. None: no known one.

    The shards decide, as different saves of one checkpoint often have the same metadata. Where no shard tells anything,
    the metadata does, and where that does not either, they may be of any save.
    """
    by_shards = [(len(unclaimed.matching(manifest) - {METADATA_NAME}), manifest) for manifest in manifests]
    most = max((count for count, _ in by_shards), default=0)
    if most:
        return next(manifest for count, manifest in by_shards if count == most)
    possible = [manifest for manifest in manifests if not unclaimed.foreign(manifest)]
    return next((manifest for manifest in possible if unclaimed.matching(manifest)), next(iter(possible), None))
