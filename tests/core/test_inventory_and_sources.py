"""Inventory and sources: which saves exist, which is newest, and which nodes serve them."""

from dataclasses import replace

import pytest

from replicated_ckpt.core.inventory import Holding, saves_found
from replicated_ckpt.core.reading.windows import source_orders


def holding(node: str, checkpoint_id: str, sequence: int, *, save: str = "0", **sizes: int) -> Holding:
    return Holding(
        node, checkpoint_id, save * 32, sequence, True, {f"__{rank[1:]}_0.distcp": size for rank, size in sizes.items()}
    )


def test_saves_are_sorted_by_sequence_and_grouped_by_save_id() -> None:
    """Saves are sorted by sequence, and holdings are grouped by save, not by id."""
    saves = saves_found(
        [
            holding("a", "x", 1, save="1", r0=5),
            holding("b", "x", 1, save="1", r1=5),
            holding("a", "y", 7, save="2", r0=5),
        ]
    )
    assert [(save.checkpoint_id, save.sequence, len(save.holdings)) for save in saves] == [("y", 7, 1), ("x", 1, 2)]


def test_a_copy_of_another_size_is_no_copy() -> None:
    """A truncated file does not count as a copy."""
    (save,) = saves_found([holding("a", "x", 1, r0=5), holding("b", "x", 1, r0=4)])
    assert save.holders_of("__0_0.distcp", 5) == ("a",)
    assert save.list_missing({"__0_0.distcp": 5, "__1_0.distcp": 5}) == ("__1_0.distcp",)


def test_ranks_everywhere_read_the_metadata_of_a_save() -> None:
    """Metadata behind a hanging agent is available only to that node's own ranks."""
    (save,) = saves_found([holding("a", "x", 1), replace(holding("b", "x", 1), has_metadata=False)])
    assert save.is_described_to({"a", "b"}, hung=())
    assert save.is_described_to({"a", "b"}, hung={"b"})
    assert save.is_described_to({"a"}, hung={"a"})
    assert not save.is_described_to({"a", "b"}, hung={"a"})


@pytest.mark.parametrize(
    "change", [{"save_id": "x"}, {"checkpoint_id": "../x"}, {"sizes": {"../x": 1}}, {"sizes": {"__0_0.distcp": -1}}]
)
def test_a_holding_from_a_peer_is_validated(change: dict[str, object]) -> None:
    """A peer's holding with invalid fields is refused."""
    good = holding("a", "x", 1, r0=5)
    assert Holding.from_json(good.to_json()) == good
    with pytest.raises(ValueError, match="valid holding"):
        Holding.from_json({**good.to_json(), **change})


@pytest.mark.parametrize("created", [-1e300, -1, float("nan"), float("inf")])
def test_an_invalid_time_stamp_is_refused(created: float) -> None:
    """A peer's time stamp before 1970, or not finite, is refused."""
    with pytest.raises(ValueError, match="time stamp"):
        Holding.from_json({**holding("a", "x", 1, r0=5).to_json(), "created_unix_s": created})


def test_the_own_store_comes_first_and_peers_share_the_rest() -> None:
    """Shards in the own store are read there. Others are spread over the peers by bytes."""
    sizes = {"__0_0.distcp": 10, "__1_0.distcp": 10, "__2_0.distcp": 10}
    holders = {"__0_0.distcp": ["b", "me"], "__1_0.distcp": ["b", "c"], "__2_0.distcp": ["b", "c"]}
    orders = source_orders(sizes, holders, "me", "rank 0")
    assert orders["__0_0.distcp"] == ("me", "b")
    assert {orders["__1_0.distcp"][0], orders["__2_0.distcp"][0]} == {"b", "c"}


def test_a_shard_without_holders_has_no_source() -> None:
    """A shard without holders gets an empty order, not an error."""
    assert source_orders({"__0_0.distcp": 1}, {}, "me", "k") == {"__0_0.distcp": ()}
