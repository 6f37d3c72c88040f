"""`rm` removes a checkpoint from both the nodes and the bucket, or from neither unless asked."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from replicated_ckpt import ReplicatedReader, ReplicatedWriter, failpoints
from replicated_ckpt.agent.state.endpoint import read_endpoint
from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.cli.main import main
from replicated_ckpt.cli.removal.remover import Remover
from replicated_ckpt.core.layout import MANIFEST_NAME, METADATA_NAME
from replicated_ckpt.stores.bucket.bucket import Bucket
from replicated_ckpt.stores.bucket_client.opening import open_client
from replicated_ckpt.stores.bucket_client.url import ObjectTarget
from replicated_ckpt.stores.peer.client import AgentClient
from tests.agent.agents import stop_agent, wait_for
from tests.harness.processes import is_running
from tests.object_tier.test_one_node import assert_loads, save

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def in_bucket(where: Mapping[str, Any]) -> list[str]:
    client = open_client(ObjectTarget.check_supported(where["object_store"], where["storage_options"]))
    try:
        return sorted(found.checkpoint_id for found in Bucket(client).saves())
    finally:
        client.close()


def list_names(where: Mapping[str, Any], checkpoint_id: str) -> list[str]:
    client = open_client(ObjectTarget.check_supported(where["object_store"], where["storage_options"]))
    try:
        listing = client.list_keys(f"{checkpoint_id}/")
        return sorted([*listing.sizes, *listing.directories])
    finally:
        client.close()


def has_uploads(root: Path) -> bool:
    endpoint = read_endpoint(root / ".agent")
    assert endpoint is not None
    with AgentClient(endpoint.local_address()) as client:
        return bool(client.call("GET", "/v1/status")["object_store"]["pending"])


def test_a_removal_during_which_an_upload_commits_leaves_nothing(
    root: Path, where: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upload commits after `rm` has found no mark in the bucket: the checkpoint is removed there, too."""
    monkeypatch.setenv(failpoints.ENV, "upload.manifest-put=sleep:2@2")
    writer = ReplicatedWriter(root, **where)
    save(writer, "step-1", 1)
    writer.wait()
    save(writer, "step-2", 2)
    wait_for(lambda: list_names(where, "step-2"), 20, "the upload has begun")
    assert in_bucket(where) == ["step-1"]
    remove_from_bucket = Remover._remove_from_bucket

    def remove_before_upload_ends(*arguments: Any, **named: Any) -> None:
        remove_from_bucket(*arguments, **named)
        wait_for(lambda: not has_uploads(root), 20, "the end of the upload")

    monkeypatch.setattr(Remover, "_remove_from_bucket", remove_before_upload_ends)
    assert main(["rm", "step-2", "--root", str(root), "--force"]) == ExitCode.OK
    assert not (root / "step-2").exists()
    assert in_bucket(where) == ["step-1"]
    assert list_names(where, "step-2") == []


def begin_upload(root: Path, where: Mapping[str, Any], awaited: str) -> None:
    """Uploads step-1, and begins to upload step-2 until the bucket has the file `awaited`."""
    writer = ReplicatedWriter(root, **where)
    save(writer, "step-1", 1)
    writer.wait()
    save(writer, "step-2", 2)
    wait_for(lambda: awaited in list_names(where, "step-2"), 20, f"{awaited} in the bucket")


