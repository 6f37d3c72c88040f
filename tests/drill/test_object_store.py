"""The drill's object store runs as long as the drill, and no other objects are touched."""

import subprocess
import sys
import time
from pathlib import Path
from uuid import uuid4

import pytest

from replicated_ckpt.drill import object_store, processes
from replicated_ckpt.drill.plan import MOTO, MotoFailed
from replicated_ckpt.errors import ConfigInvalid, StoreError
from replicated_ckpt.stores.bucket_client.opening import open_client
from replicated_ckpt.stores.bucket_client.url import ObjectTarget
from tests.buckets.servers import Server

HOLDER = """
import sys, time
from pathlib import Path
from replicated_ckpt.drill.object_store import object_store
with object_store("moto", Path(sys.argv[1]), keep=False, progress=print) as store:
    print("ready", flush=True)
    time.sleep(60)
"""


def motos(workdir: Path) -> tuple[int, ...]:
    return processes.find_processes(f"moto:{workdir}")


def files_in(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()}


def test_without_a_name_there_is_no_object_store(tmp_path: Path) -> None:
    """A drill without an object store starts no server."""
    with object_store.object_store(None, tmp_path, keep=False, progress=print) as store:
        assert store is None


def test_moto_takes_objects_and_ends_with_the_drill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its options override the proxy and endpoint of the environment."""
    pytest.importorskip("moto")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    printed: list[str] = []
    with object_store.object_store(MOTO, tmp_path, keep=False, progress=printed.append) as store:
        assert store is not None
        client = open_client(ObjectTarget.check_supported(store.url, store.storage_options))
        client.put("a", b"b")
        assert client.list_keys("").sizes == {"a": 1}
        client.close()
        assert len(motos(tmp_path)) == 1
        assert "moto at http://127.0.0.1:" in printed[0]
    assert motos(tmp_path) == ()


def test_moto_does_not_outlive_a_drill_that_is_killed(tmp_path: Path) -> None:
    """The server also ends if the drill gets SIGKILL."""
    pytest.importorskip("moto")
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        while "ready" not in (line := holder.stdout.readline()):
            assert line, "the holder ended early"
        assert motos(tmp_path)
        holder.kill()
    deadline = time.monotonic() + 10
    while motos(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert motos(tmp_path) == ()


def test_the_error_has_the_log_of_a_moto_that_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the end of the server's log, which is removed with the work directory."""
    (tmp_path / "moto.py").write_text("raise ImportError('half a moto')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(object_store, "PACKAGE_PARENT", tmp_path)
    (tmp_path / "replicated_ckpt").symlink_to(Path(object_store.__file__).parents[1])
    with (
        pytest.raises(MotoFailed, match="half a moto"),
        object_store.object_store(MOTO, tmp_path, keep=False, progress=print),
    ):
        pass
    assert motos(tmp_path) == ()


@pytest.mark.parametrize("missing", object_store.MOTO_PACKAGES)
def test_moto_needs_all_its_packages(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """`pip install moto` alone has no server."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == missing else name)
    assert not object_store.has_moto()


@pytest.mark.parametrize("keep", [False, True])
def test_under_a_url_only_the_drills_own_prefix_is_removed(tmp_path: Path, *, keep: bool) -> None:
    """Other objects stay. With `keep`, the objects of the drill stay too, and their URL is printed."""
    pytest.importorskip("fsspec")
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket" / "thesis.tex").touch()
    printed: list[str] = []
    with object_store.object_store(f"file://{tmp_path}/bucket", tmp_path, keep=keep, progress=printed.append) as store:
        assert store is not None
        assert store.storage_options is None
        assert store.url.startswith(f"file://{tmp_path}/bucket/drill-")
        open_client(ObjectTarget.check_supported(store.url, None)).put("step-1/x/.metadata", b"b")
    kept = {".metadata", object_store._NOTE_KEY} if keep else set()
    assert files_in(tmp_path / "bucket") == {"thesis.tex"} | kept
    assert any(line.startswith("kept: ") for line in printed) is keep


@pytest.fixture
def bucket(moto: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """A bucket whose credentials and endpoint are in the environment."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", moto.key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", moto.secret)
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto.endpoint_url)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    return moto.make_bucket(f"b-{uuid4().hex[:12]}")


def test_uploads_that_died_with_their_nodes_are_ended(moto: Server, bucket: str, tmp_path: Path) -> None:
    """The drill aborts its own unfinished multipart uploads, which no listing shows. Those of others stay."""
    s3 = moto.client()
    s3.create_multipart_upload(Bucket=bucket, Key="x/theirs")
    with object_store.object_store(f"s3://{bucket}/x", tmp_path, keep=False, progress=print) as store:
        assert store is not None
        prefix = store.url.removeprefix(f"s3://{bucket}/")
        s3.create_multipart_upload(Bucket=bucket, Key=f"{prefix}/step-1/__0_0.distcp")
    assert [upload["Key"] for upload in s3.list_multipart_uploads(Bucket=bucket)["Uploads"]] == ["x/theirs"]
    assert s3.list_objects_v2(Bucket=bucket)["KeyCount"] == 0


def test_an_unwritable_bucket_is_an_error_before_anything_starts(bucket: str, tmp_path: Path) -> None:
    """The hint names the option."""
    with (
        pytest.raises(StoreError, match="NoSuchBucket") as raised,
        object_store.object_store(f"s3://{bucket}-not", tmp_path, keep=False, progress=print),
    ):
        pass
    assert "--object-store" in raised.value.hint


@pytest.mark.parametrize("url", ["", "bucket", "s3://", "memory://x", "s3://key:secret@bucket", "s3://bucket?x=1"])
def test_a_url_that_cannot_work_is_refused(url: str, tmp_path: Path) -> None:
    """A URL without a bucket, with a secret, or of a store in the memory of one process is refused."""
    with (
        pytest.raises(ConfigInvalid) as refused,
        object_store.object_store(url, tmp_path, keep=False, progress=print),
    ):
        pass
    assert "drill-" not in refused.value.message
