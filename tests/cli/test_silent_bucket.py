"""Commands with a bucket that takes connections and answers none: they say what they wait for, and what they know."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.cli.look import waiting
from replicated_ckpt.cli.main import main
from replicated_ckpt.stores.bucket_client import s3
from replicated_ckpt.stores.bucket_client.retry import RetryingClient
from replicated_ckpt.stores.local.store import LocalStore
from tests.agent.agents import stop_agent
from tests.agent.checkpoints import checkpointed, shard

pytestmark = pytest.mark.timeout(60)
URL = "s3://bucket/run"


@pytest.fixture
def _silent_endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(16)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{listening.getsockname()[1]}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "none")
        monkeypatch.setattr(waiting, "SAID_AFTER_S", 0.2)
        monkeypatch.setattr(s3, "READ_TIMEOUT_S", 2.0)
        defaults = RetryingClient.__init__.__kwdefaults__
        assert defaults is not None
        for name in ("within_s", "look_within_s"):
            monkeypatch.setitem(defaults, name, 0.1)
        yield


@pytest.mark.parametrize("verb", ["ls", "verify"])
@pytest.mark.usefixtures("_silent_endpoint")
def test_what_lies_on_the_nodes_is_told_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    """And on standard error, soon, that the command waits for the bucket; then why that is not in the answer."""
    store = LocalStore(tmp_path / "node")
    checkpointed([store], 1, {shard(0): (0,)}, copies=1)
    assert main([verb, "--root", str(store.root), "--object-store", URL]) == ExitCode.UNREACHABLE
    said = capsys.readouterr()
    assert said.err.startswith(f"waits for {URL}, 0.2 s by now")
    assert f"replicated-ckpt {verb}: list '' at {URL}: " in said.err
    assert "1 checkpoint, " in said.out
    assert main([verb, "--json", "--root", str(store.root), "--object-store", URL]) == ExitCode.UNREACHABLE
    assert "step-1" in str(json.loads(capsys.readouterr().out)["checkpoints"])


@pytest.mark.usefixtures("_silent_endpoint")
def test_nothing_goes_while_a_bucket_is_silent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`rm` says what it waits for, too, and leaves the checkpoint on the node."""
    store = LocalStore(tmp_path / "node")
    checkpointed([store], 1, {shard(0): (0,)}, copies=1)
    arguments = ["rm", "step-1", "--force", "--root", str(store.root), "--object-store", URL]
    try:
        assert main(arguments) == ExitCode.UNREACHABLE
    finally:
        stop_agent(store.root)
    assert f"waits for {URL}" in capsys.readouterr().err
    assert store.catalog.save_id_of("step-1")
