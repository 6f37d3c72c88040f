"""The columns at the end of `.metadata` contain the same as its pickle, are used only with a valid checksum, and are
optional.
"""

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
    """Regular tensors of several dimensions and of none, and one entry of each kind that columns cannot represent."""
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
    """The same bytes with a matching checksum, as an attacker would compute it."""
    return raw[:8] + struct.pack("<I", crc32c(raw[16:])) + raw[12:]


def test_columns_equal_the_metadata() -> None:
    """Decoded columns equal the metadata in every field. `storage_data` accepts the same indexes as the dictionary,
    with any hint, and copies are plain dictionaries.
    """
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


def test_changes_of_decoded_places_are_kept() -> None:
    """Adding and removing entries of decoded `storage_data` has the same result as with a dictionary."""
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


def test_changed_chunks_do_not_change_the_places() -> None:
    """`storage_data` looks up entries by offset: sorting, adding, removing or moving chunks of the tensors does not
    change it.
    """
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


def test_places_behave_like_a_dictionary() -> None:
    """Assigning during iteration, changing values in place, merging, copying and popping work as with stock's
    dictionary.
    """
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
def test_attributes_that_a_planner_adds_are_kept(what: str) -> None:
    """A tensor whose chunk or storage info has an extra attribute is pickled, as columns cannot represent the
    attribute.
    """
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
def test_numbers_beyond_64_bits_have_no_columns(length: int) -> None:
    """Metadata with a number beyond 64 bits, or without a regular tensor, has no columns."""
    wanted = metadata()
    wanted.storage_data[MetadataIndex("last", [0])] = StorageInfo("__0_0.distcp", 0, length)
    assert encode_columns(wanted, *OF) is None
    assert encode_columns(Metadata({"object": BytesStorageMetadata()}, {}, {}), *OF) is None


def test_damaged_or_other_columns_are_refused() -> None:
    """A changed byte, a wrong length, and the columns of another pickle raise ColumnsInvalid."""
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


def test_forged_columns_are_refused_or_decode_to_shards() -> None:
    """Any number at any place of columns with a valid checksum raises an error of the package, or decodes to places
    within shards.
    """
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
    """A load and the returned metadata use the columns only. Stock torch reads the pickle before them."""
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
    """Small metadata has no columns, as reading them would take longer than the pickle."""
    save(tmp_path, 1)
    raw = (tmp_path / "step-1" / ".metadata").read_bytes()
    assert raw.endswith(b".")
    load(tmp_path, 1)


@pytest.mark.parametrize("offsets", [None, 5, object()])
def test_metadata_that_columns_cannot_represent_is_pickled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, offsets: Any
) -> None:
    """A user's planner has offsets that columns cannot represent: the metadata is pickled without columns, with a
    warning in the log.
    """
    monkeypatch.setattr(saved_metadata, "COLUMNS_FROM_BYTES", 0)
    described = metadata()
    entry: Any = described.state_dict_metadata["last"]
    for chunk in entry.chunks:
        chunk.offsets = offsets
    with caplog.at_level(logging.WARNING):
        assert encode_metadata_file(described) == encode_metadata(described)
    assert "has no columns" in caplog.text


@pytest.mark.parametrize("at", range(1, HEAD_BYTES))
def test_damaged_columns_are_ignored(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, at: int
) -> None:
    """The columns are cut or damaged at any byte: the metadata is read from the pickle."""
    monkeypatch.setattr(saved_metadata, "COLUMNS_FROM_BYTES", 0)
    wanted, raw = metadata(), encode_metadata_file(metadata())
    with caplog.at_level(logging.CRITICAL):
        for changed in (
            raw[:-at],
            raw[:-at] + bytes([raw[-at] ^ 1]) + raw[len(raw) - at + 1 :],
            raw[: -8 * at] + raw[-8:],
        ):
            assert decode_metadata_file(changed, "here") == wanted


def test_offsets_with_equal_hashes_are_refused() -> None:
    """Offsets with equal hashes, which an attacker can choose, raise MetadataUnsafe when they would be put into a
    dictionary.
    """
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
