"""Retention of one process with a real agent and an S3 server: nodes and bucket each follow their own policy."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

from replicated_ckpt import ReplicatedReader, ReplicatedWriter, Retention
from replicated_ckpt.agent.state.endpoint import read_endpoint
from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.cli.main import main
from replicated_ckpt.core.manifest import UploadEntry
from replicated_ckpt.core.upkeep.policy import Policy
from replicated_ckpt.errors import ConfigInvalid
from replicated_ckpt.node.saves.service import NodeService
from replicated_ckpt.node.uploads.bucket_retention import retire_in_bucket
from replicated_ckpt.stores.bucket.bucket import Bucket, BucketSave
from replicated_ckpt.stores.bucket_client.opening import open_client
from replicated_ckpt.stores.bucket_client.url import ObjectTarget
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.peer.client import AgentClient
from tests.agent.agents import stop_agent, wait_for
from tests.agent.checkpoints import METADATA, checkpointed
from tests.marks import mark_long
from tests.object_tier.test_one_node import assert_loads, contents, save

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
ONE, TWO, ALL = Retention(keep_last=1), Retention(keep_last=2), Retention(keep_last=99)


def bucket_of(where: Mapping[str, Any]) -> Bucket:
    return Bucket(open_client(ObjectTarget.check_supported(where["object_store"], where["storage_options"])))


def in_bucket(where: Mapping[str, Any]) -> set[str]:
    return {saved.checkpoint_id for saved in bucket_of(where).saves()}


def on_node(root: Path) -> set[str]:
    return {str(path.parent.relative_to(root)) for path in root.rglob(".metadata") if ".trash" not in path.parts}


def wait_until_on_node(root: Path, wanted: set[str]) -> None:
    wait_for(lambda: on_node(root) == wanted, 20, f"{wanted} on the node, not {on_node(root)}")


def ask(root: Path, method: str, path: str) -> dict[str, Any]:
    endpoint = read_endpoint(root / ".agent")
    assert endpoint is not None
    with AgentClient(endpoint.local_address()) as client:
        return client.call(method, path)


def test_each_tier_keeps_what_its_policy_says(root: Path, where: Mapping[str, Any]) -> None:
    """The node keeps the newest and every third checkpoint, the bucket the newest two. All of them load, also with
    stock torch.
    """
    kept = Retention(keep_last=1, keep_every=3)
    writer = ReplicatedWriter(root, retention=kept, object_retention=TWO, **where)
    for number in range(1, 6):
        save(writer, f"step-{number}", number)
        writer.wait()
    wait_for(lambda: in_bucket(where) == {"step-4", "step-5"}, 20, "two in the bucket")
    wait_until_on_node(root, {"step-3", "step-5"})
    client = bucket_of(where).client
    assert set(client.list_keys("").directories) == {"step-4", "step-5"}
    for number in (3, 4, 5):
        assert_loads(ReplicatedReader(root, **where), f"step-{number}", number)
    assert_loads(FsspecReader(f"{where['object_store']}/step-4", **where["storage_options"]), None, 4)
    log = (root / ".agent" / "log").read_text()
    assert f"from {where['object_store']}: its sequence 1 is below 2, the lowest of the newest 2" in log
    assert "testsecret" not in log
    assert json.loads((root / ".agent" / "uploads.json").read_text())["begun"] == []


def bucket_column(root: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """`ls`'s column of the bucket by checkpoint. Without `--object-store`, `ls` reads it from the agents."""
    capsys.readouterr()
    assert main(["ls", "--root", str(root), "--start-agents", "-o", "json"]) == ExitCode.OK
    return {row["checkpoint_id"]: row["bucket"] for row in json.loads(capsys.readouterr().out)["checkpoints"]}


