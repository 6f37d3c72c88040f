"""Retention as one process uses it, with a real agent and an S3 server: each tier keeps what its own policy says."""

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


def becomes(root: Path, wanted: set[str]) -> None:
    wait_for(lambda: on_node(root) == wanted, 20, f"{wanted} on the node, not {on_node(root)}")


def ask(root: Path, method: str, path: str) -> dict[str, Any]:
    endpoint = read_endpoint(root / ".agent")
    assert endpoint is not None
    with AgentClient(endpoint.local_address()) as client:
        return client.call(method, path)


def test_each_tier_keeps_what_its_policy_says(root: Path, where: Mapping[str, Any]) -> None:
    """The node the newest and every third, the bucket the newest two; all of it loads, stock torch included."""
    kept = Retention(keep_last=1, keep_every=3)
    writer = ReplicatedWriter(root, retention=kept, object_retention=TWO, **where)
    for number in range(1, 6):
        save(writer, f"step-{number}", number)
        writer.wait()
    wait_for(lambda: in_bucket(where) == {"step-4", "step-5"}, 20, "two in the bucket")
    becomes(root, {"step-3", "step-5"})
    client = bucket_of(where).client
    assert set(client.list_keys("").directories) == {"step-4", "step-5"}
    for number in (3, 4, 5):
        assert_loads(ReplicatedReader(root, **where), f"step-{number}", number)
    assert_loads(FsspecReader(f"{where['object_store']}/step-4", **where["storage_options"]), None, 4)
    log = (root / ".agent" / "log").read_text()
    assert f"from {where['object_store']}: its sequence 1 is below 2, the lowest of the newest 2" in log
    assert "testsecret" not in log
    assert json.loads((root / ".agent" / "uploads.json").read_text())["begun"] == []


