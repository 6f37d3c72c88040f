"""`verify` shows its progress and rate, whether an agent or this process reads."""

import threading
import time
from pathlib import Path

import pytest

from replicated_ckpt.agent.repair.audit import Auditor
from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.cli.look.progress import describe_progress
from replicated_ckpt.stores.local.store import LocalStore
from tests.agent.agents import running_agent, wait_for
from tests.agent.checkpoints import checkpointed, introduced, shard
from tests.cli.commands import as_json, command

pytestmark = [pytest.mark.fault, pytest.mark.timeout(180)]
LARGE_BYTES = 4 << 30


def large_store(root: Path) -> LocalStore:
    """A store with a sparse shard that takes long to read, so progress is visible. The shard is damaged."""
    store = LocalStore(root)
    checkpointed([store], 1, {shard(0): (0,)}, copies=1, size_bytes=3000)
    with (root / "step-1" / shard(0)).open("r+b") as file:
        file.truncate(LARGE_BYTES)
    return store


@pytest.mark.parametrize(
    ("read", "size", "seconds", "text"),
    [
        (500_000_000, 2_000_000_000, 5.0, "500 MB of 2 GB (25%) read, 100 MB/s, 15 s left"),
        (2_000_000_000, 1_000_000_000, 1.0, "1 GB of 1 GB (100%) read, 2 GB/s, 0 s left"),
        (1_000, 7_300_000, 1.0, "1 kB of 7.3 MB (0%) read, 1 kB/s, 2 h 1 min left"),
        (0, 10, 1.0, ""),
        (10, 0, 1.0, ""),
    ],
)
def test_the_time_left_follows_from_the_rate(read: int, size: int, seconds: float, text: str) -> None:
    """Before the first byte there is no text. The share never exceeds 100 %, although files may be read twice."""
    assert describe_progress(read, size, seconds, "read") == text


def test_the_command_shows_its_progress(tmp_path: Path) -> None:
    """`--progress` writes to standard error, and the JSON has the duration. Without it nothing is written."""
    store = large_store(tmp_path / "node")
    done = command("verify", "--root", store.root, "--progress")
    assert done.returncode in (ExitCode.FAILED, ExitCode.SHARD_LOST)
    lines = [line for line in done.stderr.splitlines() if line.startswith("verify: ")]
    assert lines, done.stderr
    assert all("of 4.29 GB" in line and line.endswith(" left") for line in lines)
    code, found = as_json("verify", "--root", store.root)
    assert code == done.returncode
    assert 0 < found["seconds"] < 120
    assert "verify: " not in command("verify", "--root", store.root).stderr


def test_an_agent_reports_its_progress(tmp_path: Path) -> None:
    """Another node's progress is in the sum while its check runs, and not before or after."""
    own, other = LocalStore(tmp_path / "own"), large_store(tmp_path / "other")
    checkpointed([own], 2, {shard(0): (0,)}, checkpoint_id="step-2", copies=1)
    with running_agent(other.root) as agent:
        introduced(own, [agent.endpoint.address()])
        auditor = Auditor(own)
        with agent.peer() as client:
            assert client.call("GET", "/v1/status")["verify"] == {"bytes_read": 0, "size_bytes": 0}
        thread = threading.Thread(target=auditor.audit, daemon=True)
        thread.start()
        read, size = wait_for(lambda: sum_read(auditor, agent.endpoint.node_id), 60, "progress")
        assert read > 0
        assert size == LARGE_BYTES
        thread.join(120)
        time.sleep(0.1)
        with agent.peer() as client:
            assert client.call("GET", "/v1/status")["verify"] == {"bytes_read": 0, "size_bytes": 0}


def sum_read(auditor: Auditor, node: str) -> tuple[int, int] | None:
    found = auditor.look_how_far().get(node, (0, 0))
    return found if found[0] else None
