"""Damage of every kind on several nodes at once: loads and repairs use every intact piece, and "complete" is reported
only when it is true.
"""

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from replicated_ckpt.errors import CheckpointNotFound, ShardLost
from tests.fault.combined.damaged_world import PARTS, Damage, World, is_as_saved, pair, ring
from tests.marks import long, mark_long

pytestmark = [pytest.mark.fault, pytest.mark.timeout(900)]
SUBSETS = [frozenset(parts) for count in range(len(PARTS) + 1) for parts in itertools.combinations(PARTS, count)]
STYLES = ("flip", "cut", "remove")


@pytest.fixture(params=[pair, long(ring)], ids=["pair", "ring"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    make: Callable[[Path], World] = request.param
    return make(tmp_path)


def combinations(nodes: int, *, is_same_block: bool, style: str) -> Iterator[tuple[Damage, ...]]:
    """All 16 ** nodes combinations. The bad block is the same on all nodes, or alternates between neighbours."""
    for chosen in itertools.product(SUBSETS, repeat=nodes):
        yield tuple(Damage(parts, 0 if is_same_block else index % 2, style) for index, parts in enumerate(chosen))


def some(worlds: Iterable[Sequence[Damage]], count: int) -> list[Sequence[Damage]]:
    found = list(worlds)
    return random.Random(12).sample(found, min(count, len(found)))


def check(world: World, damages: Sequence[Damage]) -> None:
    """Checks one combination: the load, the agents' protection, the result of `verify`, and the files afterwards."""
    can = world.can_be_healed(damages)
    with world.damaged(damages) as cluster:
        reader = sum(len(damage.parts) for damage in damages) % len(cluster.nodes)
        if can:
            world.load(cluster, reader)
        else:
            with pytest.raises((ShardLost, CheckpointNotFound)):
                world.load(cluster, reader)
        said = world.protect(cluster)
        audit = world.audit(cluster, reader)
        assert {found.is_complete for found in said} == {audit.is_intact}, f"{damages}: {said}, {audit.plan}"
        assert audit.is_intact == (not audit.findings and audit.plan.is_complete)
        assert audit.is_intact == (can or looks_like_stock(damages)), f"{damages}: {said}, {audit.plan}"
        if can:
            world.load(cluster, 0)
            assert is_as_saved(cluster, world.manifest)


def looks_like_stock(damages: Sequence[Damage]) -> bool:
    """Whether nothing identifies the checkpoint as the package's. It is then taken for stock torch's, which is not
    repaired.
    """
    return all(damage.style == "remove" and {"manifest", "footer"} <= damage.parts for damage in damages)


@pytest.mark.parametrize("style", mark_long(STYLES, keep=["flip"]))
@pytest.mark.parametrize("is_same_block", [False, True])
def test_a_checkpoint_with_all_pieces_somewhere_loads_and_heals(
    world: World, style: str, *, is_same_block: bool
) -> None:
    """A sample of all combinations of damaged manifest, metadata, footers and blocks, on two and on three nodes."""
    found = some(combinations(len(world.node_ids), is_same_block=is_same_block, style=style), 12)
    assert {world.can_be_healed(damages) for damages in found} == {False, True}
    for damages in found:
        check(world, damages)


def test_the_error_of_lost_metadata_names_each_nodes_file(tmp_path: Path) -> None:
    """No node has an intact `.metadata`: the error of the load names what each node has instead."""
    world = pair(tmp_path)
    parts = frozenset({"metadata"})
    with (
        world.damaged([Damage(parts, style="flip"), Damage(parts, style="remove")]) as cluster,
        pytest.raises(ShardLost) as raised,
    ):
        world.load(cluster, 0)
    said = [text for text in raised.value.searched if ".metadata" in text]
    assert any(world.node_ids[0] in text and "is damaged" in text for text in said)
    assert any(world.node_ids[1] in text and "has no .metadata of this save" in text for text in said)


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("is_same_block", [False, True])
def test_every_combination_of_damage(world: World, style: str, *, is_same_block: bool) -> None:
    """All 256 combinations on two nodes and all 4,096 on three. Each is repaired, or `verify` and all agents report it
    as lost.
    """
    for damages in combinations(len(world.node_ids), is_same_block=is_same_block, style=style):
        check(world, damages)
