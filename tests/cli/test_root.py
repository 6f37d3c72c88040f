"""A `--root` that is not a store of this user is refused, with the root to use instead."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.environment import TRUST_ROOT_ENV
from replicated_ckpt.errors import ConfigInvalid
from replicated_ckpt.stores.local.store import LocalStore
from tests.agent.checkpoints import checkpointed, shard
from tests.cli.commands import command

pytestmark = [pytest.mark.fault, pytest.mark.timeout(120)]
NOBODY = 65534
VERBS = ("ls", "verify", "repair")
NO_STORE = {
    "missing": ExitCode.NOT_FOUND,
    "file": ExitCode.NOT_FOUND,
    "empty": ExitCode.NOT_FOUND,
    "foreign": ExitCode.NOT_FOUND,
    "store/run/step-1": ExitCode.USAGE,
    "store/run": ExitCode.USAGE,
    "above": ExitCode.USAGE,
    "far": ExitCode.USAGE,
    "mixed": ExitCode.USAGE,
}
SAID = {
    "missing": "If this is the right directory, its disk is not mounted, or is new",
    "file": "is a file",
    "empty": "is empty",
    "foreign": "no checkpoint. It has notes.txt",
    "store/run/step-1": "is one checkpoint",
    "store/run": "lies in another store",
    "above": "is not a node's store, and holds 2 stores",
    "far": "is not a node's store, and holds 2 stores",
    "mixed": "is not a node's store, and holds 1 store",
}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("places")
    (base / "file").write_text("x")
    (base / "empty" / "lost+found").mkdir(parents=True)
    (base / "foreign").mkdir()
    (base / "foreign" / "notes.txt").write_text("x")
    for name in ("above/node-0", "above/node-1", "far/node-0/ckpt", "far/node-1/ckpt", "mixed/node-0"):
        checkpointed([LocalStore(base / name)], 1, {shard(0): (0,)}, copies=1, size_bytes=3000)
    shutil.copytree(base / "mixed/node-0/step-1", base / "mixed/old")
    (base / "mixed/old/.manifest.json").unlink()  # like a checkpoint of FileSystemWriter
    store = LocalStore(base / "store")
    checkpointed([store], 1, {shard(0): (0,)}, checkpoint_id="run/step-1", copies=1, size_bytes=3000)
    return base


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("place", NO_STORE)
def test_a_root_that_is_no_store_is_refused(places: Path, place: str, verb: str) -> None:
    """The error says what the path is and the next step. The exit code is not 0, and nothing is created."""
    before = sorted(str(path) for path in places.rglob("*"))
    done = command(verb, "--root", places / place)
    assert (done.returncode, done.stdout) == (NO_STORE[place], "")
    assert SAID[place] in done.stderr
    assert "--root" in done.stderr.partition("Hint:")[2]
    assert "Traceback" not in done.stderr
    assert sorted(str(path) for path in places.rglob("*")) == before


@pytest.mark.parametrize("place", ["above", "file", "store/run"])
def test_an_agent_creates_no_nested_store(places: Path, place: str) -> None:
    """Nested stores would share checkpoints. `agent` exits with the same code and error as `ls`."""
    before = sorted(str(path) for path in places.rglob("*"))
    done = command("agent", "--root", places / place)
    assert (done.returncode, done.stdout) == (NO_STORE[place], "")
    assert SAID[place] in done.stderr
    assert sorted(str(path) for path in places.rglob("*")) == before


@pytest.mark.parametrize("make", [LocalStore.node_id, LocalStore.agent_directory, LocalStore.read_node_id])
@pytest.mark.parametrize("place", ["above", "far", "store/run", "store/ema"])
def test_a_rank_creates_no_nested_store(places: Path, make: Callable[[LocalStore], object], place: str) -> None:
    """A rank creates nothing there, whichever part of the store it needs first."""
    before = sorted(str(path) for path in places.rglob("*"))
    with pytest.raises(ConfigInvalid, match=SAID.get(place, "lies in another store")):
        make(LocalStore(places / place))
    assert sorted(str(path) for path in places.rglob("*")) == before


def test_a_link_into_a_store_is_refused_as_a_root(places: Path, tmp_path: Path) -> None:
    """A symbolic link counts as the directory that it leads to."""
    (tmp_path / "link").symlink_to(places / "store/run")
    with pytest.raises(ConfigInvalid, match=SAID["store/run"]):
        LocalStore(tmp_path / "link").node_id()


def test_another_programs_file_above_a_root_is_no_store(tmp_path: Path) -> None:
    """A node.json without an identity does not make its directory a store."""
    (tmp_path / "node.json").write_text('{"name": "a program of its own"}')
    assert LocalStore(tmp_path / "ckpt").node_id() == LocalStore(tmp_path / "ckpt").read_node_id()


def test_a_store_that_was_copied_into_another_one_is_not_listed_there(places: Path, tmp_path: Path) -> None:
    """The checkpoints of a nested store, such as a backup, are neither listed nor treated as damaged or stock ones."""
    outer = LocalStore(tmp_path / "outer")
    checkpointed([outer], 1, {shard(0): (0,)}, checkpoint_id="run/step-1", copies=1, size_bytes=3000)
    shutil.copytree(places / "store", tmp_path / "outer/run/backup")
    shutil.copytree(places / "mixed/old", tmp_path / "outer/run/backup/old")
    found = [[*find()] for find in (outer.catalog.directories, outer.catalog.without_manifest)]
    assert [[name for name, _ in outer.catalog.committed()], *found] == [["run/step-1"], ["run/step-1"], []]


@pytest.mark.parametrize("verb", VERBS)
def test_a_root_without_a_name_is_refused(verb: str) -> None:
    """An empty path would mean the current directory."""
    done = command(verb, "--root", "")
    assert (done.returncode, done.stdout) == (ExitCode.USAGE, "")
    assert "--root must name a directory, not ''" in done.stderr


@pytest.mark.parametrize("verb", VERBS)
def test_an_unreadable_root_is_an_error(tmp_path: Path, verb: str) -> None:
    """A root that the system cannot read is an error without a traceback."""
    root = tmp_path / "store"
    root.symlink_to(root)
    done = command(verb, "--root", root)
    assert (done.returncode, done.stdout) == (ExitCode.FAILED, "")
    assert f"look at {root}: OSError" in done.stderr


def test_a_checkpoint_beside_stores_has_a_next_step(places: Path) -> None:
    """The hint also names a checkpoint that lies beside the stores, with the way to list it."""
    hint = command("ls", "--root", places / "mixed").stderr.partition("Hint:")[2]
    assert f"--root {places / 'mixed/node-0'}." in hint
    assert "To list old, which lie in no store, move them to a directory of their own." in hint


def test_a_root_inside_a_store_names_that_store(places: Path) -> None:
    """The hint has the `--root` of the store and the id of the checkpoint."""
    done = command("verify", "--root", places / "store/run/step-1")
    assert f"--root {places / 'store'}. In it, this is the checkpoint 'run/step-1'" in done.stderr
    assert command("verify", "--root", places / "store", "run/step-1").returncode == ExitCode.OK


@pytest.fixture
def open_place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rckpt-") as base:
        Path(base).chmod(0o755)
        yield Path(base)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root acts as another user")
@pytest.mark.parametrize("mode", [0o700, 0o755])
@pytest.mark.parametrize("verb", VERBS)
def test_another_users_store_is_named_as_such(open_place: Path, verb: str, mode: int) -> None:
    """The exit code is 5, whether the store is readable or not. Nothing is written, and the error does not mention
    damage.
    """
    root = open_place / "store"
    checkpointed([LocalStore(root)], 1, {shard(0): (0,)}, copies=1, size_bytes=3000)
    root.chmod(mode)
    done = command(verb, "--root", root, user=NOBODY)
    assert (done.returncode, done.stdout) == (ExitCode.UNREACHABLE, "")
    assert "the store of user root" in done.stderr
    assert ("may not read it" in done.stderr) == (mode == 0o700)
    assert "sudo -u root" in done.stderr
    assert done.stderr.count(str(root)) == 1, "the path is printed once"
    assert not {"intact", "defect", "Traceback"} & set(done.stderr.replace(".", " ").split())
    for path in (root, *root.rglob("*")):
        os.chown(path, NOBODY, -1)
    done = command(verb, "--root", root)
    assert (done.returncode, done.stdout) == (ExitCode.UNREACHABLE, "")
    assert "the store of user nobody" in done.stderr
    assert "sudo -u nobody" in done.stderr
    assert not (root / ".agent").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root acts as another user")
@pytest.mark.parametrize("verb", VERBS)
def test_an_unreadable_checkpoint_is_not_missing(open_place: Path, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    """Where stores of all users are trusted, an unreadable checkpoint is an error, not a missing checkpoint."""
    monkeypatch.setenv(TRUST_ROOT_ENV, "1")
    root = open_place / "store"
    checkpointed([LocalStore(root)], 1, {shard(0): (0,)}, copies=1, size_bytes=3000)
    root.chmod(0o755)
    done = command(verb, "--root", root, user=NOBODY)
    assert (done.returncode, done.stdout) == (ExitCode.UNREACHABLE, "")
    assert "this user may not read 'step-1' in it" in done.stderr
