"""`rm` takes a checkpoint from the bucket with its last copy on a node, also where it runs on several nodes at once."""

import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from replicated_ckpt.agent.peers.address_book import PeerBook
from replicated_ckpt.agent.state.targets import TargetBook
from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.cli.look.checkpoints import CheckpointSeen
from replicated_ckpt.cli.main import main
from replicated_ckpt.cli.removal.remover import Removed, Remover
from replicated_ckpt.stores.bucket_client.url import ObjectTarget
from replicated_ckpt.stores.local.store import LocalStore
from tests.agent.agents import wait_for
from tests.agent.checkpoints import checkpointed, findings
from tests.agent.repair.test_reprotect import PAIR, agents, stores
from tests.cli.commands import command

pytestmark = [pytest.mark.fault, pytest.mark.timeout(180)]
URL = "s3://bucket/run"


def uploaded(folder: Path) -> list[LocalStore]:
    nodes = stores(folder, 2)
    for number in (1, 2):
        checkpointed(nodes, number, PAIR, checkpoint_id=f"step-{number}", url=URL)
    return nodes


@pytest.fixture
def gone_from_bucket(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What the commands of this process have removed from buckets."""
    gone: list[tuple[str, str]] = []
    monkeypatch.setattr(Remover, "_remove_from", lambda _, url, row: gone.append((url, row.checkpoint_id)))
    return gone


def remove(store: LocalStore) -> int:
    return main(["rm", "step-1", "--root", str(store.root)])


def test_run_on_all_nodes_at_once_it_goes_from_the_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone_from_bucket: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Each command looks before the other one removes: each left it there for the other, which was not to be run again."""
    nodes, codes = uploaded(tmp_path), []
    carry_out = Remover.carry_out

    def carried_out_late(self: Remover, chosen: Sequence[CheckpointSeen]) -> Removed:
        monkeypatch.setattr(Remover, "carry_out", carry_out)
        codes.append(remove(nodes[1]))
        return carry_out(self, chosen)

    monkeypatch.setattr(Remover, "carry_out", carried_out_late)
    with agents(nodes):
        codes.append(remove(nodes[0]))
    said = capsys.readouterr().out
    assert f"not removed from {URL}: step-1" in said, "of the first one, while the other node had it"
    assert codes == [ExitCode.FAILED, ExitCode.OK]
    assert gone_from_bucket == [(URL, "step-1")]
    assert said.endswith(f"removed from {URL}: step-1\n"), "of the last one"
    assert [findings(store) for store in nodes] == [[], []]


def test_what_a_half_upload_has_brought_goes_with_the_last_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run on all nodes at once: no mark tells of it, and the manifest that names its shards is gone from the nodes."""
    url, carry_out = f"file://{tmp_path}/bucket", Remover.carry_out
    nodes = stores(tmp_path, 2)
    for number in (1, 2):
        checkpointed(nodes, number, PAIR, checkpoint_id=f"step-{number}", url=url)
    TargetBook(nodes[0].agent_directory()).learn(ObjectTarget.check(url, {}))  # the other one brings nothing

    def carried_out_late(self: Remover, chosen: Sequence[CheckpointSeen]) -> Removed:
        monkeypatch.setattr(Remover, "carry_out", carry_out)
        assert remove(nodes[1]) == ExitCode.FAILED
        return carry_out(self, chosen)

    def arrived() -> list[str]:
        return sorted(path.parent.name for path in (tmp_path / "bucket").rglob("*.distcp"))

    with agents(nodes, "--lost-after-s", "600"):
        wait_for(lambda: arrived() == ["step-1", "step-2"], 30, "half of each upload")
        monkeypatch.setattr(Remover, "carry_out", carried_out_late)
        assert remove(nodes[0]) == ExitCode.OK, capsys.readouterr().out
    assert arrived() == ["step-2"]
    assert [findings(store) for store in nodes] == [[], []]


def test_a_node_whose_address_is_lost_keeps_it_in_the_bucket(
    tmp_path: Path, gone_from_bucket: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """The address book is damaged: the manifest names the other node still, which was not asked, and has it."""
    nodes = uploaded(tmp_path)
    with agents(nodes):
        (nodes[0].root / ".agent" / "peers.json").write_text("[")
        assert remove(nodes[0]) == ExitCode.UNREACHABLE
    said = capsys.readouterr().out
    label = f"host1 (node {nodes[1].node_id()})"
    assert f"{label} was not asked, as its address is not known here, and may hold step-1" in said
    assert f"once no node has it the same command with `--object-store {URL}`" in said
    assert (gone_from_bucket, (nodes[1].root / "step-1").exists()) == ([], True)
    assert [findings(store) for store in nodes] == [[], []]


def test_a_forgotten_node_is_not_waited_for(tmp_path: Path, gone_from_bucket: list[Any]) -> None:
    """The user has said that it never comes back, though manifests name it."""
    nodes = uploaded(tmp_path)
    with agents(nodes) as running:
        running[1].signal(signal.SIGKILL)
        running[1].process.wait()
        shutil.rmtree(nodes[1].root)
        assert command("forget", "host1", "--root", nodes[0].root).returncode == ExitCode.OK
        assert len(PeerBook(nodes[0].root / ".agent").read_forgotten()) == 1
        assert remove(nodes[0]) == ExitCode.OK
    assert set(gone_from_bucket) == {(URL, "step-1")}
    assert findings(nodes[0]) == []