def test_an_agent_that_is_killed_in_the_commit_of_an_upload_brings_nothing_back(
    root: Path, where: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upload commits during `rm` and its agent dies at once: either the checkpoint stays removed, or `rm` failed and
    can be repeated.
    """
    monkeypatch.setenv(failpoints.ENV, "upload.manifest-put=sleep:2@2,upload.marked=kill@2")
    begin_upload(root, where, MANIFEST_NAME)
    code = main(["rm", "step-2", "--root", str(root), "--force"])
    monkeypatch.delenv(failpoints.ENV)
    if code != ExitCode.OK:
        assert main(["status", "--root", str(root), "--start-agents"]) == ExitCode.OK
        assert (root / "step-2").exists(), "the same command finds the checkpoint"
        assert main(["rm", "step-2", "--root", str(root), "--force"]) == ExitCode.OK
    else:
        endpoint = read_endpoint(root / ".agent")
        assert endpoint is not None
        wait_for(lambda: not is_running(endpoint.pid), 20, "the end of the agent, at the mark")
    assert main(["status", "--root", str(root), "--start-agents"]) == ExitCode.OK
    assert not (root / "step-2").exists()
    assert (in_bucket(where), list_names(where, "step-2")) == (["step-1"], [])


def test_the_buckets_copy_can_be_kept_before_its_upload_has_ended(
    root: Path, where: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The upload has committed but the agent has not confirmed it: `rm --keep-in-bucket` removes the node's copy, and
    the bucket's loads.
    """
    monkeypatch.setenv(failpoints.ENV, "upload.marked=sleep:2@2")
    begin_upload(root, where, METADATA_NAME)
    assert main(["rm", "step-2", "--root", str(root), "--force", "--keep-in-bucket"]) == ExitCode.OK
    wait_for(lambda: not has_uploads(root), 20, "the end of the upload")
    assert not (root / "step-2").exists()
    assert in_bucket(where) == ["step-1", "step-2"]
    assert_loads(ReplicatedReader(**where), "step-2", 2)


def test_a_removed_checkpoint_is_not_uploaded_again(
    root: Path, where: Mapping[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """`rm` removes the checkpoint from the node and from the bucket that its save named. With `--keep-in-bucket` the
    bucket's copy stays and loads.
    """
    writer = ReplicatedWriter(root, **where)
    for number in (1, 2):
        save(writer, f"step-{number}", number)
    writer.wait()
    assert main(["rm", "step-1", "--root", str(root)]) == ExitCode.OK
    assert in_bucket(where) == ["step-2"]
    assert not (root / "step-1").exists()
    stop_agent(root)
    assert main(["status", "--root", str(root), "--start-agents"]) == ExitCode.OK
    time.sleep(3)
    assert in_bucket(where) == ["step-2"]
    capsys.readouterr()
    assert main(["rm", "step-2", "--root", str(root), "--force", "--keep-in-bucket"]) == ExitCode.OK
    assert f"not removed from {where['object_store']}: step-2" in capsys.readouterr().out
    assert not (root / "step-2").exists()
    assert_loads(ReplicatedReader(**where), "step-2", 2)


def test_a_checkpoint_stays_on_the_node_while_its_bucket_is_unknown(
    root: Path, where: Mapping[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """If the agent has no record of the bucket, `rm` removes nothing. Once it has, the same command succeeds."""
    writer = ReplicatedWriter(root, **where)
    for number in (1, 2):
        save(writer, f"step-{number}", number)
    writer.wait()
    stop_agent(root)
    targets = root / ".agent" / "uploads.json"
    raw = targets.read_bytes()
    targets.unlink()
    assert main(["rm", "step-1", "--root", str(root)]) == ExitCode.FAILED
    said = capsys.readouterr().out
    assert "kept: step-1: " in said
    assert "No rank of this node has named the object store" in said
    assert f"`replicated-ckpt upload step-1 --to {where['object_store']} --root {root}`" in said
    assert (root / "step-1").exists()
    assert in_bucket(where) == ["step-1", "step-2"]
    stop_agent(root)
    targets.write_bytes(raw)
    assert main(["rm", "step-1", "--root", str(root)]) == ExitCode.OK
    assert not (root / "step-1").exists()
    assert in_bucket(where) == ["step-2"]


def test_another_runs_checkpoint_of_that_id_stays_in_the_bucket(
    root: Path, tmp_path: Path, where: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two clusters share a prefix: `rm` does not remove the other run's checkpoint from the bucket, except with
    `--force`.
    """
    other, options = tmp_path / "other", where["storage_options"]
    writer = ReplicatedWriter(other, **where)
    for number in (1, 2):
        save(writer, f"step-{number}", number)
        save(ReplicatedWriter(root), f"step-{number}", number)
    writer.wait()
    stop_agent(other)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", options["key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", options["secret"])
    monkeypatch.setenv("AWS_ENDPOINT_URL", options["client_kwargs"]["endpoint_url"])
    words = ["rm", "step-1", "--root", str(root), "--object-store", where["object_store"]]
    assert main(words) == ExitCode.FAILED
    assert (root / "step-1").exists()
    assert main([*words, "--keep-in-bucket"]) == ExitCode.OK
    assert not (root / "step-1").exists()
    assert main(words) == ExitCode.FAILED, "the node's step-2 and the bucket's step-1 are of different runs"
    assert_loads(ReplicatedReader(**where), "step-1", 1)
    assert main([*words, "--force"]) == ExitCode.OK
    assert in_bucket(where) == ["step-2"]
