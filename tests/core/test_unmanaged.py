"""Stock torch's files on several nodes form a checkpoint, judged by names, sizes and fingerprints."""

import pytest

from replicated_ckpt.core.reading.unmanaged_files import UnmanagedFile, UnmanagedHolding, unmanaged_checkpoints
from replicated_ckpt.errors import CheckpointAmbiguous

METADATA = UnmanagedFile(500, 7, 1000.0)
NEEDED = {"__0_0.distcp": 100, "__1_0.distcp": 200}


def shard(size_bytes: int, print_crc32c: int = 1, modified_unix_s: float = 990.0) -> UnmanagedFile:
    return UnmanagedFile(size_bytes, print_crc32c, modified_unix_s)


def holding(
    node: str, metadata: UnmanagedFile | None = None, name: str = "step-1", **shards: UnmanagedFile
) -> UnmanagedHolding:
    return UnmanagedHolding(node, name, metadata, {f"__{rank[1:]}_0.distcp": file for rank, file in shards.items()})


def test_files_on_several_nodes_make_one_checkpoint() -> None:
    """Each shard is held where a file is long enough for `.metadata`. Missing shards are listed with their rank."""
    (checkpoint,) = unmanaged_checkpoints([holding("a", METADATA, r0=shard(100)), holding("b", r1=shard(200))])
    save = checkpoint.save(NEEDED)
    assert (save.missing, save.copies, save.refused) == ((), 1, ())
    assert {held.node_id: dict(held.sizes) for held in save.holdings} == {
        "a": {"__0_0.distcp": 100},
        "b": {"__1_0.distcp": 200},
    }
    (checkpoint,) = unmanaged_checkpoints([holding("a", METADATA, r0=shard(100))])
    assert checkpoint.save(NEEDED).missing == ("__1_0.distcp",)
    assert "rank 1" in checkpoint.save(NEEDED).manifest.owner_of("__1_0.distcp")


def test_a_shard_of_another_save_is_refused() -> None:
    """A file that is too short for `.metadata` does not count, and is reported. A long enough one is used."""
    nodes = [holding("a", METADATA, r0=shard(100), r1=shard(199, 9)), holding("b", r1=shard(200))]
    (checkpoint,) = unmanaged_checkpoints(nodes)
    save = checkpoint.save(NEEDED)
    assert save.missing == ()
    assert set(save.holders["__1_0.distcp"]) == {"b"}
    assert ["node a" in text and "__1_0.distcp" in text for text in save.refused] == [True]


@pytest.mark.parametrize("other", [shard(200, 2), shard(300, 1)])
def test_two_runs_under_one_id_are_never_mixed(other: UnmanagedFile) -> None:
    """Two different files for one shard, or two different `.metadata`, raise with the file of each node."""
    nodes = [holding("a", METADATA, r0=shard(100), r1=shard(200)), holding("b", r1=other)]
    with pytest.raises(CheckpointAmbiguous, match=r"__1_0\.distcp") as caught:
        unmanaged_checkpoints(nodes)[0].save(NEEDED)
    assert set(caught.value.file_by_node) == {"a", "b"}
    nodes = [holding("a", METADATA, r0=shard(100)), holding("b", UnmanagedFile(500, 8, 1000.0), r1=shard(200))]
    with pytest.raises(CheckpointAmbiguous, match="metadata"):
        unmanaged_checkpoints(nodes)[0].metadata()
    equal = [holding("a", METADATA, r0=shard(100)), holding("b", METADATA, r0=shard(100), r1=shard(200))]
    assert unmanaged_checkpoints(equal)[0].save(NEEDED).missing == ()


def test_shards_written_after_their_metadata_are_listed() -> None:
    """Shards that are newer than `.metadata` by more than clocks differ are listed, as after an interrupted save."""
    nodes = [holding("a", METADATA, r0=shard(100, 1, 1059.0), r1=shard(200, 1, 1061.0))]
    assert unmanaged_checkpoints(nodes)[0].save(NEEDED).written_later == ("__1_0.distcp",)


def test_the_newest_metadata_comes_first() -> None:
    """Checkpoints are sorted by the time of `.metadata`, those without it last. Ids with a manifest are left out."""
    nodes = [
        holding("a", UnmanagedFile(1, 1, 10.0), "old"),
        holding("a", UnmanagedFile(1, 1, 30.0), "new"),
        holding("b", None, "none", r0=shard(1)),
        holding("b", UnmanagedFile(1, 1, 99.0), "ours"),
    ]
    assert [found.checkpoint_id for found in unmanaged_checkpoints(nodes, {"ours"})] == ["new", "old", "none"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"checkpoint_id": "../x"},
        {"shards": {"x": {}}},
        {"metadata": {"size_bytes": -1}},
        {"metadata": 3},
        {"metadata": {"size_bytes": 1, "print_crc32c": 1, "modified_unix_s": -1.0}},
    ],
)
def test_a_listing_is_validated(wrong: dict[str, object]) -> None:
    """A peer's listing decodes unchanged, or is refused."""
    good = holding("a", METADATA, r0=shard(100))
    assert UnmanagedHolding.from_json(good.to_json()) == good
    with pytest.raises((ValueError, KeyError, TypeError)):
        UnmanagedHolding.from_json({**good.to_json(), **wrong})
