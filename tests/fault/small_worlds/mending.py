"""The plan of re-protection in a small world: the package's planner, applied to the visible state of the nodes."""

from functools import cache

from replicated_ckpt.core.inventory import Holding
from replicated_ckpt.core.manifest import Manifest, NodeEntry, ShardEntry
from replicated_ckpt.core.upkeep.repair import NodeView, Presence, plan_repair
from replicated_ckpt.core.upkeep.repair_plan import RestoreManifest

SEQUENCES = (1, 2)
Runs = tuple[str, str]
"""The lineage of each version."""
ONE_RUN: Runs = ("11" * 8, "11" * 8)
TWO_RUNS: Runs = ("22" * 8, "11" * 8)
"""The new version overwrites another run's, on the nodes where it was opened."""
SHARD_BYTES = 100
PUBLISHED = (3, 4)
"""Places of a version that a node lists in its holdings: it has its name, or was replaced."""


def save_id(version: int) -> str:
    return f"{version + 1:032x}"


def shard_name(shard: int) -> str:
    return f"__{shard}_0.distcp"


@cache
def manifest(placed: tuple[int, ...], version: int, runs: Runs = ONE_RUN) -> Manifest:
    """The manifest of a version. The first node that holds a shard owns it, and the next one has a copy."""
    shards = {}
    for shard in range(max(placed).bit_length()):
        holders = tuple(f"n{node}" for node, bits in enumerate(placed) if bits >> shard & 1)
        shards[shard_name(shard)] = ShardEntry(SHARD_BYTES, 1, shard, holders[0], holders)
    nodes = tuple(NodeEntry(f"n{node}", "host", None, (node,)) for node in range(len(placed)))
    return Manifest(
        save_id(version),
        "last",
        SEQUENCES[version],
        float(version + 1),
        len(placed),
        2,
        10,
        1,
        nodes,
        shards,
        None,
        runs[version],
    )


Shown = tuple[tuple[bool, tuple[int, int], tuple[int, int]], ...]
"""Of each node: whether it answers, and the place and the shards of each version."""


def _view(placed: tuple[int, ...], shown: Shown, index: int, runs: Runs, *, are_gone: bool) -> NodeView:
    is_up, places, shards = shown[index]
    if not is_up:
        return NodeView(f"n{index}", Presence.GONE if are_gone else Presence.ASSUMED, None)
    holdings = tuple(
        Holding(
            f"n{index}",
            "last",
            save_id(version),
            SEQUENCES[version],
            has_metadata=True,
            sizes={shard_name(bit): SHARD_BYTES for bit in range(max(placed).bit_length()) if held >> bit & 1},
            created_unix_s=float(version + 1),
            lineage=runs[version],
            is_replaced=place == PUBLISHED[1],
        )
        for version, (place, held) in enumerate(zip(places, shards, strict=True))
        if place in PUBLISHED
    )
    return NodeView(f"n{index}", Presence.UP, holdings)


@cache
def planned_for(
    placed: tuple[int, ...], shown: Shown, index: int, runs: Runs = ONE_RUN, *, are_gone: bool
) -> tuple[tuple[int, int], ...]:
    """The actions planned for the node: (version, 0) adopts the version, (version, bits) copies these shards of it."""
    views = [_view(placed, shown, node, runs, are_gone=are_gone) for node in range(len(shown))]
    held = {holding.save_id for view in views for holding in view.holdings or ()}
    manifests = {save_id(version): manifest(placed, version, runs) for version in (0, 1) if save_id(version) in held}
    part = plan_repair(manifests, views).of_node(f"n{index}")
    actions = []
    for action in part.actions:
        version = 0 if action.save_id == save_id(0) else 1
        bits = 0 if isinstance(action, RestoreManifest) else 1 << int(action.shard.split("_")[2])
        actions.append((version, bits))
    return tuple(actions)
