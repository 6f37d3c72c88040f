"""The columns of a `.metadata` say what its pickle says, are not believed without their checksum, and none needs them."""

import copy
import logging
import pickle
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from replicated_ckpt import ReplicatedReader, ReplicatedWriter
from replicated_ckpt.core.integrity.checksum import crc32c
from replicated_ckpt.dcp.metadata import saved_metadata
from replicated_ckpt.dcp.metadata.columns import ColumnsInvalid, decode_columns, encode_columns
from replicated_ckpt.dcp.metadata.metadata import decode_metadata, encode_metadata
from replicated_ckpt.dcp.metadata.saved_metadata import decode_metadata_file, encode_metadata_file
from replicated_ckpt.dcp.runtime.torch_private import StorageInfo
from replicated_ckpt.errors import MetadataUnsafe, ReplicatedCkptError

pytestmark = [pytest.mark.filterwarnings("ignore:torch.distributed"), pytest.mark.filterwarnings("ignore::UserWarning")]
OF = (1000, 0xC0FFEE)
HEAD_BYTES = 72


def tensor(*chunks: tuple[list[int], list[int]], size: list[int]) -> TensorStorageMetadata:
    found = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in chunks]
    return TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size(size), found)


def metadata() -> Metadata:
    """Regular tensors, of several dimensions and of none; and each kind of entry that no columns can say."""
    entries: dict[str, Any] = {
        "rows": tensor(([0, 0], [2, 3]), ([2, 0], [2, 3]), size=[4, 3]),
        "scalar": tensor(([], []), size=[]),
        "object": BytesStorageMetadata(),
        "two places": tensor(([0], [4]), size=[4]),
        "no place": tensor(([0], [4]), ([4], [4]), size=[8]),
        "same chunk": tensor(([0], [4]), ([0], [4]), size=[4]),
        "none": tensor(size=[0]),
        "last": tensor(([5], [1]), ([0], [5]), size=[6]),
    }
    places = {
        MetadataIndex(name, chunk.offsets): StorageInfo(f"__{number}_0.distcp", 64 * number, 10 + number)
        for number, (name, chunk) in enumerate(
            (name, chunk) for name, entry in entries.items() for chunk in getattr(entry, "chunks", [])
        )
    }
    places[MetadataIndex("object")] = StorageInfo("__0_0.distcp", 4096, 7)
    places[MetadataIndex("two places", torch.Size([9]))] = StorageInfo("__0_0.distcp", 8192, 7)
    del places[MetadataIndex("no place", torch.Size([4]))]
    return Metadata(entries, {name: ("state", name) for name in entries}, places)


def encoded() -> bytes:
    raw = encode_columns(metadata(), *OF)
    assert raw is not None
    return raw


def resealed(raw: bytes) -> bytes:
    """With a checksum that matches, as only who chose the bytes would have it."""
    return raw[:8] + struct.pack("<I", crc32c(raw[16:])) + raw[12:]


def test_columns_say_what_the_metadata_says() -> None:
    """Every field, with the places as a dictionary has them: by any index, with and without its hint; and copied."""
    wanted, found = metadata(), decode_columns(encoded(), *OF, "here")
    assert found.storage_data == wanted.storage_data
    assert len(found.storage_data) == len(wanted.storage_data)
    assert found == Metadata(wanted.state_dict_metadata, wanted.planner_data, found.storage_data)
    assert list(found.state_dict_metadata) == list(wanted.state_dict_metadata)
    for hint in (None, 0, 1, 5, -1):
        index = MetadataIndex("last", [0], hint)
        assert found.storage_data[index] == wanted.storage_data[index]
    for name, offset in (("last", [1]), ("last", None), ("rows", [0]), ("no place", [4]), ("nothing", [0])):
        assert found.storage_data.get(MetadataIndex(name, offset)) is None
    for copied in (pickle.loads(pickle.dumps(found)), copy.deepcopy(found)):
        assert type(copied.storage_data) is dict
        assert copied == wanted


def test_what_is_changed_stays_changed() -> None:
    """A program that puts places in, or takes them out, finds what it would find in a dictionary."""
    wanted, found = metadata(), decode_columns(encoded(), *OF, "here")
    taken, kept = list(wanted.storage_data)[:2]
    more = MetadataIndex("more", torch.Size([0]), 0)
    for places in (wanted.storage_data, found.storage_data):
        del places[taken]
        places[kept] = places[more] = StorageInfo("__9_0.distcp", 1, 2)
        with pytest.raises(KeyError):
            places.pop(taken)
    assert len(found.storage_data) == len(wanted.storage_data)
    assert found.storage_data == wanted.storage_data
    assert pickle.loads(pickle.dumps(found)) == wanted


