"""Synthetic plans, posts, receipts and results of a save with many ranks and items."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from replicated_ckpt.config import WriterConfig
from replicated_ckpt.core.inventory import Holding
from replicated_ckpt.core.manifest import Manifest
from replicated_ckpt.dcp.agreement.decision import Receipt, SaveDecision, SavePost, ShardReceipt
from replicated_ckpt.dcp.agreement.node_post import NodePost
from replicated_ckpt.dcp.agreement.nodes import Committed, OnOpen, Opened
from replicated_ckpt.dcp.c10d.group_pool import describe_wanted
from replicated_ckpt.dcp.planning.cached_layouts import CachedLayout
from replicated_ckpt.dcp.runtime.torch_private import StorageInfo
from replicated_ckpt.stores.local.directories.intent import Intent
from replicated_ckpt.stores.peer.client import AgentAddress

SHARD_BYTES = 1 << 30
ROWS = 64
_BLOCKS = 48
_KINDS = ("attention.wq", "attention.wk", "attention.wv", "attention.wo", "feed_forward.w1", "feed_forward.w2")


@dataclass(frozen=True)
class World:
    """The number of ranks, of items over all ranks, and of ranks per node."""

    ranks: int
    items: int
    ranks_per_node: int = 8

    @property
    def tensors(self) -> int:
        """The number of tensors. Each has one chunk per rank, as with FSDP2."""
        return max(1, self.items // self.ranks)

    def node_of(self, rank: int) -> str:
        """The rank's node id, as random as in a job, because messages with node ids are compressed."""
        return hashlib.sha256(f"node {rank // self.ranks_per_node}".encode()).hexdigest()[:12]


def address(node_id: str, port: int = 40000) -> AgentAddress:
    return AgentAddress(node_id, "127.0.0.1", port, hashlib.sha256(node_id.encode()).hexdigest())


def posts(world: World) -> list[SavePost]:
    wants = describe_wanted(WriterConfig("/nvme/ckpt", 2, "peer", None, "warn", overwrite=False))
    return [SavePost("run/step-1000", _node(world.node_of(rank)), wants=wants) for rank in range(world.ranks)]


def _node(node_id: str) -> NodePost:
    boot_id = f"{node_id}-9f1c-4c64-a3b1-{node_id}"
    return NodePost(node_id, f"gpu-{node_id}.cluster.internal", boot_id, "64768:131", None, address(node_id))


def _names(world: World) -> list[str]:
    return [
        f"optim.state.layers.{at // len(_KINDS) % _BLOCKS}.{_KINDS[at % len(_KINDS)]}.{at}.exp_avg"
        for at in range(world.tensors)
    ]


def plans(world: World) -> list[SavePlan]:
    """A plan for each rank. The plans share no objects, as plans from other processes."""
    return [plan_of(world, rank) for rank in range(world.ranks)]


def plan_of(world: World, rank: int) -> SavePlan:
    """One rank's plan."""
    names = _names(world)
    return SavePlan(
        [_item(name, rank, world) for name in names], planner_data={name: tuple(name.split(".")) for name in names}
    )


def _item(name: str, rank: int, world: World) -> WriteItem:
    offset = torch.Size([ROWS * rank, 0])
    chunk = ChunkStorageMetadata(offset, torch.Size([ROWS, 4096]))
    whole = torch.Size([ROWS * world.ranks, 4096])
    tensor = TensorWriteData(chunk, TensorProperties(dtype=torch.bfloat16), whole)
    return WriteItem(MetadataIndex(name, offset), WriteItemType.SHARD, tensor_data=tensor)


def results(plans_of_ranks: Sequence[SavePlan]) -> list[list[WriteResult]]:
    """The write results of each rank. `plans_of_ranks` are the planner's plans, whose items have their final index."""
    return [
        [
            WriteResult(item.index, ROWS * 8192, StorageInfo(f"__{rank}_0.distcp", at * ROWS * 8192, ROWS * 8192))
            for at, item in enumerate(plan.items)
        ]
        for rank, plan in enumerate(plans_of_ranks)
    ]


def receipts(world: World, decision: SaveDecision) -> list[Receipt]:
    buddies = decision.placement.buddies_by_node
    return [
        Receipt((ShardReceipt(f"__{rank}_0.distcp", SHARD_BYTES, rank, (node, *buddies[node])),))
        for rank in range(world.ranks)
        for node in (world.node_of(rank),)
    ]


def holdings(manifest: Manifest) -> list[Holding]:
    """What a survey finds if every node holds all its shards."""
    sizes: dict[str, dict[str, int]] = {node.node_id: {} for node in manifest.nodes}
    for name, entry in manifest.shards.items():
        for node in entry.holders:
            sizes[node][name] = entry.size_bytes
    return [
        Holding(node, manifest.checkpoint_id, manifest.save_id, manifest.sequence, True, held)
        for node, held in sizes.items()
    ]


class FakeNodes:
    """Fakes all nodes of a save: they do everything at once, and keep the last manifest and metadata."""

    def __init__(self, held_by_node: Mapping[str, Sequence[str]]) -> None:
        self.manifest = self.metadata = b""
        self.same: CachedLayout | None = None
        self._held_by_node = held_by_node

    def begin(self, intent: Intent, on_own_open: OnOpen = lambda: None) -> Opened:
        on_own_open()
        del intent
        return Opened({})

    def commit(self, save_id: str, metadata: bytes, manifest: bytes, same: CachedLayout | None = None) -> Committed:
        del save_id
        self.metadata, self.manifest, self.same = metadata, manifest, same
        return Committed(self._held_by_node, {})

    def abort(self, save_id: str, why: str) -> None:
        raise AssertionError(f"{save_id}: {why}")


def held_by_node(found: Sequence[Receipt]) -> Mapping[str, Sequence[str]]:
    held: dict[str, list[str]] = {}
    for receipt in found:
        for shard in receipt.shards:
            for node in shard.holders:
                held.setdefault(node, []).append(shard.name)
    return held
