"""`rm` removes a checkpoint from the bucket with its last copy on a node, also if it runs on several nodes at once."""

import errno
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.cli.look.checkpoints import CheckpointSeen
from replicated_ckpt.cli.main import main
from replicated_ckpt.cli.removal.remover import Removed, Remover
from replicated_ckpt.config import Retention
from replicated_ckpt.core.upkeep.policy import Policy
from replicated_ckpt.node.peers.address_book import PeerBook
from replicated_ckpt.node.state.policies import PolicyBook
from replicated_ckpt.node.state.upload_book import UploadBook
from replicated_ckpt.stores.bucket_client.url import ObjectTarget
from replicated_ckpt.stores.files.durable import store_error_of
from replicated_ckpt.stores.local.store import LocalStore
from tests.agent.agents import wait_for
from tests.agent.checkpoints import checkpointed, findings, shard
from tests.agent.repair.test_reprotect import PAIR, agents, protected, status, stores
from tests.cli.commands import command
from tests.damage import flip

pytestmark = [pytest.mark.fault, pytest.mark.timeout(180)]
URL = "s3://bucket/run"
RUN = "a" * 16


def uploaded(folder: Path) -> list[LocalStore]:
    nodes = stores(folder, 2)
    for number in (1, 2):
        checkpointed(nodes, number, PAIR, checkpoint_id=f"step-{number}", url=URL)
    return nodes


def test_a_dry_run_names_the_bucket(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The save is also removed from there, unless --keep-in-bucket is given. The hint for a full disk has the option."""
    dry_run = ["rm", "step-1", "--dry-run", "--force", "--root", str(uploaded(tmp_path)[0].root)]
    assert main(dry_run) == ExitCode.OK
    expected = f"also removed from {URL} once no node has it, unless --keep-in-bucket is given: step-1\n"
    assert expected in capsys.readouterr().out
    assert main([*dry_run, "--keep-in-bucket"]) == ExitCode.OK
    assert "also removed" not in capsys.readouterr().out
    for number in (errno.ENOSPC, errno.EDQUOT):
        assert (
            "prune --root ROOT --keep-last N --keep-in-bucket`" in store_error_of(OSError(number, ""), "", "", "").hint
        )


@pytest.fixture
def gone_from_bucket(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What the commands of this process have removed from buckets."""
    gone: list[tuple[str, str]] = []
    monkeypatch.setattr(Remover, "_remove_from", lambda _, url, row: gone.append((url, row.checkpoint_id)))
    return gone


def test_one_command_with_the_key_removes_from_all_nodes_and_the_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone_from_bucket: list[Any]
) -> None:
    """Once no node holds a copy, the bucket's copy is removed. If a node refuses, it stays."""
    nodes, key = uploaded(tmp_path), tmp_path / "key"
    key.write_text("k" * 64)
    key.chmod(0o600)
    monkeypatch.setenv("REPLICATED_CKPT_OWNER_KEY", str(key))
    with agents(nodes):
        key.write_text("x" * 64)  # agents read their key when they start
        assert (remove(nodes[0]), gone_from_bucket) == (ExitCode.FAILED, [])
        key.write_text("k" * 64)
        assert (remove(nodes[0]), set(gone_from_bucket)) == (ExitCode.OK, {(URL, "step-1")})
        assert not any((store.root / "step-1").exists() for store in nodes)


def remove(store: LocalStore) -> int:
    return main(["rm", "step-1", "--root", str(store.root)])


def test_rm_on_all_nodes_at_once_removes_from_the_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone_from_bucket: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Two commands both look before either removes: the last one to finish removes the copy in the bucket."""
    nodes, codes = uploaded(tmp_path), []
    carry_out = Remover.carry_out

    def carried_out_late(self: Remover, chosen: Sequence[CheckpointSeen]) -> Removed:
        monkeypatch.setattr(Remover, "carry_out", carry_out)
        codes.append(remove(nodes[1]))
        return carry_out(self, chosen)

    monkeypatch.setattr(Remover, "carry_out", carried_out_late)
    with agents(nodes):
        codes.append(remove(nodes[0]))
    printed = capsys.readouterr().out
    assert f"not removed from {URL}: step-1" in printed, "printed by the first command, while the other node had a copy"
    assert codes == [ExitCode.FAILED, ExitCode.OK]
    assert gone_from_bucket == [(URL, "step-1")]
    assert printed.endswith(f"removed from {URL}: step-1\n"), "printed by the last command"
    assert [findings(store) for store in nodes] == [[], []]


def test_a_partial_upload_is_removed_with_the_last_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`rm` runs on all nodes at once during an upload: the partial upload is removed although its manifest is gone."""
    url, carry_out = f"file://{tmp_path}/bucket", Remover.carry_out
    nodes = stores(tmp_path, 2)
    for number in (1, 2):
        checkpointed(nodes, number, PAIR, checkpoint_id=f"step-{number}", url=url)
    UploadBook(nodes[0].agent_directory()).learn(
        ObjectTarget.check_supported(url, {})
    )  # the other node uploads nothing

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


