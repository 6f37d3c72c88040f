"""Locations of items, read from a pickle's opcodes: the same as from torch's unpickling, without running a hostile
pickle.
"""

import contextlib
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from replicated_ckpt.core.reading.unmanaged_files import item_ranges, needed_bytes
from replicated_ckpt.core.reading.windows import ByteRange
from replicated_ckpt.dcp.runtime.torch_private import StorageInfo
from replicated_ckpt.errors import MetadataUnsafe

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch")


def metadata(places: dict[str, tuple[Any, Any, Any]]) -> Metadata:
    return Metadata({}, None, {MetadataIndex(name): StorageInfo(*place) for name, place in places.items()})


PLACES = {"a": ("__0_0.distcp", 0, 10), "b": ("__3_1.distcp", 7, 9), "c": ("__0_0.distcp", 70_000, 1 << 40)}
RAW = pickle.dumps(metadata(PLACES))


def expected(found: Metadata) -> dict[str, list[ByteRange]]:
    ranges: dict[str, list[ByteRange]] = {}
    for info in (found.storage_data or {}).values():
        ranges.setdefault(info.relative_path, []).append(ByteRange(info.offset, info.length))
    return {shard: sorted(items, key=lambda item: item.offset) for shard, items in ranges.items()}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_is_followed(protocol: int) -> None:
    """Shards, offsets and lengths of any size are read from each pickle protocol."""
    found = item_ranges(pickle.dumps(metadata(PLACES), protocol))
    assert {shard: list(items) for shard, items in found.items()} == expected(metadata(PLACES))
    assert needed_bytes(found) == {"__0_0.distcp": 70_000 + (1 << 40), "__3_1.distcp": 16}


def test_metadata_of_stock_torch_is_read(tmp_path: Path) -> None:
    """For a real `.metadata` of nested tensors and objects, the locations equal those from torch's unpickling."""
    state = {"model": {str(n): torch.ones(n, 3) for n in range(40)}, "step": 3, "list": [torch.zeros(2), {"lr": 0.1}]}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path, thread_count=3))
    raw = (tmp_path / ".metadata").read_bytes()
    found = item_ranges(raw)
    assert {shard: list(items) for shard, items in found.items()} == expected(pickle.loads(raw))
    assert needed_bytes(found) == {path.name: path.stat().st_size for path in tmp_path.glob("*.distcp")}


@pytest.mark.parametrize(
    "place",
    [
        ("../x", 0, 1),
        ("__0_0.distcp/../x", 0, 1),
        ("/etc/passwd", 0, 1),
        ("__0_0.distcp", -1, 1),
        ("__0_0.distcp", 0, None),
    ],
)
def test_a_place_outside_a_shard_is_refused(place: tuple[Any, Any, Any]) -> None:
    """Other files and invalid ranges are refused."""
    with pytest.raises(MetadataUnsafe):
        item_ranges(pickle.dumps(metadata({"a": place})))


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_a_hostile_pickle_runs_nothing(tmp_path: Path) -> None:
    """A pickle that would create a file when loaded creates none."""
    hostile = metadata(PLACES)
    hostile.planner_data = Bomb(tmp_path / "made")
    assert set(item_ranges(pickle.dumps(hostile))) == {"__0_0.distcp", "__3_1.distcp"}
    with pytest.raises(MetadataUnsafe):
        item_ranges(pickle.dumps(Bomb(tmp_path / "made")))
    assert not (tmp_path / "made").exists()
    pickle.loads(pickle.dumps(hostile))
    assert (tmp_path / "made").exists(), "the bomb works when it is loaded"


@pytest.mark.timeout(30)
def test_shared_parts_are_examined_once() -> None:
    """A location with 100,000 fields that is referenced 5,000 times is examined once."""
    info = StorageInfo("__0_0.distcp", 0, 1)
    info.__dict__.update({f"field{n}": n for n in range(100_000)})
    places: dict[Any, Any] = dict.fromkeys((MetadataIndex(str(n)) for n in range(5_000)), info)
    with pytest.raises(MetadataUnsafe):
        item_ranges(pickle.dumps(Metadata({}, None, places)))


@given(st.integers(0, len(RAW) - 1), st.integers(1, 255), st.integers(0, len(RAW) - 1))
def test_a_damaged_pickle_is_an_error(position: int, change: int, length: int) -> None:
    """A changed byte gives locations in shards or MetadataUnsafe. A truncated pickle raises MetadataUnsafe."""
    raw = bytearray(RAW)
    raw[position] ^= change
    with contextlib.suppress(MetadataUnsafe):
        item_ranges(bytes(raw))
    with pytest.raises(MetadataUnsafe):
        item_ranges(RAW[:length])


def test_numbers_too_long_to_be_places_are_refused() -> None:
    """An offset of 100,000 bits is refused."""
    buffer = io.BytesIO()
    pickle.Pickler(buffer, 4).dump(metadata({"a": ("__0_0.distcp", 1 << 100_000, 1)}))
    with pytest.raises(MetadataUnsafe):
        item_ranges(buffer.getvalue())
