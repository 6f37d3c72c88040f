"""Commands report what they could not read, and everything else: a silent bucket, newer formats, stock checkpoints."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from replicated_ckpt.cli.exit_codes import ExitCode, exit_code_of
from replicated_ckpt.cli.look import progress
from replicated_ckpt.cli.main import main
from replicated_ckpt.core.layout import MANIFEST_NAME
from replicated_ckpt.errors import ShardLost
from replicated_ckpt.stores.bucket_client import s3
from replicated_ckpt.stores.bucket_client.retry import RetryingClient
from replicated_ckpt.stores.local.store import LocalStore
from tests.agent.agents import running_agent, stop_agent
from tests.agent.checkpoints import checkpointed, introduced, shard
from tests.agent.scattered import scattered
from tests.damage import make_newer

pytestmark = pytest.mark.timeout(60)
URL = "s3://bucket/run"
NEWER = "step-1: only a newer version of replicated_ckpt reads it"


@pytest.fixture
def _silent_endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(16)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{listening.getsockname()[1]}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "none")
        monkeypatch.setattr(progress, "SAID_AFTER_S", 0.2)
        monkeypatch.setattr(s3, "READ_TIMEOUT_S", 2.0)
        defaults = RetryingClient.__init__.__kwdefaults__
        assert defaults is not None
        for name in ("within_s", "look_within_s"):
            monkeypatch.setitem(defaults, name, 0.1)
        yield


@pytest.mark.parametrize("verb", ["ls", "verify"])
@pytest.mark.usefixtures("_silent_endpoint")
def test_nodes_are_listed_while_the_bucket_is_silent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    """The bucket does not answer: the nodes are listed, and standard error has the wait and the reason."""
    store = LocalStore(tmp_path / "node")
    checkpointed([store], 1, {shard(0): (0,)}, copies=1)
    assert main([verb, "--root", str(store.root), "--object-store", URL]) == ExitCode.UNREACHABLE
    printed = capsys.readouterr()
    assert printed.err.startswith(f"waiting for {URL} since 0.2 s")
    assert f"replicated-ckpt {verb}: list {URL}: " in printed.err
    assert "1 checkpoint, " in printed.out
    assert main([verb, "-o", "json", "--root", str(store.root), "--object-store", URL]) == ExitCode.UNREACHABLE
    assert "step-1" in str(json.loads(capsys.readouterr().out)["checkpoints"])


@pytest.mark.usefixtures("_silent_endpoint")
def test_nothing_is_removed_while_a_bucket_is_silent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`rm` reports the wait, and leaves the checkpoint on the node."""
    store = LocalStore(tmp_path / "node")
    checkpointed([store], 1, {shard(0): (0,)}, copies=1)
    arguments = ["rm", "step-1", "--force", "--root", str(store.root), "--object-store", URL]
    try:
        assert main(arguments) == ExitCode.UNREACHABLE
    finally:
        stop_agent(store.root)
    assert f"waiting for {URL}" in capsys.readouterr().err
    assert store.catalog.save_id_of("step-1")


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    made = LocalStore(tmp_path / "node")
    checkpointed([made], 1, {shard(0): (0,)}, copies=1)
    return made


def test_a_newer_format_is_not_reported_as_intact(store: LocalStore, capsys: pytest.CaptureFixture[str]) -> None:
    """`verify` and `status` report that a newer format was not checked. Commands with its id advise an upgrade."""
    make_newer(store.root / "step-1" / MANIFEST_NAME)
    root = ["--root", str(store.root)]
    assert main(["verify", *root]) == ExitCode.FAILED
    assert f"not checked: {NEWER}" in capsys.readouterr().out
    assert main(["verify", "-o", "json", *root]) == ExitCode.FAILED
    assert json.loads(capsys.readouterr().out)["newer_format"] == ["step-1"]
    main(["status", *root])
    assert f"degraded: {NEWER}" in capsys.readouterr().out
    for verb in ("show", "verify", "upload"):
        assert main([verb, "step-1", *root]) == ExitCode.FAILED
        assert "Upgrade replicated_ckpt" in capsys.readouterr().err


