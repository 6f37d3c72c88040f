"""The object tier of one process with a real agent and an S3 server: save, wait, lose the node, load."""

import json
import shutil
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock
from uuid import uuid4

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

from replicated_ckpt import ReplicatedReader, ReplicatedWriter
from replicated_ckpt.agent.http.object_routes import FIRST_WAIT_S
from replicated_ckpt.cli.main import main
from replicated_ckpt.dcp.find.bucket_look import BucketLook
from replicated_ckpt.dcp.save import agent_tasks
from replicated_ckpt.errors import (
    CheckpointExists,
    ConfigInvalid,
    ReplicatedCkptError,
    ReplicatedCkptWarning,
    ShardLost,
    UploadFailed,
)
from replicated_ckpt.stores.bucket_client.directory import DirectoryClient
from replicated_ckpt.stores.bucket_client.url import ObjectTarget
from replicated_ckpt.stores.local.store import LocalStore
from tests.agent.agents import stop_agent
from tests.buckets.servers import Server
from tests.damage import flip
from tests.marks import mark_long

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:.*it has not answered yet"),  # moto, on a busy machine
]
State = dict[str, torch.Tensor]


def contents(number: int) -> State:
    generator = torch.Generator().manual_seed(number)
    return {f"layer{n}": torch.randn(300, 400, generator=generator) for n in range(3)}


def blank() -> State:
    return {name: torch.zeros_like(value) for name, value in contents(0).items()}


def assert_loads(reader: Any, checkpoint_id: str | None, number: int) -> None:
    state = blank()
    dcp.load(state, checkpoint_id=checkpoint_id, storage_reader=reader)
    wanted = contents(number)
    assert all(torch.equal(state[name], wanted[name]) for name in wanted)


def save(writer: ReplicatedWriter, checkpoint_id: str, number: int) -> None:
    with pytest.warns(ReplicatedCkptWarning, match="can hold only 1"):
        dcp.save(contents(number), checkpoint_id=checkpoint_id, storage_writer=writer)


def test_a_save_survives_its_node(root: Path, where: Mapping[str, Any]) -> None:
    """After `wait` and the loss of the node, a blank node, a reader without a store, and stock torch load from the
    bucket.
    """
    writer = ReplicatedWriter(root, **where)
    save(writer, "step-1", 1)
    save(writer, "step-2", 2)
    assert writer.wait() == ("step-1", "step-2")
    assert writer.wait() == ()
    stop_agent(root)
    shutil.rmtree(root)
    assert_loads(ReplicatedReader(root, **where), "latest", 2)
    reader = ReplicatedReader(**where)
    assert_loads(reader, "step-1", 1)
    assert reader.last_load is not None
    assert reader.last_load.bytes_object > 0
    url, options = where["object_store"], where["storage_options"]
    assert_loads(FsspecReader(f"{url}/step-2", **options), None, 2)