def test_chunks_that_a_planner_changes_move_no_place() -> None:
    """DCP's dictionary goes by offsets: sorted, added, emptied or moved chunks of the tensors change nothing in it."""
    changes: dict[str, Callable[[list[ChunkStorageMetadata]], object]] = {
        "sorted": lambda chunks: chunks.sort(key=lambda chunk: tuple(chunk.offsets), reverse=True),
        "added": lambda chunks: chunks.append(chunks[0]),
        "emptied": lambda chunks: chunks.clear(),
        "moved": lambda chunks: setattr(chunks[0], "offsets", torch.Size([77] * len(chunks[0].offsets))),
    }
    for change in changes.values():
        wanted, found = metadata(), decode_columns(encoded(), *OF, "here")
        change(cast("TensorStorageMetadata", found.state_dict_metadata["last"]).chunks)
        for index, info in wanted.storage_data.items():
            assert found.storage_data[MetadataIndex(index.fqn, index.offset, 0)] == info
        assert found.storage_data == wanted.storage_data


def test_places_are_used_as_a_dictionary_is() -> None:
    """Each of these is legal with stock's dictionary: put in anew while going through, changed in place, joined, copied."""
    one = MetadataIndex("last", torch.Size([0]), 0)
    more = {MetadataIndex("more", torch.Size([0])): StorageInfo("__9_0.distcp", 1, 2)}
    wanted, found = metadata(), decode_columns(encoded(), *OF, "here")
    for places in (wanted.storage_data, found.storage_data):
        places[one].length += 1
        for index, info in places.items():
            places[index] = StorageInfo("moved/" + info.relative_path, info.offset, info.length)
        for info in places.values():
            info.offset += 1
        places.__ior__(more)
    assert found.storage_data == wanted.storage_data
    for merged in (found.storage_data.copy(), found.storage_data | more, more | found.storage_data):
        assert type(merged) is dict
        assert merged == wanted.storage_data
    assert found.storage_data.popitem() == wanted.storage_data.popitem()


@pytest.mark.parametrize("what", ["chunk", "info"])
def test_what_a_planner_added_to_chunks_or_places_is_kept(what: str) -> None:
    """Columns have no room for it, so that tensor is pickled."""
    made = metadata()
    place = made.storage_data[MetadataIndex("last", torch.Size([0]))]
    entry = cast("TensorStorageMetadata", made.state_dict_metadata["last"])
    vars(entry.chunks[0] if what == "chunk" else place)["mark"] = 7
    raw = encode_columns(made, *OF)
    assert raw is not None
    found = decode_columns(raw, *OF, "here")
    place = found.storage_data[MetadataIndex("last", torch.Size([0]))]
    entry = cast("TensorStorageMetadata", found.state_dict_metadata["last"])
    assert vars(entry.chunks[0] if what == "chunk" else place)["mark"] == 7
    assert found == made


@pytest.mark.parametrize("length", [1 << 63, 1 << 80])
def test_what_is_no_number_of_64_bits_has_no_columns(length: int) -> None:
    """Nor has what has no regular tensor at all."""
    wanted = metadata()
    wanted.storage_data[MetadataIndex("last", [0])] = StorageInfo("__0_0.distcp", 0, length)
    assert encode_columns(wanted, *OF) is None
    assert encode_columns(Metadata({"object": BytesStorageMetadata()}, {}, {}), *OF) is None


def test_damaged_or_other_columns_are_not_believed() -> None:
    """Each byte that counts, each length, and those of another pickle."""
    raw = encoded()
    for at in [at for at in range(0, len(raw), 3) if not 12 <= at < 16]:
        with pytest.raises(ColumnsInvalid):
            decode_columns(raw[:at] + bytes([raw[at] ^ 0x10]) + raw[at + 1 :], *OF, "here")
    for size in (0, 11, HEAD_BYTES - 1, HEAD_BYTES, len(raw) - 8, len(raw) - 1):
        with pytest.raises(ColumnsInvalid):
            decode_columns(
                resealed(raw[:size].ljust(min(size, 16), b"\0")) if size > HEAD_BYTES else raw[:size], *OF, ""
            )
    for other in ((OF[0] + 1, OF[1]), (OF[0], OF[1] + 1)):
        with pytest.raises(ColumnsInvalid, match="another"):
            decode_columns(raw, *other, "here")