def columns_of(root: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """By checkpoint, what `ls` says of the bucket, of which it knows by the agents alone."""
    capsys.readouterr()
    assert main(["ls", "--root", str(root), "--start-agents", "-o", "json"]) == ExitCode.OK
    return {row["checkpoint_id"]: row["bucket"] for row in json.loads(capsys.readouterr().out)["checkpoints"]}


def test_ls_says_that_the_bucket_has_given_a_checkpoint_up(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the agent that has removed it there, and by one that starts anew: no step names the bucket for a lost file."""
    url = f"file://{tmp_path}/bucket"
    writer = ReplicatedWriter(root, retention=ALL, object_retention=ONE, object_store=url)
    for number in (1, 2):
        save(writer, f"step-{number}", number)
        writer.wait()
    wanted = {"step-2": "there", "step-1": "not there"}
    wait_for(lambda: columns_of(root, capsys) == wanted, 20, "what the agent has removed")
    stop_agent(root)
    wait_for(lambda: columns_of(root, capsys) == wanted, 20, "what the next agent has found")
    (root / "step-1" / "__0_0.distcp").unlink()
    assert main(["ls", "--root", str(root)]) == ExitCode.OK
    assert "next step for step-1: load an older checkpoint" in capsys.readouterr().out
    assert main(["verify", "step-2", "--root", str(root)]) == ExitCode.OK


def test_verify_names_what_an_older_bucket_has_as_another_save(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bucket was put back to before a save was replaced: the newer one is on the nodes alone."""
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
def test_what_the_bucket_gave_up_is_not_brought_again(root: Path, where: Mapping[str, Any]) -> None:
    """The node has it still, and its agent, started anew, knows nothing of having uploaded it.

    Nor does what an upload had brought of it stay there, that an outage had cut off.
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
    becomes(root, {"step-5"})


def test_what_others_wrote_is_not_touched(root: Path, where: Mapping[str, Any]) -> None:
    """Stock torch's checkpoints neither count nor go, in either tier; nor do those of another run's directory."""
    url, options = where["object_store"], where["storage_options"]
    dcp.save(contents(7), storage_writer=FsspecWriter(f"{url}/theirs", **options))
    dcp.save(contents(8), storage_writer=dcp.FileSystemWriter(root / "theirs"))
    save(ReplicatedWriter(root, **where), "other/step-1", 1)
    writer = ReplicatedWriter(root, retention=ONE, object_retention=ONE, **where)
    for number in (2, 3):
        save(writer, f"step-{number}", number)
        writer.wait()
    wait_for(lambda: in_bucket(where) == {"theirs", "other/step-1", "step-3"}, 20, "the others")
    becomes(root, {"theirs", "other/step-1", "step-3"})


def test_a_removal_cut_short_leaves_no_checkpoint(root: Path, where: Mapping[str, Any]) -> None:
    """The mark goes first: what a crash leaves of it is seen by nobody, and the id is free."""
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


def test_a_save_that_comes_while_the_one_before_is_judged_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its mark went with the one that was looked at, though `wait` had said that it is there."""
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
        monkeypatch.setattr(bucket, "manifest_raw", look)  # a commit looks, too
        bucket.commit(late, late.encode(), METADATA)
        return raw

    monkeypatch.setattr(bucket, "manifest_raw", look_slowly)
    retire_in_bucket(service, bucket, newest)
    assert {save.save_id for save in bucket.saves()} == {newest.save_id, late.save_id}


@pytest.mark.long
def test_a_run_without_a_policy_takes_it_back(root: Path) -> None:
    """The next run on the same root passes none: nothing is removed any more, though the agent lived on."""
    writer = ReplicatedWriter(root, retention=ONE)
    for number in (1, 2):
        save(writer, f"step-{number}", number)
    becomes(root, {"step-2"})
    writer = ReplicatedWriter(root)
    for number in (3, 4):
        save(writer, f"step-{number}", number)
    rounds = ask(root, "GET", "/v1/status")["protection"]["rounds"]
    wait_for(lambda: ask(root, "GET", "/v1/status")["protection"]["rounds"] > rounds, 30, "a round")
    assert on_node(root) == {"step-2", "step-3", "step-4"}


def test_no_policy_starts_no_agent(root: Path) -> None:
    """One process without a policy and without a bucket needs none."""
    save(ReplicatedWriter(root), "step-1", 1)
    assert not (root / ".agent" / "endpoint.json").exists()


@pytest.mark.long
def test_a_bucket_in_memory_is_kept_short_too(root: Path) -> None:
    """Where the uploads are made by this very process."""
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
    """When the writer is made."""
    with pytest.raises(ConfigInvalid):
        ReplicatedWriter(tmp_path, **wrong)


@pytest.mark.parametrize("tier", mark_long(["nodes", "bucket"], keep=["nodes"]))
def test_a_policy_that_can_remove_nothing_is_told_at_the_first_save(
    root: Path, where: Mapping[str, Any], recwarn: pytest.WarningsRecorder, tier: str
) -> None:
    """A directory for each step fills the disk up. Once for a writer, with names by which the policy works."""
    policy: dict[str, Any] = {"retention": ONE} if tier == "nodes" else {"object_retention": ONE, **where}
    writer = ReplicatedWriter(root, copies=1, **policy)

    def tell() -> list[str]:
        told = [str(each.message) for each in recwarn if "counts the checkpoints" in str(each.message)]
        recwarn.clear()
        return told

    dcp.save(contents(0), checkpoint_id="run/step_1/model", storage_writer=writer)
    (told,) = tell()
    assert "'run/step_1/model'" in told
    assert "'run-model/step_1'" in told
    for number, name in enumerate(("run/step_2/model", "run-model/step_1", "run-model/step_2", "run-model/final"), 1):
        dcp.save(contents(number), checkpoint_id=name, storage_writer=writer)
    writer.wait()
    kept = {"run/step_1/model", "run/step_2/model", "run-model/final"}
    wait_for(lambda: (on_node(root) if tier == "nodes" else in_bucket(where)) == kept, 20, "the names that it counts")
    other = ReplicatedWriter(root, copies=1, **policy)
    for name in ("run-3/step-1", "run-3/final"):
        dcp.save(contents(5), checkpoint_id=name, storage_writer=other)
    dcp.save(contents(6), checkpoint_id="run/step_3/model", storage_writer=ReplicatedWriter(root, copies=1))
    assert tell() == []
    assert main(["verify", "--root", str(root)]) == ExitCode.OK
