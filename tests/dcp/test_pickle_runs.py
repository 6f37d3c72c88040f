"""What the scan of a pickle follows in one step comes to what it would come to opcode by opcode."""

import pickle
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from replicated_ckpt.dcp import pickle_scan
from replicated_ckpt.dcp.metadata import _known
from replicated_ckpt.dcp.metadata_sharing import share_parts
from replicated_ckpt.dcp.pickle_items import AnyItem, Item
from replicated_ckpt.dcp.pickle_runs import InstanceRuns
from replicated_ckpt.dcp.pickle_scan import _Scan
from replicated_ckpt.dcp.torch_private import StorageInfo
from replicated_ckpt.errors import MetadataUnsafe
from tests.dcp.test_pickle_scan import BOMBS, HOSTILE, METADATA, MODULE, name, pickled, text


class NoRuns(InstanceRuns):
    """Follows nothing."""

    def followed(self, cls: AnyItem, position: int) -> None:
        del cls, position


def outcome(raw: bytes, *, with_runs: bool) -> object:
    """Everything that the scan knows at the end, or that it refused."""
    done = _Scan(raw, _known)
    if not with_runs:
        done._runs = NoRuns(raw, done._memo, done._tuples)
    try:
        done.run()
    except (MetadataUnsafe, IndexError, ValueError, struct.error):
        return "refused"
    return done._hashed, [told(item) for item in done._memo], [told(item) for item in done._stack]


def told(item: AnyItem) -> tuple[object, ...]:
    """What the rules can see of an item; whether it may still be changed shows in what is refused."""
    is_plain, count = (item.is_plain, item.count) if isinstance(item, Item) else (item.is_plain, 0)
    return item.kind, item.weight, item.depth, item.making, is_plain, count


def example(*, is_shared: bool) -> bytes:
    """Instances of every form: long numbers, sizes of 0 to 4 dimensions, of equal parts, texts inline and shared."""
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


EXAMPLES = [example(is_shared=False), example(is_shared=True)]


@pytest.mark.parametrize("raw", EXAMPLES)
def test_most_of_it_is_followed_in_one_step(raw: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks, indices and places, but the first of each, in which their fields are named for the first time."""
    followed: list[bool] = []
    original = InstanceRuns.followed

    def counted(runs: InstanceRuns, cls: AnyItem, position: int) -> object:
        found = original(runs, cls, position)
        followed.append(found is not None)
        return found

    monkeypatch.setattr(InstanceRuns, "followed", counted)
    pickle_scan.scan(raw, _known)
    assert followed.count(True) >= 12
    assert outcome(raw, with_runs=True) == outcome(raw, with_runs=False) != "refused"


INSTANCE = b")\x81\x94}\x94("
FIELD = text("fqn") + b"\x94"
CLASS = name(MODULE, "MetadataIndex") + b"\x94"
SHORT_BOMBS = [raw for raw in BOMBS.values() if len(raw) < 100_000]
ALTERED: dict[str, bytes] = {
    "an instance in itself": pickled(CLASS + FIELD + b"0h\x00" + INSTANCE + b"h\x01h\x02ub"),
    "its state in itself": pickled(CLASS + FIELD + b"0h\x00" + INSTANCE + b"h\x01h\x03ub"),
    "a second state": pickled(CLASS + FIELD + b"0h\x00" + INSTANCE + b"h\x01Nub}b"),
    "a state for a shared instance": pickled(CLASS + FIELD + b"0h\x00" + INSTANCE + b"h\x01Nub0h\x02}b"),
    "more items for its state": pickled(CLASS + FIELD + b"0h\x00" + INSTANCE + b"h\x01Nub0h\x03NNs"),
    "a class for a value": pickled(CLASS + FIELD + b"0h\x00" + INSTANCE + b"h\x01h\x00ub"),
    "a class for a key": pickled(CLASS + FIELD + b"0h\x00" + INSTANCE + b"h\x00Nub"),
    "an instance of a text": pickled(CLASS + FIELD + b"0h\x01" + INSTANCE + b"h\x01Nub"),
    "an instance of an instance": pickled(CLASS + FIELD + b"0h\x00)\x81\x94h\x02" + INSTANCE + b"h\x01Nub"),
    "a size made of a class": pickled(CLASS + FIELD + b"0h\x00" + INSTANCE + b"h\x01h\x00K\x01\x85\x94\x85\x94R\x94ub"),
    "a long key, many times": pickled(
        CLASS + text("x" * 5000) + b"\x94" + (b"h\x00" + INSTANCE + b"h\x01Nub0") * 2_000 + b"N"
    ),
    "a later item": pickled(CLASS + FIELD + b"0h\x00" + INSTANCE + b"h\x01h\x09ub"),
}


@pytest.mark.parametrize("raw", [*ALTERED.values(), *HOSTILE.values(), *SHORT_BOMBS])
def test_hostile_bytes_are_judged_alike(raw: bytes) -> None:
    """What opcode by opcode is refused is refused, and nothing else."""
    assert outcome(raw, with_runs=True) == outcome(raw, with_runs=False)


def test_what_was_followed_cannot_be_changed_afterwards() -> None:
    """The states and items that would follow an instance are refused."""
    for kind in ("a second state", "a state for a shared instance", "more items for its state", "a class for a value"):
        assert outcome(ALTERED[kind], with_runs=True) == "refused", kind


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_changed_bytes_are_judged_alike(data: st.DataObject) -> None:
    """Random changes of a pickle full of instances lead to the same knowledge, or to a refusal, on both ways."""
    raw = bytearray(data.draw(st.sampled_from(EXAMPLES)))
    spliced = st.one_of(st.binary(max_size=4), st.sampled_from([b"h\x00", b"ub", b")", b"R", b"\x94", METADATA]))
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(raw) - 1))
        raw[position : position + data.draw(st.integers(0, 3))] = data.draw(spliced)
    assert outcome(bytes(raw), with_runs=True) == outcome(bytes(raw), with_runs=False)
