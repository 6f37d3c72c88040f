"""Damage as disks and people do it: to blocks and footers of shards, to metadata and to manifests."""

import random
import shutil

from tests.fault.torture.disks import MANIFEST, METADATA, SHARD, Lying

FOOTER_TAIL_BYTES = 24
"""Of a shard's last bytes, by docs/format.md: magic, sizes and a checksum, behind the checksums of the blocks."""


def damage(lying: Lying, name: str, how: str, chance: random.Random) -> set[str]:
    """Damages one file of a version; returns the names of the files that are bad now."""
    path = lying.paths[name]
    raw = bytearray(path.read_bytes())
    others = [other for other in sorted(lying.paths) if other.endswith(SHARD) and other != name]
    if how == "swap" and name.endswith(SHARD) and others:
        other = chance.choice(others)
        spare = path.with_name("spare")
        path.rename(spare)
        lying.paths[other].rename(path)
        spare.rename(lying.paths[other])
        return {name, other}
    if how == "truncate":
        path.write_bytes(raw[: chance.randrange(max(1, len(raw) - 1))])  # a manifest may do without its last newline
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
    """One of the files of a version, metadata and manifest as often as all shards together, and what happens to it."""
    shards = [name for name in names if name.endswith(SHARD)]
    kinds = [kind for kind in (shards, [METADATA], [MANIFEST]) if set(kind) & set(names)]
    name = chance.choice(chance.choice(kinds))
    hows = ["flip", "flip", "truncate", "empty", "delete"] + ["footer", "footer", "swap"] * (name in shards)
    return name, chance.choice(hows)
