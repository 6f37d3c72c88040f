"""The parts of a checkpoint by names of entries and files, and the manifest without its optimizer."""

from dataclasses import replace

import pytest

from replicated_ckpt.core.manifest import (
    Manifest,
    NodeEntry,
    ShardEntry,
    UploadEntry,
    WeightsEntry,
    decode_manifest,
)
from replicated_ckpt.core.parts import PREFIXES_MAX, Part, is_dropped, part_of_entry, part_of_shard, prefixes_of
from replicated_ckpt.errors import ManifestInvalid

WHOLE, WEIGHTS, BUCKET, BUCKET_WEIGHTS = b"whole", b"some", b"in the bucket", b"its"


@pytest.mark.parametrize(
    ("fqn", "part"),
    [
        ("model.layers.0.weight", Part.WEIGHTS),
        ("state_dict.weight", Part.WEIGHTS),
        ("app.model.weight", Part.WEIGHTS),
        ("model.optimizer.weight", Part.WEIGHTS),
        ("optim.state.weight.exp_avg", Part.OPTIMIZER),
        ("optimizer_0.state.0.step", Part.OPTIMIZER),
        ("optimizers.param_groups", Part.OPTIMIZER),
        ("app.optim_state.weight.exp_avg", Part.OPTIMIZER),
        ("layers.0.optimizer", Part.REST),
        ("weight", Part.REST),
        ("rank.rank-0-of-4", Part.REST),
    ],
)
def test_each_entry_has_a_part(fqn: str, part: Part) -> None:
    assert part_of_entry(fqn) is part


def test_the_number_in_a_shards_name_gives_its_part() -> None:
    parts = [part_of_shard(f"__4_{number}.distcp") for number in range(8)]
    assert parts == [Part.WEIGHTS, Part.OPTIMIZER, Part.REST, Part.UNCHANGED] * 2
    with pytest.raises(ValueError, match="not the name of a shard"):
        part_of_shard(".metadata")


def test_prefixes_of_dropped_entries() -> None:
    kept = ["app.model.weight", "step"]
    assert prefixes_of(["optim.a.b", "optim.c", "app.optim.a"], kept) == ("app.optim", "optim")
    assert prefixes_of(["app"], kept) == ("app",)
    many = [f"app.other{number}" for number in range(PREFIXES_MAX + 1)]
    assert prefixes_of(many, kept) == ("app",)
    assert is_dropped("app.optim.state.new", ("app.optim", "optim"))
    assert not is_dropped("app.model.new", ("app.optim", "optim"))
    assert not is_dropped("optimum", ("app.optim", "optim"))


def _full(*, has_own_prefix: bool) -> Manifest:
    raw = WHOLE + WEIGHTS + (BUCKET + BUCKET_WEIGHTS if has_own_prefix else b"")
    entry, node = ShardEntry(100, 1, 0, "node", ("node",)), NodeEntry("node", "host", None, (0,))
    there = len(BUCKET + BUCKET_WEIGHTS) if has_own_prefix else len(raw)
    weights = WeightsEntry(len(WEIGHTS), 7, len(BUCKET_WEIGHTS) if has_own_prefix else 0, 8, ("optimizer",))
    shards = {"__0_0.distcp": entry, "__0_1.distcp": entry, "__0_2.distcp": entry}
    upload = UploadEntry("s3://bucket", has_own_prefix, there, 9 if has_own_prefix else 5)
    return Manifest("a" * 32, "step-1", 1, 1.0, 1, 1, len(raw), 5, (node,), shards, upload, weights=weights)


@pytest.mark.parametrize("has_own_prefix", [False, True])
def test_a_slim_manifest_follows_from_the_full_one(*, has_own_prefix: bool) -> None:
    full = decode_manifest(_full(has_own_prefix=has_own_prefix).encode(), "test")
    raw = WHOLE + WEIGHTS + (BUCKET + BUCKET_WEIGHTS if has_own_prefix else b"")
    assert full.local_metadata(raw) == WHOLE
    assert full.bucket_metadata(raw) == (BUCKET + BUCKET_WEIGHTS if has_own_prefix else raw)
    assert full.read_bucket_metadata(full.bucket_metadata(raw)) == (BUCKET if has_own_prefix else WHOLE)
    slim = decode_manifest(full.slimmed().encode(), "test")
    assert slim == full.slimmed()
    assert slim.is_slim
    assert not full.is_slim
    assert list(slim.shards) == ["__0_0.distcp", "__0_2.distcp"]
    kept = full.slim_metadata(raw)
    assert kept == WEIGHTS + (BUCKET_WEIGHTS if has_own_prefix else b"")
    assert len(kept) == slim.metadata_bytes
    assert slim.local_metadata(kept) == WEIGHTS
    assert slim.bucket_metadata(kept) == (BUCKET_WEIGHTS if has_own_prefix else WEIGHTS)
    assert slim.read_bucket_metadata(slim.bucket_metadata(kept)) == (BUCKET_WEIGHTS if has_own_prefix else WEIGHTS)


@pytest.mark.parametrize(
    "weights",
    [
        WeightsEntry(0, 7, 0, 0, ("optimizer",)),
        WeightsEntry(1 << 20, 7, 0, 0, ("optimizer",)),
        WeightsEntry(len(WEIGHTS), 7, 3, 0, ("optimizer",)),
        WeightsEntry(len(WEIGHTS), 7, 0, 0, ()),
    ],
)
def test_weights_that_cannot_be_a_part_are_refused(weights: WeightsEntry) -> None:
    forged = replace(_full(has_own_prefix=False), weights=weights)
    with pytest.raises(ManifestInvalid, match="weights"):
        decode_manifest(forged.encode(), "test")


def test_an_optimizer_alone_is_not_slimmed() -> None:
    full = _full(has_own_prefix=False)
    forged = replace(full, shards={"__0_1.distcp": full.shards["__0_1.distcp"]})
    with pytest.raises(ManifestInvalid, match="weights"):
        decode_manifest(forged.encode(), "test")
