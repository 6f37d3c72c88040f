"""Cached layouts with wrapping storage writers, user planners, a bucket and threads."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from benchmarks import planning_world as synthetic
from benchmarks.planning_world import FakeNodes, World
from replicated_ckpt import ReplicatedWriter
from replicated_ckpt.core.manifest import decode_manifest
from replicated_ckpt.core.upkeep.upload_plan import UploadPlan
from replicated_ckpt.dcp.agreement.decision import decide
from replicated_ckpt.dcp.metadata import saved_metadata
from replicated_ckpt.dcp.metadata.metadata import decode_metadata
from replicated_ckpt.dcp.metadata.saved_metadata import SavedMetadata, broadcast_outcome
from replicated_ckpt.dcp.planning.cached_layouts import CachedLayout, CachedLayouts, PlannerData, ShardResults
from replicated_ckpt.dcp.runtime.torch_private import StorageInfo
from replicated_ckpt.dcp.save.commit import commit_save
from replicated_ckpt.stores.local.store import LocalStore

FIRST, SECOND = "1" * 32, "2" * 32


def results_of(count: int, offset: int = 0) -> list[WriteResult]:
    return [
        WriteResult(MetadataIndex(f"item {n}"), 8, StorageInfo("__1_0.distcp", offset + 8 * n, 8)) for n in range(count)
    ]


def refer_again(layouts: CachedLayouts) -> ShardResults:
    """The results of another rank's second save, equal to the first: pickled, they are a digest."""
    layouts.refer(results_of(3), FIRST, "")
    again = layouts.refer(results_of(3), SECOND, FIRST)
    assert len(pickle.dumps(again)) < 256
    return again


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy])
def test_a_copy_of_results_has_the_results(make: Any) -> None:
    """A wrapping storage writer copies a rank's results: the copy pickles with all results."""
    copied = make(refer_again(CachedLayouts()))
    assert list(copied) == results_of(3)
    assert pickle.loads(pickle.dumps(copied)) == results_of(3)


def test_results_that_a_wrapper_replaces_are_kept() -> None:
    """A result that a wrapping storage writer replaces reaches the coordinator, and the layout is not cached."""
    layouts, moved = CachedLayouts(), results_of(1, offset=64)[0]
    first = layouts.refer(results_of(3), FIRST, "")
    layouts.keep(CachedLayout.of(FIRST, "step-1", Metadata({}, storage_data={}), [first], b""))
    again = layouts.refer(results_of(3), SECOND, FIRST)
    again[0] = moved
    arrived = pickle.loads(pickle.dumps(again))
    assert list(arrived) == [moved, *results_of(3)[1:]]
    assert layouts.find_layout(Metadata({}, storage_data={}), [arrived]) is None
    layouts.keep(CachedLayout.of(SECOND, "step-2", Metadata({}, storage_data={}), [arrived], b""))
    assert layouts.save_id == ""


def test_exchanged_paths_are_different_planner_data() -> None:
    """Planner data in which two names exchange their paths is not the same."""
    one, other = ("a", "x"), ("b", "y")
    kept = PlannerData({"first": one, "second": other})
    assert kept.is_same({"first": one, "second": other})
    assert not kept.is_same({"second": one, "first": other})


