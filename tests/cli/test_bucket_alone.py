"""`ls`, `show` and `verify` of a bucket without a node's store, and the root from the environment."""

import json
from pathlib import Path

import pytest

from replicated_ckpt.cli.exit_codes import ExitCode
from tests.agent.checkpoints import checkpointed, shard
from tests.agent.repair.test_reprotect import stores
from tests.cli.commands import as_json, command
from tests.damage import flip

pytestmark = pytest.mark.timeout(120)
ROOT_ENV = "REPLICATED_CKPT_ROOT"


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    (node,) = stores(folder, 1)
    for number in (1, 2):
        checkpointed([node], number, {shard(0): (0,)}, checkpoint_id=f"step-{number}", copies=1)
        done = command("upload", f"step-{number}", "--root", node.root, "--to", f"file://{folder}/bucket")
        assert done.returncode == ExitCode.OK, done.stderr
    return folder / "bucket"


def test_a_bucket_is_listed_without_a_root(bucket: Path) -> None:
    """Each command prints what the bucket contains, and that no node was asked."""
    url = f"file://{bucket}"
    done = command("ls", "--object-store", url)
    assert (done.returncode, done.stderr) == (ExitCode.OK, "")
    assert done.stdout.splitlines()[-1] == f"2 checkpoints, 1.4 MB in {url}; no node was asked, as there is no --root"
    assert "no node was asked" in done.stdout.splitlines()[1]
    _, found = as_json("ls", "--object-store", url)
    assert [row["checkpoint_id"] for row in found["checkpoints"]] == ["step-2", "step-1"]
    done = command("show", "latest", "--object-store", url)
    assert (done.returncode, done.stderr) == (ExitCode.OK, "")
    assert done.stdout.startswith(f"step-2 in {url}; no node was asked")
    assert done.stdout.splitlines()[-1].split() == [shard(0), "700", "kB", "rank", "0", "there"]
    done = command("verify", "--object-store", url)
    assert (done.returncode, done.stdout.splitlines()[-1].endswith("bytes read: intact")) == (ExitCode.OK, True)
    done = command("verify", "step-9", "--object-store", url)
    assert (done.returncode, done.stdout) == (ExitCode.NOT_FOUND, "")
    assert "`replicated-ckpt ls --object-store URL` lists the checkpoints there" in done.stderr


def test_a_file_is_not_listed_as_an_empty_bucket(tmp_path: Path) -> None:
    """A URL that names a file is an error. A directory that no save has created yet is an empty bucket."""
    (tmp_path / "file").write_bytes(b"x")
    done = command("ls", "--object-store", f"file://{tmp_path}/file")
    assert (done.returncode, done.stdout) == (ExitCode.FAILED, "")
    assert f"list file://{tmp_path}/file: it is a file, not a directory. Hint: Correct the URL" in done.stderr
    done = command("ls", "--object-store", f"file://{tmp_path}/none")
    assert done.returncode == ExitCode.OK
    assert f"0 checkpoints, 0 B in file://{tmp_path}/none" in done.stdout


def test_damage_in_a_bucket_shows_in_the_exit_code(bucket: Path) -> None:
    """`verify` finds a flipped bit, `show` a missing file."""
    (path,) = bucket.glob(f"step-1/**/{shard(0)}")
    was = path.read_bytes()
    flip(path, 100)
    assert command("verify", "step-1", "--object-store", f"file://{bucket}").returncode == ExitCode.FAILED
    path.unlink()
    code, found = as_json("show", "step-1", "--object-store", f"file://{bucket}")
    assert (code, found["saves"][0]["shards"][shard(0)]["is_there"]) == (ExitCode.SHARD_LOST, False)
    path.write_bytes(was)


@pytest.mark.parametrize("verb", [("ls",), ("show", "step-1"), ("verify",)])
def test_without_any_store_the_command_is_a_usage_error(verb: tuple[str, ...]) -> None:
    """Without `--root`, `--nodes` and `--object-store`, the error names all three."""
    done = command(*verb)
    assert (done.returncode, done.stdout) == (ExitCode.USAGE, "")
    assert (
        f"Name a node's store with --root or {ROOT_ENV}, or agents with --nodes, or a bucket alone with --object-store."
        in done.stderr
    )


def test_the_environment_names_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--root` overrides the variable, and an empty variable is ignored."""
    first, second = stores(tmp_path, 2)
    for number, node in enumerate((first, second), 1):
        checkpointed([node], number, {shard(0): (0,)}, checkpoint_id=f"step-{number}", copies=1)
    monkeypatch.setenv(ROOT_ENV, str(first.root))
    assert "step-1" in command("ls").stdout
    assert "step-2" in command("ls", "--root", second.root).stdout
    found = command("show", "step-1", "-o", "json")
    assert json.loads(found.stdout)["checkpoint_id"] == "step-1"
    monkeypatch.setenv(ROOT_ENV, "")
    done = command("status")
    assert (done.returncode, "--root" in done.stderr) == (ExitCode.USAGE, True)
