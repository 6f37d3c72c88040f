"""UnclaimedFiles: files without a manifest belong to the save that most of them match by their own checksums."""

import json
from dataclasses import replace

import pytest

from replicated_ckpt.core.integrity.checksum import size_with_footer
from replicated_ckpt.core.inventory import Holding, saves_found
from replicated_ckpt.core.layout import MANIFEST_NAME, METADATA_NAME
from replicated_ckpt.core.manifest import Manifest, NodeEntry, ShardEntry
from replicated_ckpt.core.upkeep.unclaimed_files import (
    UnclaimedFiles,
    note_lost_manifests,
    recognize,
    with_unclaimed_files,
)

SHARDS = ("__0_0.distcp", "__1_0.distcp", "__2_0.distcp")


def manifest(number: int, *crcs: int, metadata_crc: int = 9) -> Manifest:
    shards = {name: ShardEntry(100, crc, 0, "a", ("a",)) for name, crc in zip(SHARDS, crcs, strict=False)}
    nodes = (NodeEntry("a", "host", None, (0,)),)
    return Manifest(f"{number:032x}", "step-1", number, 0.0, 1, 2, 8, metadata_crc, nodes, shards, lineage="c" * 16)


def unclaimed(*crcs: int | None, metadata_crc: int | None = None, size: int = 100) -> UnclaimedFiles:
    files = dict(zip(SHARDS, crcs, strict=False))
    sizes = dict.fromkeys(files, size) | ({} if metadata_crc is None else {METADATA_NAME: 8})
    told = {name: crc for name, crc in files.items() if crc is not None}
    return UnclaimedFiles(
        "b", "step-1", True, sizes, told | ({} if metadata_crc is None else {METADATA_NAME: metadata_crc})
    )


OLD, NEW = manifest(1, 11, 12, 13), manifest(2, 11, 22, 23)
"""Two saves with the same metadata and one equal shard, like a partly frozen model."""


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (unclaimed(11, 12, 13, metadata_crc=9), OLD),
        (unclaimed(11, 22, 23, metadata_crc=9), NEW),
        (unclaimed(11, None, 13), OLD),
        (unclaimed(11, None, None, metadata_crc=9), NEW),
        (unclaimed(66, None, 23), NEW),
        (unclaimed(metadata_crc=9), NEW),
        (unclaimed(None, None), NEW),
        (unclaimed(66, 67, metadata_crc=9), None),
        (unclaimed(66), None),
        (unclaimed(12, None, metadata_crc=9), OLD),
    ],
    ids=[
        "old",
        "new",
        "no footer",
        "common shard and metadata",
        "one stale",
        "metadata",
        "no checksums",
        "unknown shards",
        "unknown shard",
        "swapped",
    ],
)
def test_shards_decide_then_metadata_then_the_order(found: UnclaimedFiles, expected: Manifest | None) -> None:
    """Matching shards decide, then metadata, which saves often share, then the order of the saves.

    A shard with the bytes of another shard's name counts for the save that has those bytes under that name.
    """
    assert recognize(found, [NEW, OLD]) == expected
    assert recognize(found, []) is None


def test_as_a_holding_only_what_matches_is_intact() -> None:
    """A file whose footer contradicts the save is left out. A file without a readable footer counts as damaged."""
    found = unclaimed(11, 12, None, metadata_crc=8)
    as_new = found.holding(NEW)
    assert (as_new.has_metadata, set(as_new.sizes), as_new.damaged) == (False, {SHARDS[0], SHARDS[2]}, (SHARDS[2],))
    assert (as_new.save_id, as_new.sequence, as_new.lineage) == (NEW.save_id, 2, NEW.lineage)
    cut = unclaimed(11, size=99).holding(NEW)
    assert cut.sizes == {}, "an intact footer in a file of another size belongs to another file"
    assert unclaimed(None, size=99).holding(NEW).damaged == (SHARDS[0],)