@pytest.mark.parametrize("own_prefix", [False, True])
def test_nodes_reuse_the_metadata_of_a_cached_layout(tmp_path: Path, own_prefix: bool) -> None:
    """The second save of a layout reuses the nodes' metadata, unless the bucket's part names the save.

    Either way the bucket's metadata is about as small as that of the first save.
    """
    world, layouts, sizes, asked = World(8, 64, ranks_per_node=1), CachedLayouts(), [], []
    for save_id in (FIRST, SECOND):
        decision = replace(decide(synthetic.posts(world), 1, save_id), upload=UploadPlan("s3://b/p", own_prefix))
        planner = DefaultSavePlanner()
        planner.set_up_planner({}, is_coordinator=True)
        plans, metadata = planner.create_global_plan([pickle.loads(pickle.dumps(p)) for p in synthetic.plans(world)])
        results = [CachedLayouts().refer(own, save_id, "") for own in synthetic.results(plans)]
        receipts = synthetic.receipts(world, decision)
        nodes, store = FakeNodes(synthetic.held_by_node(receipts)), LocalStore(tmp_path)
        store.node_id()
        store.begin(decision.intent)
        config = ReplicatedWriter(tmp_path, copies=1).config
        commit_save(store, nodes, decision, config, receipts, metadata, results, layouts=layouts)
        manifest = decode_manifest(nodes.manifest, "here")
        assert manifest.upload is not None
        described = decode_metadata(manifest.bucket_metadata(nodes.metadata), "the bucket")
        assert described.state_dict_metadata == metadata.state_dict_metadata
        prefix = f"{save_id}/" if own_prefix else ""
        assert {info.relative_path.startswith(f"{prefix}__") for info in described.storage_data.values()} == {True}
        sizes.append(manifest.upload.metadata_bytes)
        asked.append(nodes.same is not None)
    assert asked == [False, not own_prefix]
    assert sizes[1] <= 1.02 * sizes[0]


@pytest.mark.parametrize("is_degraded", [False, True])
def test_a_caller_may_change_what_a_save_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_degraded: bool
) -> None:
    """A caller changes the returned metadata: the next save of that layout returns and writes the original values."""
    if is_degraded:  # a copy is late, so the ranks get the metadata itself
        monkeypatch.setattr(SavedMetadata, "of", lambda *_: None)
    writer, wanted = ReplicatedWriter(tmp_path, copies=1), []
    for number in range(3):
        state = {"x": torch.full((2,), float(number)), "y": torch.ones(3)}
        found = dcp.save(state, checkpoint_id=f"step-{number}", storage_writer=writer, no_dist=True)
        wanted.append({index.fqn: (info.relative_path, info.offset) for index, info in found.storage_data.items()})
        for info in found.storage_data.values():
            info.relative_path, info.offset = f"step-{number}/{info.relative_path}", info.offset + 1
    assert wanted[0] == wanted[1] == wanted[2]
    assert {path for path, _ in wanted[0].values()} == {"__0_0.distcp"}
    assert len({(tmp_path / f"step-{number}" / ".metadata").read_bytes() for number in range(3)}) == 1


class Remark:
    """Planner data of a user's class that no reader knows."""

    words = "kept"


class RemarkingPlanner(DefaultSavePlanner):
    """Stores a `Remark` in the metadata."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        return plans, replace(metadata, planner_data=Remark())


def test_planner_data_of_a_users_class_is_returned(tmp_path: Path) -> None:
    """Planner data of a user's class is returned by the save and sent to the ranks. A load would not decode the class
    by default.
    """
    writer = ReplicatedWriter(tmp_path, copies=1)
    planner = RemarkingPlanner(flatten_state_dict=False)
    found = dcp.save({"x": torch.ones(2)}, checkpoint_id="a", storage_writer=writer, planner=planner, no_dist=True)
    assert found.planner_data.words == "kept"
    told: list[Any] = []
    broadcast_outcome(
        lambda value: told.append(pickle.dumps(value)), found, writer.store, SavedMetadata.of("a", "f" * 32)
    )
    assert pickle.loads(told[0]).planner_data.words == "kept"


def test_two_threads_read_the_returned_metadata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads read the returned metadata at once: both get the entries."""
    dcp.save({"x": torch.ones(2)}, checkpoint_id="a", storage_writer=ReplicatedWriter(tmp_path, copies=1), no_dist=True)
    store, both, read = LocalStore(tmp_path), Barrier(2, timeout=10), saved_metadata._read_metadata

    def read_with_the_other(*save: Any) -> Metadata:
        both.wait()
        return read(*save)

    monkeypatch.setattr(saved_metadata, "_read_metadata", read_with_the_other)
    saved = SavedMetadata.of("a", store.catalog.manifest("a").save_id, store)
    with ThreadPoolExecutor(2) as threads:
        found = [threads.submit(lambda: list(saved.state_dict_metadata)) for _ in range(2)]
        assert [each.result() for each in found] == [["x"], ["x"]]
    assert pickle.loads(pickle.dumps(saved)) == saved