def test_a_node_without_an_address_keeps_the_copy_in_the_bucket(
    tmp_path: Path, gone_from_bucket: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """The address book is damaged: a node of the manifest was not asked, so the bucket's copy stays."""
    nodes = uploaded(tmp_path)
    with agents(nodes):
        (nodes[0].root / ".agent" / "peers.json").write_text("[")
        assert remove(nodes[0]) == ExitCode.UNREACHABLE
    printed = capsys.readouterr().out
    label = f"host1 (node {nodes[1].node_id()})"
    assert f"{label} was not asked, as this node has no address of it, and may hold step-1" in printed
    assert f"once no node has it the same command with `--object-store {URL}`" in printed
    assert (gone_from_bucket, (nodes[1].root / "step-1").exists()) == ([], True)
    assert [findings(store) for store in nodes] == [[], []]


def test_a_forgotten_node_is_not_waited_for(tmp_path: Path, gone_from_bucket: list[Any]) -> None:
    """A forgotten node does not count, although manifests name it."""
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


def brought_to_bucket(folder: Path, nodes: Sequence[LocalStore], count: int) -> tuple[str, Path]:
    """Checkpoints of one run that the nodes' agents will upload. Returns the URL and directory of the bucket."""
    url = f"file://{folder}/bucket"
    for number in range(1, count + 1):
        holders = {shard(0): tuple(range(len(nodes)))}
        checkpointed(nodes, number, holders, checkpoint_id=f"step-{number}", url=url, lineage=RUN, copies=len(nodes))
    for store in nodes:
        UploadBook(store.agent_directory()).learn(ObjectTarget.check_supported(url, {}))
    return url, folder / "bucket"


def marks(bucket: Path) -> list[str]:
    return sorted(path.parent.name for path in bucket.rglob(".metadata"))


def test_the_last_complete_copy_in_the_bucket_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only the bucket has the checkpoint complete: `rm` refuses, and `ls` advises `--keep-in-bucket`."""
    nodes = stores(tmp_path, 1)
    url, bucket = brought_to_bucket(tmp_path, nodes, 1)
    root = str(nodes[0].root)
    with agents(nodes):
        wait_for(lambda: marks(bucket) == ["step-1"], 30, "the upload")
        flip(nodes[0].root / "step-1" / shard(0))
        assert main(["verify", "--root", root]) == ExitCode.SHARD_LOST
        assert main(["rm", "step-1", "--root", root]) == ExitCode.FAILED
        assert "refused: step-1 is the last good checkpoint of its run" in capsys.readouterr().out
        assert main(["ls", "--root", root]) == ExitCode.OK
        assert f"`replicated-ckpt rm step-1 --root {root} --keep-in-bucket`" in capsys.readouterr().out
        assert main(["rm", "step-1", "--root", root, "--keep-in-bucket"]) == ExitCode.OK
    assert marks(bucket) == ["step-1"]
    assert findings(nodes[0]) == []
    assert main(["verify", "--root", root, "--object-store", url]) == ExitCode.OK


def test_an_unreachable_node_keeps_the_copy_in_the_bucket(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An unreachable node may hold a copy, so the bucket's copy stays until that node is forgotten."""
    nodes = stores(tmp_path, 2)
    url, bucket = brought_to_bucket(tmp_path, nodes, 2)
    with agents(nodes) as running:
        wait_for(lambda: marks(bucket) == ["step-1", "step-2"], 30, "the uploads")
        running[1].signal(signal.SIGKILL)
        running[1].process.wait(10)
        assert remove(nodes[0]) == ExitCode.UNREACHABLE
        again = ["rm", "step-1", "--root", str(nodes[0].root), "--object-store", url]
        assert main(again) == ExitCode.UNREACHABLE
        forget = f"replicated-ckpt forget {nodes[1].node_id()} --root {nodes[0].root}"
        assert f"`{forget}` first), and may hold step-1" in capsys.readouterr().out
        assert marks(bucket) == ["step-1", "step-2"]
        assert command("forget", "host1", "--root", nodes[0].root).returncode == ExitCode.OK
        assert main(again) == ExitCode.OK
    assert marks(bucket) == ["step-2"]
    assert [findings(store) for store in nodes] == [[], []]


def test_prune_leaves_a_bucket_to_the_policy_for_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`prune` leaves the bucket to the job's own policy, unless the bucket is named."""
    nodes = stores(tmp_path, 1)
    url, bucket = brought_to_bucket(tmp_path, nodes, 3)
    kept = Policy("", url, 3, Retention(keep_last=3), RUN)
    PolicyBook(nodes[0].agent_directory()).learn([kept])
    prune = ["prune", "--keep-last", "1", "--root", str(nodes[0].root)]
    with agents(nodes):
        wait_for(lambda: marks(bucket) == ["step-1", "step-2", "step-3"], 30, "the uploads")
        assert main([*prune, "--dry-run"]) == ExitCode.OK
        assert "also removed from" not in capsys.readouterr().out
        assert main([*prune, "--dry-run", "--object-store", url]) == ExitCode.OK
        assert f"also removed from {url} once no node has it" in capsys.readouterr().out
        assert main([*prune, "--dry-run", "--object-store", url, "--keep-in-bucket"]) == ExitCode.OK
        assert "also removed from" not in capsys.readouterr().out
        assert main(prune) == ExitCode.OK
        printed = capsys.readouterr().out
        assert (
            f"left in {url}, where the job's policy applies: step-1, step-2; the same command with `--object-store {url}`"
            in printed
        )
        assert "removed from" not in printed
        assert marks(bucket) == ["step-1", "step-2", "step-3"]
        assert main([*prune, "--object-store", url]) == ExitCode.OK
    assert marks(bucket) == ["step-3"]
    assert findings(nodes[0]) == []


def test_a_node_that_was_away_removes_nothing_newer_from_the_bucket(tmp_path: Path) -> None:
    """A returning node has an older policy of the run: it uploads its own checkpoint, and removes none of the newer
    ones.
    """
    away, others = stores(tmp_path, 2)
    url, bucket = brought_to_bucket(tmp_path, [away], 1)
    PolicyBook(away.agent_directory()).learn([Policy("", url, 1, Retention(keep_last=1), RUN)])
    for number in (2, 3):
        name = f"step-{number}"
        checkpointed([others], number, {shard(0): (0,)}, checkpoint_id=name, url=url, lineage=RUN, copies=1)
    UploadBook(others.agent_directory()).learn(ObjectTarget.check_supported(url, {}))
    PolicyBook(others.agent_directory()).learn([Policy("", url, 3, Retention(keep_last=9), RUN)])
    with agents([others]):
        wait_for(lambda: marks(bucket) == ["step-2", "step-3"], 30, "the run's uploads")
    with agents([away]) as running:
        wait_for(lambda: marks(bucket) == ["step-1", "step-2", "step-3"], 30, "the pending upload")
        wait_for(protected(*running), 30, "the end of all work")
    assert marks(bucket) == ["step-1", "step-2", "step-3"]
    assert [findings(store) for store in (away, others)] == [[], []]


def test_prune_leaves_another_clusters_runs_in_the_bucket(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two clusters share a prefix: `prune` leaves runs that no node here has, unless forced."""
    nodes, theirs = stores(tmp_path, 1), LocalStore(tmp_path / "theirs")
    url, bucket = brought_to_bucket(tmp_path, nodes, 2)
    for number in (11, 12):
        name = f"other-{number}"
        checkpointed([theirs], number, {shard(0): (0,)}, checkpoint_id=name, url=url, lineage="b" * 16, copies=1)
    UploadBook(theirs.agent_directory()).learn(ObjectTarget.check_supported(url, {}))
    with agents([theirs]):
        wait_for(lambda: marks(bucket) == ["other-11", "other-12"], 30, "their uploads")
    with agents(nodes):
        wait_for(lambda: len(marks(bucket)) == 4, 30, "ours")
        prune = ["prune", "--keep-last", "1", "--root", str(nodes[0].root), "--object-store", url]
        assert main(prune) == ExitCode.OK
        assert "left alone: 2 saves of runs that only the bucket has" in capsys.readouterr().out
        assert marks(bucket) == ["other-11", "other-12", "step-2"]
        assert main([*prune, "--force"]) == ExitCode.OK
    assert marks(bucket) == ["other-12", "step-2"]
    assert [findings(store) for store in (*nodes, theirs)] == [[], []]


def test_keep_in_bucket_needs_a_finished_upload(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--keep-in-bucket` refuses a checkpoint whose upload has not ended."""
    nodes = stores(tmp_path, 1)
    checkpointed(
        nodes, 1, {shard(0): (0,)}, url=URL, lineage=RUN, copies=1
    )  # without credentials, as no rank has named the bucket
    checkpointed(nodes, 2, {shard(0): (0,)}, checkpoint_id="step-2", url=URL, lineage=RUN, copies=1)
    with agents(nodes):
        assert main(["rm", "step-1", "--root", str(nodes[0].root), "--keep-in-bucket"]) == ExitCode.FAILED
        assert "is not in its bucket yet, as its upload has not ended" in capsys.readouterr().out
    assert findings(nodes[0]) == []
    assert (nodes[0].root / "step-1").exists()


def test_a_renamed_checkpoint_is_not_uploaded(tmp_path: Path) -> None:
    """A renamed checkpoint is not uploaded, and no upload is pending."""
    nodes = stores(tmp_path, 1)
    (tmp_path / "bucket").mkdir()
    brought_to_bucket(tmp_path, nodes, 1)
    (nodes[0].root / "step-1").rename(nodes[0].root / "best")
    with agents(nodes) as running:
        wait_for(protected(*running), 30, "a first round")
        assert status(running[0])["object_store"]["pending"] == {}
    assert findings(nodes[0]) == []
