"""A small cluster whose files are damaged in every combination: simulated nodes, real stores, one small checkpoint."""

import os
import pickle
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from torch.distributed.checkpoint.metadata import Metadata

from replicated_ckpt.agent.repair.audit import Audit, Auditor
from replicated_ckpt.agent.repair.reprotect import Protection
from replicated_ckpt.core.integrity.checksum import BLOCK_BYTES
from replicated_ckpt.core.layout import MANIFEST_NAME, METADATA_NAME
from replicated_ckpt.core.manifest import Manifest
from replicated_ckpt.dcp.find.survey import Surveyor
from replicated_ckpt.dcp.load.metadata_copies import read_verified_metadata
from replicated_ckpt.dcp.load.shard_reader import ShardReader
from replicated_ckpt.errors import CheckpointNotFound
from replicated_ckpt.stores.local.store import LocalStore
from tests.agent import checkpoints
from tests.agent.checkpoints import checkpointed, shard
from tests.fault.torture.simulated.cluster import Cluster
from tests.fault.torture.simulated.network import Actor

ID = "step-1"
DATA_BYTES = BLOCK_BYTES + 1000
BLOCKS = 2
PARTS = ("manifest", "metadata", "footer", "block")


@dataclass(frozen=True)
class Damage:
    """The damage on one node: which of PARTS are bad, and how. `block` is the number of the bad block in each of its
    shards.
    """

    parts: frozenset[str]
    block: int = 0
    style: str = "flip"


class World:
    """Nodes that know each other and hold one checkpoint. `damaged` makes a damaged copy of them."""

    def __init__(self, base: Path, holders: Mapping[str, Sequence[int]], nodes: int, copies: int) -> None:
        self.base = base
        self.holders = holders
        self._nodes = nodes
        cluster = Cluster(base / "template", nodes, 1)
        with cluster.installed():
            self.node_ids = [LocalStore(node.root).node_id() for node in cluster.nodes]
            stores = [LocalStore(node.root) for node in cluster.nodes]
            with mock.patch.object(checkpoints, "METADATA", pickle.dumps(Metadata({}, storage_data={}))):
                self.manifest = checkpointed(stores, 1, holders, copies=copies, size_bytes=DATA_BYTES)
            for node in (*cluster.nodes, *cluster.nodes):  # at the second boot every node knows all others
                node.kill()
                node.boot()
            for node in cluster.nodes:
                node.service.peers.learn([other.address() for other in cluster.nodes if other is not node])
                node.kill()
        self.contents = {name: (self._template(held[0]) / name).read_bytes() for name, held in holders.items()}

    def _template(self, node: int) -> Path:
        return self.base / "template" / f"node{node}" / ID

    @contextmanager
    def damaged(self, damages: Sequence[Damage]) -> Iterator[Cluster]:
        """A running cluster in which each node has its damage. Intact files are shared with the template."""
        base = self.base / "world"
        shutil.rmtree(base, ignore_errors=True)
        shutil.copytree(self.base / "template", base, copy_function=os.link)
        for index, damage in enumerate(damages):
            for name in (".agent/identity.json", ".agent/peers.json"):
                unshare(base / f"node{index}" / name)
            ruin(base / f"node{index}" / ID, damage)
        cluster = Cluster(base, self._nodes, 1)
        with cluster.installed():
            for node in cluster.nodes:
                node.boot()
            yield cluster

    def can_be_healed(self, damages: Sequence[Damage]) -> bool:
        """What the guarantees promise, by counting: every piece is intact on some node. A footer can also be computed
        from a copy whose data is intact.
        """

        def somewhere(part: str) -> bool:
            return any(part not in damage.parts for damage in damages)

        def shard_is_there(held: Sequence[int]) -> bool:
            copies = [damages[node] for node in held]
            footer = any("footer" not in copy.parts or "block" not in copy.parts for copy in copies)
            blocks = (any("block" not in copy.parts or copy.block != n for copy in copies) for n in range(BLOCKS))
            return footer and all(blocks)

        return somewhere("manifest") and somewhere("metadata") and all(map(shard_is_there, self.holders.values()))

    def load(self, cluster: Cluster, on: int) -> None:
        """Loads every byte, as a rank on this node does. Raises the error of the load, or AssertionError for wrong
        bytes.
        """
        addresses = [node.address() for node in cluster.nodes]
        store = LocalStore(cluster.nodes[on].root)
        with cluster.network.acting(Actor(on, is_agent=False)):
            for checkpoint_id in (ID, "latest"):
                survey = Surveyor(store, self.node_ids[on], addresses).survey(checkpoint_id)
                if survey.unmanaged_warning:
                    raise CheckpointNotFound("Without any manifest the checkpoint is taken for stock torch's.")
                assert read_verified_metadata(store, survey, None, "reader", set()).state_dict_metadata == {}
                names = sorted(self.contents)
                reader = ShardReader(store, self.node_ids[on], survey, names, "reader")
                try:
                    for name in names:
                        assert reader.read_range(name, 0, DATA_BYTES) == self.contents[name][:DATA_BYTES]
                finally:
                    reader.close()

    def protect(self, cluster: Cluster) -> list[Protection]:
        """The protection that the agents report once they have read everything and are at rest."""
        return cluster.protect(rounds=6)

    def audit(self, cluster: Cluster, on: int) -> Audit:
        """The result of `verify` on this node."""
        with cluster.network.acting(Actor(on, is_agent=False)):
            return Auditor(LocalStore(cluster.nodes[on].root)).audit()