def test_a_load_counts_what_matches_for_every_save() -> None:
    """Matching files are added to a save as holdings. Files of another id or save add nothing."""
    (save,) = saves_found([Holding("a", "step-1", NEW.save_id, 2, True, {SHARDS[0]: 100}, lineage=NEW.lineage)])
    more = with_unclaimed_files(
        save, NEW, [unclaimed(66, 22), replace(unclaimed(11), checkpoint_id="step-2"), unclaimed(66)]
    )
    assert [(holding.node_id, dict(holding.sizes)) for holding in more.holdings[1:]] == [("b", {SHARDS[1]: 100})]


STOCK_BYTES = 40
WITH_FOOTERS = replace(
    OLD, shards={name: replace(entry, size_bytes=size_with_footer(STOCK_BYTES)) for name, entry in OLD.shards.items()}
)


def of_stock(size: int, metadata_crc: int | None = None) -> UnclaimedFiles:
    """One shard as stock torch writes it, without a footer and so without a checksum."""
    return replace(unclaimed(None, metadata_crc=metadata_crc, size=size), is_ours=False)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (of_stock(STOCK_BYTES), True),
        (of_stock(STOCK_BYTES, metadata_crc=9), True),
        (of_stock(STOCK_BYTES, metadata_crc=8), False),
        (of_stock(STOCK_BYTES + 1), False),
        (replace(of_stock(STOCK_BYTES), is_ours=True), False),
        (replace(of_stock(STOCK_BYTES), sizes={"__7_0.distcp": STOCK_BYTES}), False),
        (replace(of_stock(STOCK_BYTES), sizes={SHARDS[0]: 3, SHARDS[1]: STOCK_BYTES}), True),
    ],
    ids=[
        "length",
        "metadata, too",
        "other metadata",
        "other length",
        "own files",
        "no shard of the save",
        "one of two",
    ],
)
def test_files_without_footers_may_be_of_a_save(found: UnclaimedFiles, expected: bool) -> None:
    """Files without footers may belong to a save if their length fits and nothing contradicts. Reads compare their
    bytes later.
    """
    assert found.may_be_of(WITH_FOOTERS) is expected


def test_the_metadata_alone_makes_a_holding_for_a_load() -> None:
    """A node with matching `.metadata` but no manifest is a source of it. A node without a matching file adds nothing."""
    (save,) = saves_found([Holding("a", "step-1", NEW.save_id, 2, True, {SHARDS[0]: 100}, lineage=NEW.lineage)])
    more = with_unclaimed_files(save, NEW, [unclaimed(metadata_crc=9), unclaimed(metadata_crc=8)])
    assert [(holding.has_metadata, dict(holding.sizes)) for holding in more.holdings[1:]] == [(True, {})]


def test_only_own_files_count_as_a_lost_manifest() -> None:
    """Only this package's files count as a lost manifest, because stock torch writes none."""
    damaged: dict[str, str] = {}
    said = note_lost_manifests([of_stock(STOCK_BYTES), replace(unclaimed(11), checkpoint_id="step-2")], damaged)
    assert damaged == {"step-2": MANIFEST_NAME}
    assert said == ["node b: its manifest of 'step-2' is damaged or missing"]


def test_unclaimed_files_decode_unchanged() -> None:
    """UnclaimedFiles decode from JSON unchanged. Invalid fields, or other files than a checkpoint's, are refused."""
    found = unclaimed(11, None, metadata_crc=9)
    assert UnclaimedFiles.from_json(json.loads(json.dumps(found.to_json()))) == found
    alone = UnclaimedFiles.from_json({**found.to_json(), "crcs": {**found.crcs, SHARDS[2]: 7}})
    assert alone == found, "a checksum without a file is dropped"
    mixed = {"sizes": {SHARDS[0]: 100, "node.json": 1}}
    for changes in (
        {"checkpoint_id": "../x"},
        mixed,
        {"sizes": {"node.json": 1}},
        {"sizes": {SHARDS[0]: "x"}},
        {"crcs": 5},
    ):
        with pytest.raises((ValueError, TypeError)):
            UnclaimedFiles.from_json({**found.to_json(), **changes})
