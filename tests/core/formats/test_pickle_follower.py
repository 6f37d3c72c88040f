"""The follower of opcodes: its tree has the values of the pickle, and ambiguous pickles are refused."""

import pickle
import pickletools
import struct
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from replicated_ckpt.core.pickles.follower import _OPCODES, follow
from replicated_ckpt.core.pickles.instances import Instances
from replicated_ckpt.core.pickles.tree import (
    DEPTH_MAX,
    Fields,
    Made,
    Named,
    Pairs,
    PickleUnsafe,
    check_bounds,
    names_in,
)
from replicated_ckpt.dcp.metadata.metadata import decode_metadata, share_parts
from replicated_ckpt.dcp.runtime.torch_private import StorageInfo
from tests.fuzz.differences import refusal_of

FRAME = b"\x95"


def framed(*parts: bytes) -> bytes:
    """A pickle with each part in its own frame."""
    return b"\x80\x04" + b"".join(FRAME + struct.pack("<Q", len(part)) + part for part in parts)


def test_the_table_is_that_of_pickletools() -> None:
    """The length of every opcode's argument equals that in the standard library."""
    by_code = {ord(info.code): info for info in pickletools.opcodes}
    sized = {
        pickletools.TAKEN_FROM_ARGUMENT1: 1,
        pickletools.TAKEN_FROM_ARGUMENT4: 4,
        pickletools.TAKEN_FROM_ARGUMENT4U: 4,
        pickletools.TAKEN_FROM_ARGUMENT8U: 8,
    }
    for code, ours in _OPCODES.items():
        argument = by_code[code].arg
        if argument is None:
            assert (ours.width, ours.is_sized) == (0, False), by_code[code].name
        elif argument.n == pickletools.UP_TO_NEWLINE:
            assert by_code[code].name == "GLOBAL"
        else:
            wanted = (argument.n, False) if argument.n > 0 else (sized[argument.n], True)
            assert (ours.width, ours.is_sized) == wanted, by_code[code].name


def test_a_tree_has_the_values_of_the_pickle() -> None:
    """Plain values are returned, and names, calls and states are described, but not executed."""
    value = {"a": [1, (2.5, None, True, b"x")], "b": {"c": frozenset({1})}}
    assert follow(pickle.dumps(value, 4)) == ["a", [1, (2.5, None, True, b"x")], "b", ["c", (1,)]]
    made = follow(pickle.dumps(MetadataIndex("w", torch.Size([3]), 1)))
    assert isinstance(made, Made)
    assert made.called.path == "torch.distributed.checkpoint.metadata.MetadataIndex"
    assert made.is_new
    (size,) = [part for part in made.state if isinstance(part, Made)]
    assert (size.called.path, size.arguments, size.is_new) == ("torch.Size", ((3,),), False)


def test_a_shared_part_is_one_node() -> None:
    """A shared part is one object in the tree."""
    part = [1, 2]
    first, second = follow(pickle.dumps([part, part]))
    assert first is second


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (framed(b"J\0\0\0") + b"\0.", "beyond its end or its frame"),
        (framed(b"\x8c\x03a") + b"bc.", "beyond its end or its frame"),
        (framed(b"cbuiltins\nse") + b"t\n.", "not a complete pickle"),
        (framed(b"]\x94(h") + b"\0e.", "beyond its end or its frame"),
        (framed(b"K") + b"\0.", "beyond its end or its frame"),
        (framed(FRAME + struct.pack("<Q", 1) + b"N."), "frame inside a frame"),
        (b"\x80\x04" + FRAME + struct.pack("<Q", 9) + FRAME + struct.pack("<Q", 0) + b"N.", "frame inside a frame"),
        (framed(b"N"), "not a complete pickle"),
        (b"\x80\x04N", "breaks off"),
        (b"\x80\x04(N.", "does not end with one value"),
        (b"\x80\x04](Na.", "not a complete pickle"),
        (b"\x80\x04]N(a.", "not a complete pickle"),
        (b"\x80\x04}\x94(h\x00h\x00u.", "changes an object after its use"),
        (b"\x80\x04c\n\n.", "something that is not text as a name"),
    ],
)
def test_ambiguous_pickles_are_refused(raw: bytes, said: str) -> None:
    """Arguments across frames, nested frames, unbalanced marks and self-containing containers are refused."""
    with pytest.raises(PickleUnsafe, match=said):
        follow(raw)


def test_frames_of_any_size_are_followed() -> None:
    """Empty frames, frames of one opcode, and opcodes outside frames are read."""
    assert follow(framed(b"", b"]", b"(", b"NK\x01", b"", b"e") + b".") == [None, 1]


