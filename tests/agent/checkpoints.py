"""Writes checkpoints into several stores without torch and without agents, and reads back what the stores hold."""

import itertools
import json
import os
from collections.abc import Mapping, Sequence

from replicated_ckpt.core.integrity.checksum import crc32c
from replicated_ckpt.core.layout import ShardName
from replicated_ckpt.core.manifest import Manifest, NodeEntry, ShardEntry, UploadEntry, WeightsEntry
from replicated_ckpt.core.parts import NUMBERS_PER_SAVE, Part, part_of_shard
from replicated_ckpt.core.upkeep.repair_plan import Finding
from replicated_ckpt.stores.local.directories.intent import Intent
from replicated_ckpt.stores.local.inspection import Inspector
from replicated_ckpt.stores.local.shard_file import FileSink
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.peer.client import AgentAddress
from replicated_ckpt.testing.shards import table_of

METADATA = b"metadata" * 50
WEIGHTS = b"weights" * 30
"""The metadata of a slimmed checkpoint."""


def shard(rank: int, part: Part = Part.WEIGHTS) -> str:
    return f"__{rank}_{part}.distcp"


def with_optimizer(holders_by_shard: Mapping[str, Sequence[int]]) -> dict[str, Sequence[int]]:
    """Adds an optimizer shard, with the same holders, beside each of these shards."""
    return {
        renumbered_part(name, part): held
        for name, held in holders_by_shard.items()
        for part in (Part.WEIGHTS, Part.OPTIMIZER)
    }


def renumbered_part(name: str, part: Part) -> str:
    """The name of the shard of `part` of the same rank and save."""
    parsed = ShardName.parse(name)
    assert parsed is not None
    return str(ShardName(parsed.rank, parsed.index - parsed.index % NUMBERS_PER_SAVE + part))


def renumbered(name: str, number: int) -> str:
    """The name of the same shard in a save whose file numbers start at `number`."""
    parsed = ShardName.parse(name)
    return name if parsed is None else str(ShardName(parsed.rank, number + parsed.index % NUMBERS_PER_SAVE))


def next_file_number(stores: Sequence[LocalStore], checkpoint_id: str) -> int:
    """The first file number of a new save: the lowest that is free in all of these stores."""
    taken = frozenset[int]().union(*(store.find_taken_numbers(checkpoint_id) or () for store in stores))
    used = {number // NUMBERS_PER_SAVE for number in taken}
    return next(number for number in itertools.count() if number not in used) * NUMBERS_PER_SAVE


def file_number(stores: Sequence[LocalStore], checkpoint_id: str, save_id: str) -> int:
    """The first file number of a save that a store holds already; else the next free one."""
    for store in stores:
        if save_id in {held.save_id for held in store.catalog.holdings("", checkpoint_id)}:
            names = map(ShardName.parse, store.catalog.manifest_of(checkpoint_id, save_id).shards)
            return min((name.index for name in names if name is not None), default=0)
    return next_file_number(stores, checkpoint_id)


def replaced_saves(store: LocalStore) -> list[str]:
    """The ids of saves that a store keeps although a newer save has their checkpoint id."""
    return sorted(manifest.save_id for _, manifest in store.catalog.read_replaced())


def checkpointed(
    stores: Sequence[LocalStore],
    number: int,
    holders_by_shard: Mapping[str, Sequence[int]],
    *,
    checkpoint_id: str = "step-1",
    copies: int = 2,
    size_bytes: int = 700_000,
    on: Sequence[int] | None = None,
    url: str = "",
    has_own_prefix: bool = False,
    lineage: str = "",
    replaces_in_bucket: str = "",
) -> Manifest:
    """Writes a committed checkpoint. `holders_by_shard` has the indices of the stores of each shard, the owner's first.

    The metadata is written to all stores, or to those in `on`. A checkpoint with optimizer shards can be slimmed. With
    a `url`, the manifest asks for an upload there, under a prefix of its own or not. Where a store holds another save
    of the same checkpoint, the shards get the next free file number, as in a real save.
    """
    number_in_names = file_number(stores, checkpoint_id, f"{number:032x}")
    holders_by_shard = {renumbered(name, number_in_names): held for name, held in holders_by_shard.items()}
    save_id = f"{number:032x}"
    nodes = [store.node_id() for store in stores]
    weights = make_weights(has_own_prefix=has_own_prefix) if any(map(_is_optimizer, holders_by_shard)) else None
    in_bucket = METADATA if weights is None else METADATA + WEIGHTS
    described = in_bucket * (1 + has_own_prefix)  # with its own prefix, the bucket's metadata follows the nodes'
    contents = {name: os.urandom(size_bytes) for name in holders_by_shard}
    tables = {name: table_of([data]) for name, data in contents.items()}
    manifest = Manifest(
        save_id=save_id,
        checkpoint_id=checkpoint_id,
        sequence=number,
        created_unix_s=0.0,
        world_size=len(stores),
        copies=copies,
        metadata_bytes=len(described),
        metadata_crc32c=crc32c(described),
        nodes=tuple(NodeEntry(node, f"host{rank}", None, (rank,)) for rank, node in enumerate(nodes)),
        shards={
            name: ShardEntry(
                tables[name].file_bytes, tables[name].file_crc(), 0, nodes[held[0]], tuple(nodes[n] for n in held)
            )
            for name, held in holders_by_shard.items()
        },
        upload=UploadEntry(url, has_own_prefix, len(in_bucket), crc32c(in_bucket), replaces_in_bucket) if url else None,
        lineage=lineage,
        weights=weights,
    )
    for index in range(len(stores)) if on is None else on:
        store = stores[index]
        store.begin(Intent(save_id, checkpoint_id, "by hand", overwrite=True))
        for name in (name for name, held in holders_by_shard.items() if index in held):
            sink = FileSink.create(store.path_of_staged(save_id, name))
            sink.write(memoryview(contents[name] + tables[name].encode()))
            sink.finish(tables[name])
        store.put_small(save_id, ".metadata", described)
        store.put_small(save_id, ".manifest.json", manifest.encode())
        store.commit(save_id)
    return manifest


def make_weights(*, has_own_prefix: bool = False) -> WeightsEntry:
    """The manifest's entry for the weights."""
    both, there = WEIGHTS * (1 + has_own_prefix), WEIGHTS * has_own_prefix
    return WeightsEntry(len(WEIGHTS), crc32c(both), len(there), crc32c(there), ("optim",))


def _is_optimizer(name: str) -> bool:
    return part_of_shard(name) is Part.OPTIMIZER


def introduced(store: LocalStore, peers: Sequence[AgentAddress]) -> None:
    """Writes these peers into the address book of a store whose agent does not run."""
    entries = [peer.to_json() for peer in peers if peer.node_id != store.node_id()]
    (store.agent_directory() / "peers.json").write_text(json.dumps(entries))


def findings(store: LocalStore) -> list[Finding]:
    return list(Inspector(store, store.node_id()).inspect())


def held(store: LocalStore, checkpoint_id: str = "step-1") -> set[str]:
    """Reads every byte of a checkpoint in a store, and returns the shards that are intact."""
    inspector = Inspector(store, store.node_id())
    list(inspector.inspect(checkpoint_id))
    return {name for holding in inspector.holdings for name in holding.sizes if name not in holding.damaged}


def quarantined(store: LocalStore) -> list[str]:
    """Names of the files in quarantine."""
    folder = store.root / ".quarantine"
    return sorted(path.name.rpartition(".")[0] for path in folder.rglob("*") if path.is_file())
