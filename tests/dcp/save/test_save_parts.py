"""Which file each item of a rank is written to, and the metadata of a checkpoint without its optimizer."""

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem

from replicated_ckpt.core.parts import Part
from replicated_ckpt.dcp.metadata.metadata import decode_metadata, encode_metadata
from replicated_ckpt.dcp.runtime.torch_private import StorageInfo
from replicated_ckpt.dcp.save.shard_files import OWN_FILE_BYTES_MIN, Parts, without_optimizer
from replicated_ckpt.errors import ConfigInvalid

LARGE = OWN_FILE_BYTES_MIN // 4


def items_of(sizes: dict[str, int]) -> list[WriteItem]:
    """Items with this number of 4-byte elements. A size of 0 makes an object."""
    state = {name: torch.zeros(size) if size else b"object" for name, size in sizes.items()}
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    return planner.create_local_plan().items


def divided(parts: Parts, sizes: dict[str, int], *, own_apart: bool = False) -> dict[Part, set[str]]:
    found = parts.divide(items_of(sizes), own_apart=own_apart)
    return {part: {item.index.fqn for item in items} for part, items in found.items()}


def test_each_large_part_has_a_file() -> None:
    """Each large part has a file of its own, in the order of the parts. Small parts are in the file of the weights."""
    sizes = {"optim.a": LARGE, "model.a": 1, "loader.a": LARGE, "step": 0}
    found = divided(Parts(), sizes)
    assert found == {Part.WEIGHTS: {"model.a"}, Part.OPTIMIZER: {"optim.a"}, Part.REST: {"loader.a", "step"}}
    assert list(found) == [Part.WEIGHTS, Part.OPTIMIZER, Part.REST]
    small = {**sizes, "optim.a": LARGE - 1, "loader.a": 5}
    assert divided(Parts(), small) == {Part.WEIGHTS: set(small)}


def test_a_state_without_weights_still_has_its_first_file() -> None:
    """Without entries known as weights, the other entries take the place of the weights. An optimizer alone keeps its
    own file number.
    """
    assert divided(Parts(), {"a": LARGE, "b": 1}) == {Part.WEIGHTS: {"a", "b"}}
    assert divided(Parts(), {"a": 1, "optim.a": LARGE}) == {Part.WEIGHTS: {"a"}, Part.OPTIMIZER: {"optim.a"}}
    assert divided(Parts(), {"optim.a": 1}) == {Part.OPTIMIZER: {"optim.a"}}
    assert divided(Parts(), {}) == {}


def test_a_ranks_own_items_are_apart_where_others_copy_its_files() -> None:
    """With `own_apart`, a rank's own items and rank 0's value beside them have a file of their own. Other large items
    do not.
    """
    sizes = {"model.a": 1, "loader.a": LARGE, "own.rank-0-of-4": 0, "x.rank.rank-0-of-4": 0, "x.first": 0, "y.first": 0}
    apart = {"own.rank-0-of-4", "x.rank.rank-0-of-4", "x.first"}
    assert divided(Parts(), sizes, own_apart=True) == {Part.WEIGHTS: sizes.keys() - apart, Part.REST: apart}
    assert Part.REST in divided(Parts(), {**sizes, "loader.b": LARGE})
    differing = Parts(may_differ=("*running_mean",))
    sizes = {"a": LARGE, "bn.running_mean": 1}
    assert divided(differing, sizes, own_apart=True) == {Part.WEIGHTS: {"a"}, Part.REST: {"bn.running_mean"}}
    assert divided(differing, sizes) == {Part.WEIGHTS: sizes.keys()}


def test_part_of_alone_determines_the_parts() -> None:
    """The user's `part_of` alone determines the parts. Its result is checked."""
    parts = Parts(lambda fqn: "optimizer" if fqn.startswith("state") else "weights")
    assert divided(parts, {"state.a": LARGE, "optim.a": 1}) == {Part.WEIGHTS: {"optim.a"}, Part.OPTIMIZER: {"state.a"}}
    with pytest.raises(ConfigInvalid, match=r"part_of\('a'\) returned 'model'"):
        divided(Parts(lambda _: "model"), {"a": 1})  # type: ignore[arg-type, return-value]


def test_a_cached_plan_is_divided_once() -> None:
    """The same list of items is divided once."""
    asked: list[str] = []
    parts = Parts(lambda fqn: asked.append(fqn) or "weights")  # type: ignore[func-returns-value]
    items = items_of({"a": 1, "b": 1})
    assert parts.divide(items) is parts.divide(items)
    assert sorted(asked) == ["a", "b"]


def metadata_of(files: dict[str, str]) -> Metadata:
    kind = TensorStorageMetadata(TensorProperties(), torch.Size([1]), [])
    places = {MetadataIndex(fqn): StorageInfo(path, 0, 1) for fqn, path in files.items()}
    return Metadata(dict.fromkeys(files, kind), {fqn: tuple(fqn.split(".")) for fqn in files}, places)


def test_the_metadata_without_the_optimizer() -> None:
    """The metadata without the optimizer also omits optimizer entries that are in the file of the weights."""
    whole = metadata_of(
        {"model.a": "__0_0.distcp", "optim.a": "__0_1.distcp", "optim.b": "__0_0.distcp", "x": "__1_2.distcp"}
    )
    kept, dropped = without_optimizer(whole, Parts()) or (None, ())
    assert kept is not None
    assert dropped == ("optim",)
    read = decode_metadata(encode_metadata(kept), "test")
    assert read.state_dict_metadata.keys() == {"model.a", "x"} == read.planner_data.keys()
    assert {index.fqn for index in read.storage_data} == {"model.a", "x"}
    assert whole.state_dict_metadata.keys() == whole.planner_data.keys() > {"optim.a", "optim.b"}


@pytest.mark.parametrize(
    "files",
    [{"model.a": "__0_0.distcp"}, {"optim.a": "__0_1.distcp"}, {"optim.a": "__0_1.distcp", "optim.b": "__0_0.distcp"}],
)
def test_without_weights_or_a_droppable_file_nothing_is_dropped(files: dict[str, str]) -> None:
    assert without_optimizer(metadata_of(files), Parts()) is None
