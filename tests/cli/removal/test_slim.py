"""`slim` leaves only the weights of a checkpoint on this node: refusals, other nodes, and the output of `ls`."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.cli.main import main
from replicated_ckpt.core.parts import Part
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.local.versions.readers import lock_version
from tests.agent.agents import running_agent
from tests.agent.checkpoints import checkpointed, findings, held, introduced, shard, with_optimizer

WHOLE = with_optimizer({shard(0): (0, 1), shard(1): (1, 0)})
LINEAGE = "a" * 16
Capsys = pytest.CaptureFixture[str]


@pytest.fixture
def stores(tmp_path: Path) -> list[LocalStore]:
    """Two nodes with three checkpoints. The second node has no agent."""
    stores = [LocalStore(tmp_path / f"node{index}") for index in range(2)]
    for number in (1, 2, 3):
        checkpointed(stores, number, WHOLE, checkpoint_id=f"step-{number}", size_bytes=3000, lineage=LINEAGE)
    return stores


def run(capsys: Capsys, *words: str | Path) -> tuple[int, str]:
    capsys.readouterr()
    code = main([*map(str, words)])
    return code, capsys.readouterr().out


def contents(capsys: Capsys, store: LocalStore) -> dict[str, str]:
    _, out = run(capsys, "ls", "--root", store.root, "-o", "json")
    return {row["checkpoint_id"]: row["content"] for row in json.loads(out)["checkpoints"]}


def check_weights(store: LocalStore, steps: Sequence[int]) -> None:
    for step in (1, 2, 3):
        wanted = set(WHOLE) if step not in steps else {shard(0), shard(1)}
        assert held(store, f"step-{step}") == wanted
    assert findings(store) == []


def test_a_checkpoint_is_slimmed(stores: list[LocalStore], capsys: Capsys) -> None:
    """A dry run prints the size. `slim` runs once, `ls` and `show` report it, and a load that reads the checkpoint
    prevents it.
    """
    store = stores[0]
    slim = "slim", "step-1", "--root", store.root
    code, out = run(capsys, *slim, "--dry-run")
    assert (code, contents(capsys, store)["step-1"]) == (ExitCode.OK, "full")
    assert "would remove optim of step-1 (save 00000000000000000000000000000001) from this node: " in out
    lock = lock_version(store.catalog, "step-1", f"{1:032x}")
    assert lock is not None
    code, out = run(capsys, *slim)
    assert (code, out.splitlines()) == (ExitCode.FAILED, [f"kept: step-1: {_READ}"])
    lock.release()
    code, out = run(capsys, *slim)
    assert code == ExitCode.OK
    assert "step-1 keeps its weights alone on this node: optim was removed (" in out
    assert contents(capsys, store) == {"step-1": "weights", "step-2": "full", "step-3": "full"}
    assert "weights, without optim" in run(capsys, "show", "step-1", "--root", store.root)[1]
    code, out = run(capsys, *slim, "-o", "json")
    assert (code, json.loads(out)["freed_bytes"], json.loads(out)["dropped"]) == (ExitCode.OK, 0, ["optim"])
    check_weights(store, [1])


_READ = "a load reads it, or its save has not ended on this node; run the command again later"


def test_the_last_full_checkpoint_stays(stores: list[LocalStore], capsys: Capsys) -> None:
    """Without --force the last full checkpoint stays."""
    store = stores[0]
    assert run(capsys, "slim", "step-1", "--root", store.root)[0] == ExitCode.OK
    assert run(capsys, "slim", "step-3", "--root", store.root)[0] == ExitCode.OK
    code, out = run(capsys, "slim", "step-2", "--root", store.root)
    assert code == ExitCode.FAILED
    assert out.startswith("refused: step-2 is the last full checkpoint of its run that was seen; nothing was changed")
    check_weights(store, [1, 3])
    assert run(capsys, "slim", "step-2", "--root", store.root, "--force")[0] == ExitCode.OK
    check_weights(store, [1, 2, 3])


def test_a_node_that_is_still_full_is_named(stores: list[LocalStore], capsys: Capsys) -> None:
    """The command names the node, and `verify` and `repair` find nothing to do on either node."""
    with running_agent(stores[1].root, "--lost-after-s", "60") as other:
        introduced(stores[0], [other.endpoint.address()])
        code, out = run(capsys, "slim", "step-1", "--root", stores[0].root)
        assert code == ExitCode.FAILED
        assert "still full on " in out
        assert f"for example with `ssh host1 'replicated-ckpt slim step-1 --root {stores[0].root}'`" in out, out
        assert run(capsys, "verify", "--root", stores[0].root)[0] == ExitCode.OK
        assert run(capsys, "repair", "--root", stores[0].root)[0] == ExitCode.OK
        assert contents(capsys, stores[0])["step-1"] == "weights"
    assert (stores[1].root / "step-1" / shard(0, Part.OPTIMIZER)).exists()
    check_weights(stores[0], [1])
    check_weights(stores[1], [])


def test_a_checkpoint_without_optimizer_is_refused(tmp_path: Path, capsys: Capsys) -> None:
    """A checkpoint without optimizer files is refused, and nothing changes."""
    store = LocalStore(tmp_path / "node")
    checkpointed([store], 1, {shard(0): (0,)}, size_bytes=3000)
    code, out = run(capsys, "slim", "step-1", "--root", store.root, "--force")
    assert (code, out.splitlines()) == (ExitCode.FAILED, [f"refused: step-1 {_NONE}; nothing was changed"])
    assert findings(store) == []
    assert main(["slim", "step-9", "--root", str(store.root)]) != ExitCode.OK


def test_an_optimizer_without_files_of_its_own_is_refused(tmp_path: Path, capsys: Capsys) -> None:
    """A small optimizer lies in the model's files: its removal would free nothing."""
    store = LocalStore(tmp_path / "node")
    layout = with_optimizer({shard(0): (0,)})
    manifest = checkpointed([store], 1, layout, copies=1, size_bytes=3000, lineage=LINEAGE)
    manifest = replace(manifest, shards={shard(0): manifest.shards[shard(0)]})
    (store.root / "step-1" / shard(0, Part.OPTIMIZER)).unlink()
    (store.root / "step-1" / ".manifest.json").write_bytes(manifest.encode())
    code, out = run(capsys, "slim", "step-1", "--root", store.root, "--force")
    assert (code, out.splitlines()) == (ExitCode.FAILED, [f"refused: step-1 {_NONE}; nothing was changed"])
    assert contents(capsys, store)["step-1"] == "full"


_NONE = "has no optimizer in separate files, or nothing but an optimizer"