def test_ls_reports_that_retention_removed_a_checkpoint_from_the_bucket(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After retention removed a checkpoint from the bucket, `ls` reports `not there`, also from a new agent. For a lost
    file it does not suggest the bucket.
    """
    url = f"file://{tmp_path}/bucket"
    writer = ReplicatedWriter(root, retention=ALL, object_retention=ONE, object_store=url)
    for number in (1, 2):
        save(writer, f"step-{number}", number)
        writer.wait()
    wanted = {"step-2": "there", "step-1": "not there"}
    wait_for(lambda: bucket_column(root, capsys) == wanted, 20, "the removal in the column of the bucket")
    stop_agent(root)
    wait_for(lambda: bucket_column(root, capsys) == wanted, 20, "the same column from the next agent")
    (root / "step-1" / "__0_0.distcp").unlink()
    assert main(["ls", "--root", str(root)]) == ExitCode.OK
    assert "next step for step-1: load an older checkpoint" in capsys.readouterr().out
    assert main(["verify", "step-2", "--root", str(root)]) == ExitCode.OK


def test_verify_names_other_saves_in_a_restored_bucket(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bucket is restored to an older state: `verify` names the saves that only the nodes have, and `upload` uploads
    them again.
    """
    bucket, url = tmp_path / "bucket", f"file://{tmp_path}/bucket"
    writer = ReplicatedWriter(root, overwrite=True, object_store=url)
    for number in (1, 2):
        save(writer, f"step-{number}", number)
    writer.wait()
    shutil.copytree(bucket, tmp_path / "older")
    save(writer, "step-2", 3)
    save(writer, "step-3", 3)
    writer.wait()
    verify = ["verify", "--root", str(root), "--object-store", url]
    assert main(verify) == ExitCode.OK
    assert "another save" not in capsys.readouterr().out
    shutil.rmtree(bucket)
    (tmp_path / "older").rename(bucket)
    assert main(verify) == ExitCode.OK
    said = capsys.readouterr().out
    assert f"on the nodes, but not in {url}: step-3" in said
    assert f"{url} has another save than the nodes' newest one: step-2" in said
    for checkpoint_id in ("step-2", "step-3"):
        assert main(["upload", checkpoint_id, "--root", str(root)]) == ExitCode.OK
    assert_loads(ReplicatedReader(object_store=url), "step-2", 3)


@pytest.mark.long
def test_what_retention_removed_from_the_bucket_is_not_uploaded_again(root: Path, where: Mapping[str, Any]) -> None:
    """After retention removed a checkpoint from the bucket, a new agent of a node with a copy does not upload it again.

    Shards of such a checkpoint from an interrupted upload are removed from the bucket.
    """
    writer = ReplicatedWriter(root, retention=ALL, object_retention=ONE, **where)
    for number in (1, 2, 3):
        save(writer, f"step-{number}", number)
        writer.wait()
    wait_for(lambda: in_bucket(where) == {"step-3"}, 20, "one in the bucket")
    stop_agent(root)
    bucket_of(where).client.put("step-1/__0_0.distcp", (root / "step-1" / "__0_0.distcp").read_bytes())
    save(writer, "step-4", 4)
    writer.wait()

    def is_settled() -> bool:
        uploads = ask(root, "GET", "/v1/status")["object_store"]
        return not uploads["pending"] and uploads["done"] == 4

    wait_for(is_settled, 20, "all uploads settled")
    assert in_bucket(where) == {"step-4"}
    assert bucket_of(where).client.list_keys("").directories == ("step-4",)
    assert "would remove 'step-1'" in (root / ".agent" / "log").read_text()
    assert on_node(root) == {f"step-{number}" for number in (1, 2, 3, 4)}
    writer = ReplicatedWriter(root, retention=ONE, object_retention=ONE, **where)
    save(writer, "step-5", 5)
    writer.wait()
    wait_until_on_node(root, {"step-5"})


def test_other_checkpoints_are_not_touched(root: Path, where: Mapping[str, Any]) -> None:
    """Retention neither counts nor removes stock torch's checkpoints, nor those of another directory, in either tier."""
    url, options = where["object_store"], where["storage_options"]
    dcp.save(contents(7), storage_writer=FsspecWriter(f"{url}/theirs", **options))
    dcp.save(contents(8), storage_writer=dcp.FileSystemWriter(root / "theirs"))
    save(ReplicatedWriter(root, **where), "other/step-1", 1)
    writer = ReplicatedWriter(root, retention=ONE, object_retention=ONE, **where)
    for number in (2, 3):
        save(writer, f"step-{number}", number)
        writer.wait()
    wait_for(
        lambda: in_bucket(where) == {"theirs", "other/step-1", "step-3"}, 20, "the remaining checkpoints in the bucket"
    )
    wait_until_on_node(root, {"theirs", "other/step-1", "step-3"})


def test_a_removal_cut_short_leaves_no_checkpoint(root: Path, where: Mapping[str, Any]) -> None:
    """A removal deletes the mark first: after a crash no reader finds the checkpoint, and its id can be saved again."""
    writer = ReplicatedWriter(root, **where)
    save(writer, "step-1", 1)
    save(writer, "step-2", 2)
    writer.wait()
    bucket = bucket_of(where)
    saved = bucket.save_of("step-1")
    assert saved is not None

    class Cut(Exception):
        pass

    deleted: list[str] = []
    delete = bucket.client.delete

    def delete_once(keys: Any) -> None:
        if deleted:
            raise Cut
        deleted.extend(keys)
        delete(keys)

    bucket.client.delete = delete_once  # type: ignore[method-assign]
    with pytest.raises(Cut):
        bucket.remove(saved)
    assert deleted == ["step-1/.metadata"]
    assert in_bucket(where) == {"step-2"}
    assert_loads(ReplicatedReader(**where), "latest", 2)
    shutil.rmtree(root / "step-1")
    save(writer, "step-1", 3)
    writer.wait()
    assert_loads(ReplicatedReader(**where), "latest", 3)


def test_a_save_that_commits_while_retention_examines_the_previous_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An overwrite commits while retention examines the older save: retention does not remove the new one."""
    (tmp_path / "bucket").mkdir()
    bucket, store = bucket_of({"object_store": f"file://{tmp_path}/bucket", "storage_options": None}), tmp_path / "node"
    first = checkpointed([LocalStore(store)], 1, {}, copies=1)
    newest = replace(first, checkpoint_id="step-2", save_id="2" * 32, sequence=2)
    late = replace(first, save_id="3" * 32, sequence=3, upload=UploadEntry("x://y", True, len(METADATA), 0))
    for manifest in (first, newest):
        bucket.commit(manifest, manifest.encode(), METADATA)
    service = NodeService(LocalStore(store))
    service.policies.learn([Policy("", bucket.client.target.url, 3, ONE)])
    look = bucket.manifest_raw

    def look_slowly(save: BucketSave) -> bytes:
        raw = look(save)
        monkeypatch.setattr(bucket, "manifest_raw", look)  # a commit also reads the manifest
        bucket.commit(late, late.encode(), METADATA)
        return raw

    monkeypatch.setattr(bucket, "manifest_raw", look_slowly)
    retire_in_bucket(service, bucket, newest)
    assert {save.save_id for save in bucket.saves()} == {newest.save_id, late.save_id}


@pytest.mark.long
def test_a_run_without_a_policy_ends_the_previous_policy(root: Path) -> None:
    """The next run on the same root sets no policy: the same agent removes nothing any more."""
    writer = ReplicatedWriter(root, retention=ONE)
    for number in (1, 2):
        save(writer, f"step-{number}", number)
    wait_until_on_node(root, {"step-2"})
    writer = ReplicatedWriter(root)
    for number in (3, 4):
        save(writer, f"step-{number}", number)
    rounds = ask(root, "GET", "/v1/status")["protection"]["rounds"]
    wait_for(lambda: ask(root, "GET", "/v1/status")["protection"]["rounds"] > rounds, 30, "the next round")
    assert on_node(root) == {"step-2", "step-3", "step-4"}


def test_no_policy_starts_no_agent(root: Path) -> None:
    """A save of one process without a policy and without a bucket starts no agent."""
    save(ReplicatedWriter(root), "step-1", 1)
    assert not (root / ".agent" / "endpoint.json").exists()


@pytest.mark.long
def test_the_policy_applies_to_a_bucket_in_memory(root: Path) -> None:
    """The bucket's policy also applies to a `memory://` bucket, to which the saving process uploads."""
    where = {"object_store": f"memory://{uuid4().hex}/x", "storage_options": None}
    writer = ReplicatedWriter(root, object_retention=ONE, **where)  # type: ignore[arg-type]
    for number in (1, 2):
        save(writer, f"step-{number}", number)
        writer.wait()
    assert in_bucket(where) == {"step-2"}


@pytest.mark.parametrize(
    "wrong",
    [{"retention": 3}, {"object_retention": ONE}, {"retention": {"keep_last": 1}}],
    ids=str,
)
def test_a_policy_that_cannot_work_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    """Making a writer with an invalid policy raises ConfigInvalid."""
    with pytest.raises(ConfigInvalid):
        ReplicatedWriter(tmp_path, **wrong)


@pytest.mark.parametrize("tier", mark_long(["nodes", "bucket"], keep=["nodes"]))
def test_a_policy_that_can_remove_nothing_is_reported_at_the_first_save(
    root: Path, where: Mapping[str, Any], recwarn: pytest.WarningsRecorder, tier: str
) -> None:
    """A policy removes nothing if each step has its own directory. The first save of a writer warns once, and proposes
    a name that the policy counts.
    """
    policy: dict[str, Any] = {"retention": ONE} if tier == "nodes" else {"object_retention": ONE, **where}
    writer = ReplicatedWriter(root, copies=1, **policy)

    def take_warnings() -> list[str]:
        warned = [str(each.message) for each in recwarn if "counts the checkpoints" in str(each.message)]
        recwarn.clear()
        return warned

    dcp.save(contents(0), checkpoint_id="run/step_1/model", storage_writer=writer)
    (warned,) = take_warnings()
    assert "'run/step_1/model'" in warned
    assert "'run-model/step_1'" in warned
    for number, name in enumerate(("run/step_2/model", "run-model/step_1", "run-model/step_2", "run-model/final"), 1):
        dcp.save(contents(number), checkpoint_id=name, storage_writer=writer)
    writer.wait()
    kept = {"run/step_1/model", "run/step_2/model", "run-model/final"}
    wait_for(
        lambda: (on_node(root) if tier == "nodes" else in_bucket(where)) == kept,
        20,
        "the checkpoints that the policy keeps",
    )
    other = ReplicatedWriter(root, copies=1, **policy)
    for name in ("run-3/step-1", "run-3/final"):
        dcp.save(contents(5), checkpoint_id=name, storage_writer=other)
    dcp.save(contents(6), checkpoint_id="run/step_3/model", storage_writer=ReplicatedWriter(root, copies=1))
    assert take_warnings() == []
    assert main(["verify", "--root", str(root)]) == ExitCode.OK