def pair(base: Path) -> World:
    """Two nodes that both hold every shard."""
    return World(base, {shard(0): (0, 1), shard(1): (1, 0)}, 2, 2)


def ring(base: Path) -> World:
    """Three nodes, two copies of each shard: every node lacks one shard."""
    return World(base, {shard(0): (0, 1), shard(1): (1, 2), shard(2): (2, 0)}, 3, 2)


def unshare(path: Path) -> None:
    raw = path.read_bytes()
    path.unlink()
    path.write_bytes(raw)


def ruin(directory: Path, damage: Damage) -> None:
    for name in sorted(path.name for path in directory.iterdir()):
        if name == MANIFEST_NAME and "manifest" in damage.parts:
            _ruin_file(directory / name, damage.style, 60)
        elif name == METADATA_NAME and "metadata" in damage.parts:
            _ruin_file(directory / name, damage.style, 100)
        elif name.endswith(".distcp"):
            _ruin_shard(directory / name, damage)


def _ruin_file(path: Path, style: str, offset: int) -> None:
    raw = path.read_bytes()
    path.unlink()
    if style != "remove":
        path.write_bytes(
            raw[:offset] + bytes([raw[offset] ^ 0x40]) + raw[offset + 1 :] if style == "flip" else raw[:-9]
        )


def _ruin_shard(path: Path, damage: Damage) -> None:
    raw = bytearray(path.read_bytes())
    before = bytes(raw)
    if "block" in damage.parts:
        raw[damage.block * BLOCK_BYTES + 17] ^= 1
    if "footer" in damage.parts:
        match damage.style:
            case "flip":
                raw[DATA_BYTES + 1] ^= 1
            case "cut":
                del raw[-9:]
            case "remove":
                del raw[DATA_BYTES:]
    if raw != before:
        path.unlink()
        path.write_bytes(raw)


def is_as_saved(cluster: Cluster, manifest: Manifest) -> bool:
    """Whether every node has manifest and metadata as saved. Reads the files directly, without the package."""
    roots = [node.root / ID for node in cluster.nodes]
    manifests = {(root / MANIFEST_NAME).read_bytes() for root in roots}
    return manifests == {manifest.encode()} and len({(root / METADATA_NAME).read_bytes() for root in roots}) == 1
