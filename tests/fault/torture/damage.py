"""Damage by disks and operators: to blocks and footers of shards, to metadata and to manifests."""

import random
import shutil

from tests.fault.torture.disks import MANIFEST, METADATA, SHARD, FoundVersion

FOOTER_TAIL_BYTES = 24
"""Length of the end of a shard's footer: magic, sizes and a checksum, after the blocks' checksums (docs/format.md)."""


def damage(version: FoundVersion, name: str, how: str, chance: random.Random) -> set[str]:
    """Damages one file of a version. Returns the names of the files that are bad now."""
    path = version.paths[name]
    raw = bytearray(path.read_bytes())
    others = [other for other in sorted(version.paths) if other.endswith(SHARD) and other != name]
    if how == "swap" and name.endswith(SHARD) and others:
        other = chance.choice(others)
        spare = path.with_name("spare")
        path.rename(spare)
        version.paths[other].rename(path)
        spare.rename(version.paths[other])
        return {name, other}
    if how == "truncate":
        path.write_bytes(raw[: chance.randrange(max(1, len(raw) - 1))])  # its last newline may be missing
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "delete":
        path.unlink()
    elif raw:
        footer = range(len(raw) - min(len(raw), FOOTER_TAIL_BYTES), len(raw))
        raw[chance.choice(footer) if how == "footer" else chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
        fresh = path.with_name("fresh")
        fresh.write_bytes(raw)
        shutil.move(fresh, path)
    return {name}


def choose(names: list[str], chance: random.Random) -> tuple[str, str]:
    """Draws a file of a version, and the kind of damage. Metadata and manifest are drawn as often as all shards
    together.
    """
    shards = [name for name in names if name.endswith(SHARD)]
    kinds = [kind for kind in (shards, [METADATA], [MANIFEST]) if set(kind) & set(names)]
    name = chance.choice(chance.choice(kinds))
    hows = ["flip", "flip", "truncate", "empty", "delete"] + ["footer", "footer", "swap"] * (name in shards)
    return name, chance.choice(hows)
