"""`rm` refuses before any agent changes something, and prints JSON on request."""

import json
import shutil
from pathlib import Path

import pytest

from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.cli.look.nodes import NodesSeen
from replicated_ckpt.cli.main import main
from replicated_ckpt.cli.removal import remover
from replicated_ckpt.core.inventory import Holding
from replicated_ckpt.core.layout import MANIFEST_NAME
from replicated_ckpt.errors import StoreUnavailable
from replicated_ckpt.node.peers.watch import NodeHoldings
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.peer.client import AgentAddress
from tests.agent.agents import wait_for
from tests.agent.checkpoints import checkpointed, findings, shard
from tests.agent.repair.test_reprotect import PAIR, agents, protected, stores
from tests.cli.commands import command

NOWHERE = AgentAddress("b", "127.0.0.1", 1, "token")


def use_view(monkeypatch: pytest.MonkeyPatch, seen: NodesSeen) -> None:
    """The command sees these nodes. The agent does not answer."""
    monkeypatch.setattr(remover, "start_agent", lambda store: NOWHERE)
    monkeypatch.setattr(remover, "look_at_nodes", lambda store: seen)


def test_a_save_without_a_manifest_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only another node holds the save, and no node returned its manifest: it may be the last complete one. --force
    continues.
    """
    store = LocalStore(tmp_path / "node0")
    own = store.node_id()
    held = {own: NodeHoldings(()), "b": NodeHoldings((Holding("b", "step-1", "1" * 32, 1, True),))}
    use_view(monkeypatch, NodesSeen(own, held, {"b": NOWHERE}, {}, {}))
    assert main(["rm", "step-1", "--root", str(store.root)]) == ExitCode.FAILED
    printed = capsys.readouterr().out
    assert printed.startswith("refused: step-1 lies on other nodes only, and none returned its manifest")
    assert "nothing was changed" in printed
    assert main(["rm", "step-1", "--root", str(store.root), "--force"]) == ExitCode.FAILED
    assert "kept: step-1: POST '/v1/remove' at node b" in capsys.readouterr().out


def test_a_checkpoint_that_may_be_the_last_good_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half of each checkpoint lies on a silent node: the output says "may be the last good checkpoint"."""
    here, there = (LocalStore(tmp_path / name) for name in ("here", "there"))
    halves: dict[str, list[int]] = {shard(0): [0], shard(1): [1]}
    made = {one.save_id: one for one in (checkpointed([here, there], n, halves, copies=1) for n in (1, 2))}
    own, other = here.node_id(), there.node_id()
    away = StoreUnavailable("host1", "ask", "", "it is away")
    held = {own: NodeHoldings(here.catalog.holdings(own))}
    use_view(monkeypatch, NodesSeen(own, held, {other: NOWHERE}, {other: away}, made))
    root = ["--root", str(here.root)]
    assert main(["rm", "step-1", *root]) == ExitCode.FAILED
    printed = capsys.readouterr().out
    assert (
        "refused: step-1 may be the last good checkpoint of its run: it was not seen complete, as host1 did not"
        in printed
    )
    assert main(["prune", "--keep-last", "1", *root]) == ExitCode.OK
    assert f"host1 (node {other}): not reached: it is away" in capsys.readouterr().out, (
        "the reason that nothing is removed"
    )


def test_a_refusal_and_a_dry_run_print_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A refusal is in `kept` with its reason. A dry run has a plan, and nothing in `removed`."""
    store = LocalStore(tmp_path / "node0")
    own = store.node_id()
    made = checkpointed([store], 1, {shard(0): (0,)}, copies=1, size_bytes=3000)
    use_view(
        monkeypatch, NodesSeen(own, {own: NodeHoldings(store.catalog.holdings(own))}, {}, {}, {made.save_id: made})
    )
    assert main(["rm", "step-1", "--root", str(store.root), "-o", "json"]) == ExitCode.FAILED
    assert json.loads(capsys.readouterr().out)["kept"] == {"step-1": "is the last good checkpoint of its run"}
    assert main(["rm", "step-1", "--root", str(store.root), "-o", "json", "--force", "--dry-run"]) == ExitCode.OK
    found = json.loads(capsys.readouterr().out)
    assert (found["dry_run"], found["removed"]) == (True, [])
    assert found["plan"] == [{"checkpoint_id": "step-1", "save_id": made.save_id, "on": [own]}]


@pytest.mark.fault
@pytest.mark.timeout(240)
def test_files_without_a_manifest_are_kept(tmp_path: Path) -> None:
    """`rm` keeps files without a manifest, and prints the `rm -r` that removes them. They do not come back."""
    nodes = stores(tmp_path, 3)
    for number in (1, 2):
        checkpointed(nodes, number, PAIR, checkpoint_id=f"step-{number}", size_bytes=3000)
    with agents(nodes) as running:
        assert "removed on this node: step-1" in command("rm", "step-1", "--root", nodes[2].root).stdout
        (nodes[0].root / "step-1" / MANIFEST_NAME).write_bytes(b"damaged")
        done = command("rm", "step-1", "--root", nodes[0].root)
        assert done.returncode == ExitCode.FAILED
        assert "not on this node" not in done.stdout
        assert f"`rm -r {nodes[0].root / 'step-1'}` removes them" in done.stdout
        shutil.rmtree(nodes[0].root / "step-1")
        wait_for(protected(running[0]), 30, "a round")
        assert "not on this node" in command("rm", "step-1", "--root", nodes[0].root).stdout
    assert [findings(store) for store in nodes] == [[], [], []]


@pytest.mark.fault
@pytest.mark.timeout(120)
def test_a_checkpoint_without_any_manifest_is_refused(tmp_path: Path) -> None:
    """The exit code is that of a refusal, not of a usage error."""
    store = LocalStore(tmp_path / "node")
    checkpointed([store], 1, {shard(0): (0,)}, checkpoint_id="step-1", copies=1, size_bytes=3000)
    (store.root / "step-1" / MANIFEST_NAME).write_bytes(b"damaged")
    done = command("rm", "step-1", "--root", store.root)
    assert (done.returncode, done.stdout) == (ExitCode.FAILED, "")
    assert f"`rm -r {store.root / 'step-1'}`" in done.stderr