def test_a_node_with_a_newer_format_is_not_drained(store: LocalStore, capsys: pytest.CaptureFixture[str]) -> None:
    """The copies of a newer format cannot be counted, so the node must stay."""
    make_newer(store.root / "step-1" / MANIFEST_NAME)
    try:
        assert main(["drain", "--dry-run", "--root", str(store.root)]) == ExitCode.FAILED
    finally:
        stop_agent(store.root)
    assert f"not drained: {NEWER}" in capsys.readouterr().out


def test_a_newer_format_on_another_node_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The commands report it although this node holds no part of it."""
    here, there = (LocalStore(tmp_path / name) for name in ("here", "there"))
    checkpointed([there], 1, {shard(0): (0,)}, copies=1)
    checkpointed([here], 2, {shard(0): (0,)}, copies=1, checkpoint_id="step-2")
    make_newer(there.root / "step-1" / MANIFEST_NAME)
    root = ["--root", str(here.root)]
    with running_agent(there.root) as other:
        introduced(here, [other.endpoint.address()])
        assert main(["ls", *root]) == ExitCode.OK
        assert NEWER in capsys.readouterr().out
        for verb in (["status"], ["verify"], ["repair", "--dry-run"]):
            assert main([*verb, *root]) == ExitCode.FAILED, verb
            assert NEWER in capsys.readouterr().out, verb
        for verb in (["show"], ["verify"], ["repair", "--dry-run"], ["rm"]):
            assert main([*verb, "step-1", *root]) == ExitCode.FAILED, verb
            assert "Upgrade replicated_ckpt" in capsys.readouterr().err, verb
    stop_agent(here.root)


@pytest.mark.parametrize(
    ("suffix", "code"), [("", ExitCode.SHARD_LOST), (": not reached (no answer)", ExitCode.UNREACHABLE)]
)
def test_a_shard_of_an_unreachable_node_is_not_lost(suffix: str, code: ExitCode) -> None:
    """A missing shard has another exit code if an unreachable node may hold it."""
    assert exit_code_of(ShardLost("step-1", {shard(0): "rank 0"}, [f"node b{suffix}"])) == code


def test_verify_of_only_a_stock_checkpoint_does_not_contradict_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only a stock checkpoint exists: the output says that no manifest was found, and that the stock checkpoint is
    sound.
    """
    scattered([LocalStore(tmp_path / "node")], tmp_path)
    assert main(["verify", "--root", str(tmp_path / "node")]) == ExitCode.OK
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith(": no checkpoint with a manifest that this version reads")
    assert second.endswith(": sound")


@pytest.mark.parametrize("verb", ["ls", "verify", "rm"])
def test_an_invalid_bucket_is_refused_first(
    store: LocalStore, tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    """An invalid URL, or a node's root as the bucket, is a usage error before any work."""
    other = LocalStore(tmp_path / "other")
    checkpointed([other], 2, {shard(0): (0,)}, copies=1)
    named = ["step-1"] if verb == "rm" else []
    for url in ("nonsense", f"file://{other.root}"):
        assert main([verb, *named, "--root", str(store.root), "--object-store", url]) == ExitCode.USAGE
        assert capsys.readouterr().out == ""


def test_an_upload_of_latest_names_the_checkpoint(store: LocalStore, capsys: pytest.CaptureFixture[str]) -> None:
    """The error names the checkpoint that `latest` means. An empty `--to` is refused."""
    root = ["--root", str(store.root)]
    assert main(["upload", "latest", *root]) == ExitCode.USAGE
    assert "The save of 'step-1' names no object store." in capsys.readouterr().err
    assert main(["upload", "step-1", *root, "--to", ""]) == ExitCode.USAGE
    assert "not ''" in capsys.readouterr().err