def example(*, is_shared: bool) -> bytes:
    """Metadata with every form of instance: long numbers, sizes of 0 to 4 dimensions, equal parts, inline and shared
    texts.
    """
    chunks = [ChunkStorageMetadata(torch.Size([1 << at] * at), torch.Size([1] * at)) for at in range(5)]
    square = torch.Size([64])
    chunks.append(ChunkStorageMetadata(square, square))
    places = {
        MetadataIndex(f"layer.{at}", torch.Size([at, at]), at): StorageInfo(f"__{at}_0.distcp", at << 31, 1 << at * 9)
        for at in range(6)
    } | {MetadataIndex("step", None, None): StorageInfo("__0_0.distcp", 1, 2)}
    tensor = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([8]), chunks)
    metadata = Metadata({f"layer.{at}": tensor for at in range(3)}, None, places)
    if is_shared:
        share_parts(metadata)
    return pickle.dumps(metadata, 4)


@pytest.mark.parametrize("is_shared", [True, False])
def test_most_of_metadata_is_followed_in_one_step(monkeypatch: pytest.MonkeyPatch, *, is_shared: bool) -> None:
    """All chunks, indices and locations but the first of each, which defines their field names, are read in one step."""
    followed: list[bool] = []
    original = Instances.follow

    def count(instances: Instances, cls: Named, position: int, limit: int) -> Any:
        found = original(instances, cls, position, limit)
        followed.append(found is not None)
        return found

    monkeypatch.setattr(Instances, "follow", count)
    follow(example(is_shared=is_shared))
    assert followed.count(True) >= 12


@pytest.mark.parametrize("name", ["Дub", "слой.Дub.вес", "\u0494" * 30, "Ä" * 62, "x" * 126, "x" * 127, ""])
def test_a_name_may_have_the_byte_that_ends_a_text(name: str) -> None:
    """A name with any bytes gives the same tree in one step and in single steps, and decodes to what was saved."""
    places = {
        MetadataIndex(f"{at}{name}", torch.Size([1 << 40, at]), at): StorageInfo(f"__{at}_0.distcp", at << 40, 1)
        for at in range(4)
    }
    raw = pickle.dumps(Metadata({}, None, places), 4)
    assert "Metadata" in str(refusal_of(raw)), "refused for its classes, and not as a difference between the readers"
    assert decode_metadata(raw, "here").storage_data == places


def test_a_text_ends_where_its_length_says() -> None:
    """A text that contains the opcodes of its end is refused: its length field decides."""
    raw = pickle.dumps([MetadataIndex("first", None, 1), MetadataIndex("abc_ube.", None, 1)], 4)
    assert refusal_of(raw.replace(b"abc_ube.", b"abc\x94ube.")) is not None


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        (pickle.dumps([[[0] * 300] * 300] * 300), "repeats its parts"),
        (b"\x80\x04" + b")" + b"\x85" * DEPTH_MAX + b".", "nested"),
        (pickle.dumps({"a": {"__reduce_ex__": 1}}), "controls picklers"),
    ],
)
def test_trees_beyond_bounds_are_refused(tree: bytes, said: str) -> None:
    """Trees with too many repeated parts, too much depth, or attributes that control picklers are refused."""
    found = follow(tree)
    with pytest.raises(PickleUnsafe, match=said):
        check_bounds(found, len(tree))


def test_usual_trees_are_within_bounds() -> None:
    """Large lists, and rows that are shared a thousand times, are accepted."""
    for value in (list(range(1_000_00)), [[0] * 100] * 1_000, {"a": [{"b": (1,)}] * 9}):
        raw = pickle.dumps(value)
        check_bounds(follow(raw), len(raw))


def test_every_name_in_a_tree_is_found() -> None:
    """`names_in` finds the names in arguments, states, keys and contents."""
    raw = pickle.dumps({torch.float32: [MetadataIndex("w", torch.Size([1]))]})
    assert {name.name for name in names_in(follow(raw))} == {"float32", "MetadataIndex", "Size"}


def test_fields_equal_pairs() -> None:
    """An instance that is read in one step has the same attributes as in single steps."""
    quick = follow(pickle.dumps([MetadataIndex("a", None, 1), MetadataIndex("b", None, 2)]))
    assert type(quick[0].state) is Pairs
    assert type(quick[1].state) is Fields
    assert dict(zip(quick[0].state[::2], quick[0].state[1::2], strict=True)) == {"fqn": "a", "index": 1}
    assert quick[1].state == {"fqn": "b", "index": 2}