def test_latest_waits_for_a_slow_bucket_where_the_nodes_have_an_older_one(
    root: Path, where: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest checkpoint has lost its copy on the nodes, and the bucket is slow: `latest` waits, and does not fall
    back to an older one.
    """
    writer = ReplicatedWriter(root, **where)
    save(writer, "step-1", 1)
    save(writer, "step-2", 2)
    writer.wait()
    (root / "step-2" / "__0_0.distcp").unlink()
    monkeypatch.setattr(BucketLook, "is_over_within", lambda *_: False)
    assert_loads(ReplicatedReader(root, **where), "latest", 2)


def test_an_overwritten_checkpoint_is_replaced_in_the_bucket(root: Path, where: Mapping[str, Any]) -> None:
    """After an overwrite, every reader of the bucket, stock torch included, and every reader of the node load the new
    save.
    """
    writer = ReplicatedWriter(root, overwrite=True, **where)
    for number in (1, 2, 3):
        save(writer, "step-1", number)
        writer.wait()
        url, options = where["object_store"], where["storage_options"]
        assert_loads(FsspecReader(f"{url}/step-1", **options), None, number)
        assert_loads(ReplicatedReader(**where), "step-1", number)
        assert_loads(ReplicatedReader(root), "step-1", number)
        assert_loads(dcp.FileSystemReader(root / "step-1"), str(root / "step-1"), number)


def test_an_overwrite_of_another_run_replaces_it_in_the_bucket(
    root: Path, tmp_path: Path, where: Mapping[str, Any]
) -> None:
    """A save replaces another run's checkpoint in the bucket although that run's clock was a year ahead."""
    save(ReplicatedWriter(root), "run/step-0", 0)
    other = tmp_path / "other"
    now = time.time()
    with mock.patch.object(time, "time", return_value=now + 365 * 86400):
        save(ReplicatedWriter(other, ack="object", **where), "run/step-1", 1)
    stop_agent(other)
    with (
        pytest.warns(ReplicatedCkptWarning, match="checkpoints of other runs"),
        pytest.warns(ReplicatedCkptWarning, match="this save replaces the checkpoint 'run/step-1'"),
    ):
        save(ReplicatedWriter(root, ack="object", **where), "run/step-1", 2)
    url, options = where["object_store"], where["storage_options"]
    assert_loads(FsspecReader(f"{url}/run/step-1", **options), None, 2)
    assert_loads(ReplicatedReader(**where), "run/step-1", 2)


def test_names_of_any_kind_work_in_the_bucket(root: Path, where: Mapping[str, Any]) -> None:
    """An id with spaces, non-ASCII letters and `# ' ( &` is uploaded, replaced, found as `latest`, and read by stock
    torch.
    """
    name = "läufe #1/it's (step 1) & 実験"
    writer = ReplicatedWriter(root, overwrite=True, **where)
    for number in (1, 2):
        save(writer, name, number)
        assert writer.wait() == (name,)
    stop_agent(root)
    shutil.rmtree(root)
    assert_loads(ReplicatedReader(root, **where), "latest", 2)
    assert_loads(ReplicatedReader(**where), name, 2)
    assert_loads(FsspecReader(f"{where['object_store']}/{name}", **where["storage_options"]), None, 2)


@pytest.mark.long
def test_only_every_nth_goes_to_the_bucket(root: Path, where: Mapping[str, Any]) -> None:
    """With `object_every=2` every second save is uploaded. `latest` is the newest of both tiers."""
    writer = ReplicatedWriter(root, object_every=2, **where)
    for number in (1, 2, 3):
        save(writer, f"step-{number}", number)
    assert writer.wait() == ("step-2",)
    assert_loads(ReplicatedReader(**where), "latest", 2)
    assert_loads(ReplicatedReader(root, **where), "latest", 3)


@pytest.mark.long
def test_a_checkpoint_in_the_bucket_is_not_overwritten_by_accident(root: Path, where: Mapping[str, Any]) -> None:
    """A blank node refuses to save under an id that the bucket has. Its next save is newer than all saves in the
    bucket.
    """
    writer = ReplicatedWriter(root, **where)
    for number in (1, 2, 3):
        save(writer, f"step-{number}", number)
    writer.wait()
    stop_agent(root)
    shutil.rmtree(root)
    writer = ReplicatedWriter(root, overwrite=False, **where)
    with pytest.raises(CheckpointException) as raised, pytest.warns(ReplicatedCkptWarning):
        dcp.save(contents(9), checkpoint_id="step-1", storage_writer=writer)
    assert isinstance(raised.value.failures[0][0], CheckpointExists)
    save(writer, "step-9", 9)
    writer.wait()
    assert_loads(ReplicatedReader(**where), "latest", 9)


@pytest.mark.parametrize("wrong", ["bucket", "endpoint"])
def test_a_wrong_bucket_or_endpoint_is_reported_at_once(root: Path, where: Mapping[str, Any], wrong: str) -> None:
    """With a wrong bucket or endpoint, the first save warns and succeeds on the nodes, and `wait` raises. No message
    contains the secret.
    """
    where = dict(where)
    if wrong == "bucket":
        where["object_store"] = "s3://nobody-has-this-one/x"
    else:
        where["storage_options"] = {**where["storage_options"], "client_kwargs": {"endpoint_url": "http://127.0.0.1:9"}}
    writer = ReplicatedWriter(root, **where)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ReplicatedCkptWarning)
        dcp.save(contents(1), checkpoint_id="step-1", storage_writer=writer)
    assert any("object store s3://" in str(entry.message) for entry in caught)
    with pytest.raises(UploadFailed) as raised:
        writer.wait(timeout_s=3)
    assert not any("testsecret" in str(entry.message) for entry in caught)
    assert "testsecret" not in str(raised.value)
    assert "testsecret" not in (root / ".agent" / "log").read_text()
    assert_loads(ReplicatedReader(root), "step-1", 1)


def test_ack_object_waits(root: Path, where: Mapping[str, Any]) -> None:
    """With `ack="object"`, the save is in the bucket when `dcp.save` returns."""
    save(ReplicatedWriter(root, ack="object", **where), "step-1", 1)
    assert_loads(ReplicatedReader(**where), "step-1", 1)


def test_wait_returns_no_checkpoint_that_was_never_uploaded(root: Path, where: Mapping[str, Any]) -> None:
    """A checkpoint that was removed before its upload is not among the ids from `wait`. `wait(ack="object")` raises."""
    away = {**where["storage_options"], "client_kwargs": {"endpoint_url": "http://127.0.0.1:9"}}
    writer = ReplicatedWriter(root, copies=1, object_store=where["object_store"], storage_options=away)
    for number in (1, 2):
        with pytest.warns(ReplicatedCkptWarning, match="object store s3://"):
            dcp.save(contents(number), checkpoint_id=f"step-{number}", storage_writer=writer)
        assert main(["rm", f"step-{number}", "--root", str(root), "--keep-in-bucket", "--force"]) == 0
        if number == 1:
            with pytest.raises(UploadFailed, match=r"'step-1' is not in s3://.*aborted, replaced or removed"):
                writer.wait(ack="object")
        assert writer.wait() == ()
    again = ReplicatedWriter(root, **where)
    save(again, "step-3", 3)
    assert again.wait() == ("step-3",)
    assert_loads(ReplicatedReader(**where), "latest", 3)


def test_stock_torchs_checkpoint_in_the_bucket_is_read(where: Mapping[str, Any], tmp_path: Path) -> None:
    """A checkpoint that stock torch wrote to the bucket loads by name, and as `latest` if there is no other."""
    url, options = where["object_store"], where["storage_options"]
    dcp.save(contents(5), storage_writer=FsspecWriter(f"{url}/theirs", **options))
    assert_loads(ReplicatedReader(**where), "theirs", 5)
    assert_loads(ReplicatedReader(tmp_path / "blank", **where), "latest", 5)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_stock_torchs_items_in_the_bucket_are_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader verifies the zip checksums in stock torch's items: it refuses a changed byte, and reads each item at
    most twice.
    """

    def read(client: DirectoryClient, key: str, offset: int, target: memoryview) -> None:
        fetched.append(len(target))
        read_really(client, key, offset, target)

    fetched, read_really = list[int](), DirectoryClient.read
    monkeypatch.setattr(DirectoryClient, "read", read)
    written, reader = torch.rand(6 << 20), ReplicatedReader(object_store=f"file://{tmp_path}")
    dcp.save({"w": written}, checkpoint_id=tmp_path / "theirs")
    found = {"w": torch.zeros(6 << 20)}
    dcp.load(found, checkpoint_id="theirs", storage_reader=reader)
    assert torch.equal(found["w"], written)
    shard = tmp_path / "theirs" / "__0_0.distcp"
    assert sum(fetched) < 2.1 * shard.stat().st_size
    flip(shard, 20 << 20)
    with pytest.raises((CheckpointException, ShardLost), match=r"expected CRC32 "):
        dcp.load(found, checkpoint_id="theirs", storage_reader=reader)


def test_a_reader_needs_a_place() -> None:
    """A reader without a root and without a bucket is refused."""
    with pytest.raises(ConfigInvalid):
        ReplicatedReader()


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_any_scheme_of_fsspec_does(root: Path, tmp_path: Path, scheme: str) -> None:
    """`file://` (a directory on a shared file system) and `memory://` (within one process) serve as buckets."""
    url = f"file://{tmp_path}/bucket" if scheme == "file" else f"memory://{uuid4().hex}/x"
    writer = ReplicatedWriter(root, object_store=url)
    save(writer, "step-1", 1)
    writer.wait()
    assert_loads(ReplicatedReader(object_store=url), "step-1", 1)


def test_a_missing_checkpoint_names_the_bucket_that_was_searched(where: Mapping[str, Any]) -> None:
    """The error of a missing checkpoint names the bucket among the places searched."""
    with pytest.raises((CheckpointException, ReplicatedCkptError), match="runs/one"):
        dcp.load(blank(), checkpoint_id="step-1", storage_reader=ReplicatedReader(**where))


def test_a_checkpoint_is_uploaded_by_hand(
    root: Path,
    where: Mapping[str, Any],
    moto: Server,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`upload --to` uploads a checkpoint whose save named no bucket, with the environment's credentials. `ls` lists
    both places, and `verify` finds a damaged object.
    """

    def command(*arguments: str) -> tuple[int, str]:
        code = main(arguments)
        said = capsys.readouterr()
        return code, said.out + said.err

    url = where["object_store"]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", moto.key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", moto.secret)
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto.endpoint_url)
    save(ReplicatedWriter(root), "step-1", 1)
    code, said = command("upload", "step-1", "--root", str(root))
    assert (code, "names no object store" in said) == (2, True), said
    code, said = command("upload", "step-1", "--root", str(root), "--to", url)
    assert (code, "committed in" in said) == (0, True), said
    assert moto.secret not in said
    assert_loads(ReplicatedReader(object_store=url), "step-1", 1)
    code, said = command("ls", "--root", str(root), "--object-store", url)
    assert code == 0
    assert any(line.startswith("step-1 ") and line.endswith(" there") for line in said.splitlines()), said
    code, said = command("verify", "--root", str(root), "--object-store", url)
    assert (code, "NOT intact" in said) == (0, False), said
    client, bucket = moto.client(), url.split("/")[2]
    key = "runs/one/step-1/__0_0.distcp"
    body = bytearray(client.get_object(Bucket=bucket, Key=key)["Body"].read())
    body[1000] ^= 1
    client.put_object(Bucket=bucket, Key=key, Body=bytes(body))
    code, said = command("verify", "--root", str(root), "--object-store", url)
    assert (code, "step-1/__0_0.distcp" in said) == (1, True), said
    code, said = command("upload", "step-7", "--root", str(root), "--to", url)
    assert (code, f"`replicated-ckpt show step-7 --root {root}`" in said) == (3, True), said


def test_a_load_without_the_bucket_names_it(root: Path, where: Mapping[str, Any]) -> None:
    """The nodes have lost an uploaded shard: a load without `object_store` names the bucket, and a load with it
    succeeds.
    """
    url = where["object_store"]
    save(ReplicatedWriter(root, ack="object", **where), "step-1", 1)
    (root / "step-1" / "__0_0.distcp").unlink()
    for checkpoint_id in ("step-1", "latest"):
        with pytest.raises((CheckpointException, ShardLost), match=f"was not given object_store='{url}'"):
            dcp.load(blank(), checkpoint_id=checkpoint_id, storage_reader=ReplicatedReader(root))
    assert_loads(ReplicatedReader(root, **where), "step-1", 1)


@pytest.mark.parametrize("with_url", mark_long([False, True], keep=[True]), ids=["the save's bucket", "--to"])
def test_an_upload_by_hand_looks_into_the_bucket(
    root: Path,
    where: Mapping[str, Any],
    moto: Server,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *,
    with_url: bool,
) -> None:
    """After the bucket was emptied, `verify` names the missing checkpoint, and `upload` uploads it again."""
    url = where["object_store"]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", moto.key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", moto.secret)
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto.endpoint_url)
    save(ReplicatedWriter(root, ack="object", **where), "step-1", 1)
    client, bucket = moto.client(), url.split("/")[2]
    for one in client.list_objects_v2(Bucket=bucket)["Contents"]:
        client.delete_object(Bucket=bucket, Key=one["Key"])
    capsys.readouterr()
    assert main(["verify", "--root", str(root), "--object-store", url]) == 0
    said = capsys.readouterr().out
    assert f"on the nodes, but not in {url}: step-1\n" in said
    assert f"0 checkpoints in {url}, 0 bytes read: no checkpoint to verify\n" in said
    assert main(["upload", "step-1", "--root", str(root), *(["--to", url] if with_url else [])]) == 0
    assert_loads(ReplicatedReader(**where), "step-1", 1)


def test_ls_does_not_call_the_bucket_an_unreachable_node(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The nodes have lost a checkpoint: `ls` suggests to load it from the bucket, and does not list the bucket as an
    unreachable node.
    """
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    where = f"file://{bucket}"
    save(ReplicatedWriter(root, ack="object", object_store=where), "step-1", 1)
    (root / "step-1" / "__0_0.distcp").unlink()
    main(["ls", "--root", str(root), "--object-store", where])
    said = capsys.readouterr().out
    assert "1 file lost" in said
    assert f"load it with object_store='{where}'" in said
    assert "this node has no address of" not in said
    main(["ls", "--root", str(root), "--object-store", where, "-o", "json"])
    (row,) = json.loads(capsys.readouterr().out)["checkpoints"]
    assert (row["state"], row["not_reached"], row["bucket"]) == ("lost", [], "there")


def test_an_order_to_a_second_bucket_puts_the_first_one_off(root: Path, tmp_path: Path) -> None:
    """`upload --to` ends once the second bucket has the checkpoint. `wait` ends once the save's own bucket, which was
    away, has it.
    """
    first, second = tmp_path / "first", f"file://{tmp_path}/second"
    first.write_text("away")
    writer = ReplicatedWriter(root, object_store=f"file://{first}")
    with pytest.warns(ReplicatedCkptWarning, match="it is a file, not a directory"):
        save(writer, "step-1", 1)
    assert main(["upload", "step-1", "--root", str(root), "--to", second]) == 0
    assert_loads(ReplicatedReader(object_store=second), "step-1", 1)
    first.unlink()
    writer.wait()
    assert_loads(ReplicatedReader(object_store=f"file://{first}"), "step-1", 1)


def test_a_save_waits_for_the_first_look_of_an_agent_that_was_started_again(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each probe waits longer than `FIRST_WAIT_S`, because a restarted agent may not have looked into the bucket yet."""
    (tmp_path / "bucket").mkdir()
    waited: list[float] = []

    def ask(*asked: Any) -> Mapping[str, Any]:
        waited.append(asked[4])
        return {"is_empty": True, "save_id": "", "lineage": "", "histories": {}, "error": "", "kind": ""}

    monkeypatch.setattr(agent_tasks, "ask_agent", ask)
    tier = agent_tasks.ObjectTier(LocalStore(root), ObjectTarget.check_supported(f"file://{tmp_path}/bucket", None), 1)
    for _ in range(2):
        tier.probe("step-1", is_on_nodes=False, overwrite=False)
    assert min(waited) > FIRST_WAIT_S
