"""A user puts a replaced version back under its name by hand, from a node that has less of it than this one has kept."""

import shutil
from pathlib import Path

import pytest

from replicated_ckpt.agent.repair.replaced import restore_replaced
from replicated_ckpt.agent.saves.service import NodeService
from replicated_ckpt.agent.settling.outlived import drop_outlived
from replicated_ckpt.core.manifest import Manifest
from replicated_ckpt.core.upkeep.repair import NodeView, Presence
from replicated_ckpt.stores.local.store import LocalStore
from tests.agent.checkpoints import findings
from tests.stores.local.test_order_of_commits import ELSEWHERE, HERE, read, replace_by_half


def put_back(tmp_path: Path) -> tuple[LocalStore, Manifest]:
    """`rm -r last; cp -r` of the older version from another node, which had not the second shard."""
    store, old, _ = replace_by_half(tmp_path)
    shutil.rmtree(tmp_path / "last")
    shutil.copytree(tmp_path / ".replaced" / old.save_id, tmp_path / "last")
    (tmp_path / "last" / ELSEWHERE).unlink()
    return store, old


def views_of(store: LocalStore) -> list[NodeView]:
    return [NodeView(store.node_id(), Presence.UP, store.catalog.holdings(store.node_id()))]


@pytest.mark.parametrize("has_manifest", [True, False], ids=["replaced", "staged-until-now"])
def test_the_shards_that_it_lacks_are_those_that_were_kept(tmp_path: Path, *, has_manifest: bool) -> None:
    """A part that was still staged, without a decision, is taken for what the save has replaced once that has its name."""
    store, old = put_back(tmp_path)
    kept = (tmp_path / ".replaced" / old.save_id / ELSEWHERE).read_bytes()
    if not has_manifest:
        (tmp_path / ".replaced" / old.save_id / ".manifest.json").unlink()
    assert restore_replaced(NodeService(store), {old.save_id: old}, ())
    assert (tmp_path / "last" / ELSEWHERE).read_bytes() == kept
    assert read(store, old, HERE)
    assert not (tmp_path / ".replaced" / old.save_id / ELSEWHERE).exists()


@pytest.mark.parametrize("is_whole", [True, False])
def test_what_was_kept_of_it_goes_once_it_is_seen_whole(tmp_path: Path, *, is_whole: bool) -> None:
    """Until then what lies there twice stays: either may be the one that is intact."""
    store, old = put_back(tmp_path)
    restore_replaced(NodeService(store), {old.save_id: old}, ())
    if not is_whole:
        (tmp_path / "last" / HERE).write_bytes(b"")
        (tmp_path / ".replaced" / old.save_id / HERE).write_bytes(b"")
    drop_outlived(NodeService(store), {old.save_id: old}, views_of(store))
    assert store.catalog.is_replaced(old.save_id) is not is_whole


def test_nothing_is_taken_from_another_version(tmp_path: Path) -> None:
    """The name is another save's: that is what replaced it."""
    store, old, new = replace_by_half(tmp_path)
    assert not restore_replaced(NodeService(store), {old.save_id: old, new.save_id: new}, ())
    assert set(store.catalog.shard_sizes("last")) == {HERE}
    assert set(store.catalog.shard_sizes(f".replaced/{old.save_id}")) == {HERE, ELSEWHERE}
    assert read(store, new, HERE)


@pytest.mark.parametrize("is_seen_before", [False, True], ids=["seen after", "seen before"])
def test_a_copy_that_was_cut_off_does_not_let_the_kept_files_go(tmp_path: Path, *, is_seen_before: bool) -> None:
    """The disk was full, or the command was killed: what lies in `.replaced` may be the last copy that is intact.

    Also where the copy began only after a look at the node, which had seen the version whole, in `.replaced`.
    """
    store, old, _ = replace_by_half(tmp_path)
    views = views_of(store)
    kept = tmp_path / ".replaced" / old.save_id
    whole = {name: (kept / name).read_bytes() for name in (HERE, ELSEWHERE, ".metadata")}
    shutil.rmtree(tmp_path / "last")
    shutil.copytree(kept, tmp_path / "last")
    (tmp_path / "last" / HERE).write_bytes(whole[HERE][:100])
    (tmp_path / "last" / ".metadata").unlink()
    service = NodeService(store)
    for done in (True, False):
        drop_outlived(service, {old.save_id: old}, views if is_seen_before else views_of(store), is_done=done)
    assert {name: (kept / name).read_bytes() for name in whole} == whole
    service.damage.mark("last", old.save_id, HERE)  # as each round of re-protection does, by its size
    assert restore_replaced(service, {old.save_id: old}, ())
    assert {name: (tmp_path / "last" / name).read_bytes() for name in whole} == whole
    drop_outlived(service, {old.save_id: old}, views_of(store))
    assert store.catalog.list_replaced() == []
    assert findings(store) == []