def test_chosen_columns_are_refused_or_say_something() -> None:
    """Bytes that fit their checksum, with any number in any place: an error of ours, or metadata of shards."""
    raw, chance, refused = encoded(), random.Random(17), 0
    for _ in range(1500):
        at = chance.randrange(2, len(raw) // 8) * 8
        number = chance.choice([-1, 0, 1, 2, 7, 65, 1 << 31, 1 << 40, (1 << 63) - 1, chance.getrandbits(63)])
        try:
            found = decode_columns(resealed(raw[:at] + struct.pack("<q", number) + raw[at + 8 :]), *OF, "here")
        except (ColumnsInvalid, ReplicatedCkptError):
            refused += 1
            continue
        assert all(info.relative_path.endswith(".distcp") and info.offset >= 0 for info in found.storage_data.values())
    assert refused > 300


def state(count: int, value: int) -> dict[str, Any]:
    return {"text": "t", **{f"x{number}": torch.full((8,), value + number) for number in range(count)}}


def save(root: Path, step: int) -> Metadata:
    writer = ReplicatedWriter(root)
    found: Metadata = dcp.save(state(5, step), checkpoint_id=f"step-{step}", storage_writer=writer, no_dist=True)
    return found


def load(root: Path, step: int) -> None:
    found = state(5, 0)
    dcp.load(found, checkpoint_id=f"step-{step}", storage_reader=ReplicatedReader(root), no_dist=True)
    assert_is(found, step)


def assert_is(found: dict[str, Any], step: int) -> None:
    assert all(torch.equal(found[name], wanted) for name, wanted in state(5, step).items() if name != "text")


def test_a_large_metadata_is_read_by_its_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the first load, and for what `dcp.save` returned: the pickle before them is for stock torch."""
    monkeypatch.setattr(saved_metadata, "COLUMNS_FROM_BYTES", 0)
    save(tmp_path, 1)
    found = save(tmp_path, 2)
    raw = (tmp_path / "step-2" / ".metadata").read_bytes()
    with monkeypatch.context() as patch:
        patch.delattr(saved_metadata, "decode_metadata")
        load(tmp_path, 1)
        load(tmp_path, 2)
        assert len(found.storage_data) == 6
    assert pickle.loads(raw) == decode_metadata_file(raw, "here") == decode_metadata(raw, "here")
    stock = state(5, 0)
    dcp.load(stock, storage_reader=dcp.FileSystemReader(tmp_path / "step-1"), no_dist=True)
    assert_is(stock, 1)


def test_a_small_metadata_has_no_columns(tmp_path: Path) -> None:
    """It would take longer to look for them."""
    save(tmp_path, 1)
    raw = (tmp_path / "step-1" / ".metadata").read_bytes()
    assert raw.endswith(b".")
    load(tmp_path, 1)


@pytest.mark.parametrize("offsets", [None, 5, object()])
def test_what_columns_cannot_say_is_pickled_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, offsets: Any
) -> None:
    """A planner of one's own may describe chunks in its own way: that costs no save."""
    monkeypatch.setattr(saved_metadata, "COLUMNS_FROM_BYTES", 0)
    described = metadata()
    entry: Any = described.state_dict_metadata["last"]
    for chunk in entry.chunks:
        chunk.offsets = offsets
    with caplog.at_level(logging.WARNING):
        assert encode_metadata_file(described) == encode_metadata(described)
    assert "has no columns" in caplog.text


@pytest.mark.parametrize("at", range(1, HEAD_BYTES))
def test_an_end_that_is_no_end_of_columns_is_not_looked_at(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, at: int
) -> None:
    """Whatever the bytes behind the pickle are, and wherever they are cut, it is read by itself."""
    monkeypatch.setattr(saved_metadata, "COLUMNS_FROM_BYTES", 0)
    wanted, raw = metadata(), encode_metadata_file(metadata())
    with caplog.at_level(logging.CRITICAL):
        for changed in (
            raw[:-at],
            raw[:-at] + bytes([raw[-at] ^ 1]) + raw[len(raw) - at + 1 :],
            raw[: -8 * at] + raw[-8:],
        ):
            assert decode_metadata_file(changed, "here") == wanted


def test_offsets_that_hash_alike_make_no_load_slow() -> None:
    """Their hash is the same in every process, so who writes a checkpoint can choose them."""
    like = [[2**61 - 1 + 1 if number >> bit & 1 else 1 for bit in range(7)] for number in range(2**7)]
    assert len({hash(torch.Size(offset)) for offset in like}) == 1
    chunks = tensor(*((offset, [1] * 7) for offset in like), size=[2**62] * 7)
    places = {MetadataIndex("x", offset): StorageInfo("__0_0.distcp", number, 1) for number, offset in enumerate(like)}
    raw = encode_columns(Metadata({"x": chunks}, {}, places), *OF)
    assert raw is not None
    found = decode_columns(raw, *OF, "here").storage_data
    assert found[MetadataIndex("x", like[5], 5)].offset == 5
    with pytest.raises(MetadataUnsafe, match="hash alike"):
        found[MetadataIndex("x", like[5])]
    with pytest.raises(MetadataUnsafe, match="hash alike"):
        found.pop(MetadataIndex("x", like[5]))
    with pytest.raises(MetadataUnsafe, match="hash alike"):
        pickle.dumps(found)
