"""Ownership of a store: root and `.agent` are trusted only if no other user of the host can have written there."""

import os
import stat
import subprocess
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from replicated_ckpt import CheckpointManager, ReplicatedReader, ReplicatedWriter
from replicated_ckpt.agent.state.endpoint import read_endpoint
from replicated_ckpt.cli.main import main
from replicated_ckpt.config import AgentConfig
from replicated_ckpt.core.layout import AGENT_DIR
from replicated_ckpt.environment import PLAIN_ENV, TRUST_ROOT_ENV, is_switched_on
from replicated_ckpt.errors import ConfigInvalid, StoreDenied
from replicated_ckpt.node.peers.address_book import PeerBook
from replicated_ckpt.stores.files.durable import SHARED_MODE
from replicated_ckpt.stores.files.ownership import GROUP_ENV, check_root
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.local.versions.remove import recycle

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files of other users")
NOBODY, OTHER_GROUP = 65534, 54321


def root_of_another(base: Path) -> Path:
    os.chown(base / "root", NOBODY, NOBODY)
    return base / "root"


def root_for_all(base: Path) -> Path:
    (base / "root" / "notes").touch()
    (base / "root").chmod(0o777)
    return base / "root"


def root_for_a_group(base: Path) -> Path:
    (base / "root" / "notes").touch()
    os.chown(base / "root", -1, OTHER_GROUP)
    (base / "root").chmod(0o770)
    return base / "root"


def root_for_group_0(base: Path) -> Path:
    (base / "root" / "notes").touch()
    (base / "root").chmod(0o770)  # group 0: containers run processes of any user in it
    return base / "root"


def sticky_root(base: Path) -> Path:
    (base / "root" / "notes").touch()
    (base / "root").chmod(0o1777)
    return base / "root"


def parent_for_all(base: Path) -> Path:
    base.chmod(0o777)
    return base


def parent_of_another(base: Path) -> Path:
    os.chown(base, NOBODY, -1)
    return base


def link_in_the_agents_place(base: Path) -> Path:
    (base / "theirs").mkdir(mode=0o700)
    (base / "root" / AGENT_DIR).symlink_to(base / "theirs")
    return base / "root" / AGENT_DIR


def agent_of_another(base: Path) -> Path:
    (base / "root" / AGENT_DIR).mkdir()
    os.chown(base / "root" / AGENT_DIR, NOBODY, -1)
    return base / "root" / AGENT_DIR


def agent_for_all(base: Path) -> Path:
    (base / "root" / AGENT_DIR).mkdir()
    (base / "root" / AGENT_DIR).chmod(0o1777)
    return base / "root" / AGENT_DIR


def file_of_another(base: Path) -> Path:
    path = base / "root" / AGENT_DIR / "identity.json"
    path.parent.mkdir()
    path.write_text('{"token": "0000", "port": 0, "incarnation": 5}')
    os.chown(path, NOBODY, -1)
    return path


def file_for_all(base: Path) -> Path:
    path = base / "root" / AGENT_DIR / "peers.json"
    path.parent.mkdir()
    path.write_text("[]")
    path.chmod(0o606)
    return path


def linked_log(base: Path) -> Path:
    path = base / "root" / AGENT_DIR / "log"
    path.parent.mkdir()
    (base / "precious").write_text("precious")
    path.symlink_to(base / "precious")
    return path


def pipe_in_a_files_place(base: Path) -> Path:
    path = base / "root" / AGENT_DIR / "endpoint.json"
    path.parent.mkdir()
    os.mkfifo(path, 0o600)
    return path


def link_of_another_to_the_root(base: Path) -> Path:
    (base / "root").rename(base / "real")
    (base / "root").symlink_to(base / "real")
    os.chown(base / "root", NOBODY, -1, follow_symlinks=False)
    return base / "root"


def linked_through_a_directory_for_all(base: Path) -> Path:
    (base / "open").mkdir()
    (base / "open").chmod(0o777)
    (base / "root").rename(base / "open" / "real")
    (base / "root").symlink_to("open/real")
    return base / "open"


Prepare = Callable[[Path], Path]
UNTRUSTED: list[Prepare] = [
    root_of_another, root_for_all, root_for_a_group, root_for_group_0, sticky_root, parent_for_all, parent_of_another,
    link_in_the_agents_place, agent_of_another, agent_for_all, file_of_another, file_for_all, linked_log,
    pipe_in_a_files_place, link_of_another_to_the_root, linked_through_a_directory_for_all,
]  # fmt: skip


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "base" / "root").mkdir(parents=True, mode=0o700)
    return tmp_path / "base"


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770])
def test_an_empty_root_of_ours_is_made_private(tmp_path: Path, mode: int) -> None:
    """An empty root that others can write, like many fresh mounts, gets mode 0700."""
    root = tmp_path / "root"
    root.mkdir()
    os.chown(root, -1, OTHER_GROUP)
    root.chmod(mode)
    LocalStore(root).agent_directory()
    assert stat.S_IMODE(root.stat().st_mode) == 0o700


@pytest.mark.parametrize("prepare", UNTRUSTED)
def test_a_path_that_another_user_can_have_written_is_refused(base: Path, prepare: Prepare) -> None:
    """The error names the path, its owner, its mode and the next step. Nothing is created or appended."""
    culprit = prepare(base)
    status = culprit.lstat()
    with pytest.raises(StoreDenied) as caught:
        LocalStore(base / "root").agent_directory()
    error = caught.value
    assert error.key == str(culprit)
    assert f"({status.st_uid})" in error.detail
    assert f"{stat.S_IMODE(status.st_mode):04o}" in error.detail
    assert str(culprit) in error.hint
    assert not (base / "root" / "node.json").exists()
    assert not (base / "precious").exists() or (base / "precious").read_text() == "precious"


@pytest.mark.parametrize(
    "prepare", [root_of_another, root_for_all, parent_for_all, parent_of_another, agent_of_another]
)
def test_a_variable_trusts_other_users_of_the_host(
    base: Path, prepare: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `TRUST_ROOT_ENV` set, as in containers with mapped users, owners and modes are accepted. Links never are."""
    prepare(base)
    monkeypatch.setenv(TRUST_ROOT_ENV, "1")
    LocalStore(base / "root").agent_directory()
    (base / "root" / AGENT_DIR / "log").symlink_to(base / "precious")
    with pytest.raises(StoreDenied, match="not a plain file"):
        LocalStore(base / "root").agent_directory()


def sticky_parent(base: Path) -> None:
    base.chmod(0o1777)


def own_link(base: Path) -> None:
    (base / "root").rename(base / "real")
    (base / "root").symlink_to("../base/real")


def readable_root(base: Path) -> None:
    (base / "root").chmod(0o755)


@pytest.mark.parametrize("prepare", [sticky_parent, own_link, readable_root])
def test_usual_directories_are_accepted(base: Path, prepare: Callable[[Path], None]) -> None:
    """A sticky parent like /tmp, the user's own link, and a root that others can read are accepted."""
    prepare(base)
    store = LocalStore(base / "root")
    assert stat.S_IMODE(store.agent_directory().stat().st_mode) == 0o700
    assert store.agent_directory().exists()


@pytest.mark.parametrize(("user", "group", "is_accepted"), [(4321, 4321, True), (4321, 0, False), (4321, 54321, False)])
def test_only_the_owners_private_group_may_write(
    base: Path, monkeypatch: pytest.MonkeyPatch, user: int, group: int, *, is_accepted: bool
) -> None:
    """A directory that a user's private group can write is accepted. With another group, or group 0, it is refused."""
    for path in (base, base / "root"):
        os.chown(path, user, group)
        path.chmod(0o775)
    monkeypatch.setattr("replicated_ckpt.stores.files.ownership.os.geteuid", lambda: user)
    if is_accepted:
        check_root(base / "root")
    else:
        with pytest.raises(StoreDenied, match="other users can write it"):
            check_root(base / "root")


def test_a_group_that_is_named_may_write(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group named in `GROUP_ENV`, also group 0, may write the root."""
    root_for_group_0(base)
    monkeypatch.setenv(GROUP_ENV, "0")
    LocalStore(base / "root").agent_directory()
    assert stat.S_IMODE((base / "root").stat().st_mode) == SHARED_MODE


def test_reads_without_an_agent_check_ownership(base: Path) -> None:
    """Reads without an agent, as by `ls`, refuse untrusted address and token files, too."""
    file_for_all(base)
    with pytest.raises(StoreDenied, match="other users can write it"):
        PeerBook(base / "root" / AGENT_DIR).read_all()
    endpoint = base / "root" / AGENT_DIR / "endpoint.json"
    endpoint.symlink_to(base / "elsewhere")
    with pytest.raises(StoreDenied, match="symbolic link"):
        read_endpoint(endpoint.parent)
    endpoint.unlink()
    os.mkfifo(endpoint, 0o600)  # opening it would block until a writer opens it
    with pytest.raises(StoreDenied, match="not a plain file"):
        read_endpoint(endpoint.parent)


def test_a_directory_that_was_swapped_is_looked_at_again(base: Path) -> None:
    """A store that was checked once detects that another directory took the place of `.agent`."""
    store = LocalStore(base / "root")
    store.agent_directory().rename(base / "away")
    agent_of_another(base)
    with pytest.raises(StoreDenied, match="nobody"):
        store.agent_directory()


def saved(root: Path, checkpoint_id: str = "run/step-1") -> None:
    writer = ReplicatedWriter(root, copies=1)
    dcp.save({"a": torch.arange(9)}, checkpoint_id=checkpoint_id, storage_writer=writer)


def as_user(uid: int, gid: int, do: Callable[[], object]) -> bool:
    """Runs `do` in a process of this user and group. Returns whether it succeeded."""
    pid = os.fork()
    if pid == 0:
        os.setgroups([])
        os.setgid(gid)
        os.setuid(uid)
        try:
            is_done = bool(do())
        except BaseException:  # noqa: BLE001 - top of a process
            traceback.print_exc()
            is_done = False
        os._exit(0 if is_done else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def reads(uid: int, gid: int, path: Path) -> bool:
    """Whether a process of this user and group can read the file."""
    return as_user(uid, gid, path.read_bytes)


@pytest.fixture
def reachable() -> Iterator[Path]:
    """A directory that other users can traverse."""
    with tempfile.TemporaryDirectory(prefix="rckpt-") as base:
        Path(base).chmod(0o711)
        yield Path(base)


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_a_store_is_private(reachable: Path, umask: int) -> None:
    """A new root has mode 0700, and so has each directory in a root, also in a root that existed with another mode."""
    before = os.umask(umask)
    try:
        saved(reachable / "fresh")
        (reachable / "there").mkdir()
        (reachable / "there").chmod(0o755)
        saved(reachable / "there")
    finally:
        os.umask(before)
    assert stat.S_IMODE((reachable / "fresh").stat().st_mode) == 0o700
    for root in (reachable / "fresh", reachable / "there"):
        made = [path for path in root.rglob("*") if path.is_dir()]
        assert {"run", "step-1", ".staging", AGENT_DIR} <= {path.name for path in made}
        assert {stat.S_IMODE(path.stat().st_mode) for path in made} == {0o700}
        assert not reads(NOBODY, OTHER_GROUP, root / "run/step-1/__0_0.distcp")


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
def test_the_first_save_into_an_empty_root_that_others_can_write_makes_it_private(reachable: Path) -> None:
    """A fresh mount, such as an emptyDir of Kubernetes, is writable by all: the first save succeeds, and sets mode
    0700.
    """
    root = reachable / "mounted"
    root.mkdir()
    root.chmod(0o777)
    saved(root)
    assert stat.S_IMODE(root.stat().st_mode) == 0o700


def saves_and_restores(root: Path, advice: dict[str, str]) -> bool:
    """Restores and saves as a pod does. With `advice`, `restore` and `save` first fail with a hint that contains it,
    and then follow it.
    """
    state = {"a": torch.arange(9)}
    if advice:
        with CheckpointManager(root, copies=1, preempt_on=()) as manager:
            with pytest.raises(StoreDenied) as restored:
                manager.restore(state)
            with pytest.raises(CheckpointException, match="StoreDenied") as saved:
                manager.save(1, state)
        assert all(f"{name}={value}" in str(restored.value.hint) for name, value in advice.items())
        assert str(restored.value.hint) in str(saved.value.failures[0][0])
        assert not (root / "node.json").exists()
    os.environ.update(advice)
    with CheckpointManager(root, copies=1, preempt_on=()) as manager:
        assert manager.restore(state) is None
        manager.save(1, state)
        assert manager.restore(state) == 1
    return main(["verify", "--root", str(root), "step-1"]) == 0


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
@pytest.mark.parametrize(
    ("group", "mode", "advice"),
    [
        (4321, 0o2775, {}),  # fsGroup is the user's own
        (OTHER_GROUP, 0o2775, {GROUP_ENV: str(OTHER_GROUP)}),  # fsGroup is another one
        (0, 0o777, {TRUST_ROOT_ENV: "1"}),  # emptyDir
        (OTHER_GROUP, 0o2777, {TRUST_ROOT_ENV: "1"}),  # emptyDir with fsGroup
    ],
)
@pytest.mark.parametrize("below", ["", "ckpt"])
def test_a_volume_of_kubelet_works_or_fails_with_a_hint_that_helps(
    reachable: Path, group: int, mode: int, advice: dict[str, str], below: str
) -> None:
    """A volume from kubelet belongs to root, not to the pod's user: it works, or fails with a hint that makes it work."""
    volume = reachable / "volume"
    volume.mkdir()
    os.chown(volume, 0, group)
    volume.chmod(mode)
    assert as_user(4321, group or 4321, lambda: saves_and_restores(volume / below, advice))


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
@pytest.mark.parametrize("umask", [0o000, 0o002])
def test_a_root_is_accepted_below_directories_that_the_save_has_made(reachable: Path, umask: int) -> None:
    """A save creates missing parents of its root without write access for others, whatever the umask."""
    root = reachable / "project/run/node"
    before = os.umask(umask)
    try:
        saved(root)
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (root, *root.parents[:2])] == [0o700, 0o755, 0o755]


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_a_group_may_read_what_is_saved(reachable: Path, umask: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Members of REPLICATED_CKPT_GROUP can read checkpoints, but no file of the agent. Others can read neither."""
    monkeypatch.setenv(GROUP_ENV, str(OTHER_GROUP))
    root = reachable / "shared"
    before = os.umask(umask)
    try:
        saved(root)
    finally:
        os.umask(before)
    for name in ("__0_0.distcp", ".metadata", ".manifest.json"):
        assert reads(NOBODY, OTHER_GROUP, root / "run/step-1" / name)
        assert not reads(NOBODY, NOBODY, root / "run/step-1" / name)
    assert stat.S_IMODE((root / AGENT_DIR).stat().st_mode) & 0o777 == 0o700
    LocalStore(root).agent_directory()  # the root is still trusted


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
def test_a_group_that_is_named_later_reads_what_is_saved_from_then_on(
    reachable: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group that is named later can read new checkpoints, also those over recycled files, but no older ones."""
    root = reachable / "root"
    for step in (1, 2):
        saved(root, f"run/step-{step}")
    first = LocalStore(root).catalog.manifest("run/step-1")
    assert recycle(root, "run/step-1", first.save_id)
    for group in (OTHER_GROUP, OTHER_GROUP + 1):
        monkeypatch.setenv(GROUP_ENV, str(group))
        saved(root, f"run/of-{group}")
        for name in ("__0_0.distcp", ".metadata", ".manifest.json"):
            assert reads(NOBODY, group, root / f"run/of-{group}" / name)
            assert not reads(NOBODY, group, root / "run/step-2" / name)


def loads(root: Path) -> bool:
    """Whether this process loads the tensor from `saved`."""
    state = {"a": torch.zeros(9, dtype=torch.int64)}
    dcp.load(state, checkpoint_id="latest", storage_reader=ReplicatedReader(root), no_dist=True)
    return bool(torch.equal(state["a"], torch.arange(9)))


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
def test_a_member_of_the_group_loads(reachable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user who can read the checkpoints can load them, without the files of the owner's agent."""
    monkeypatch.setenv(GROUP_ENV, str(OTHER_GROUP))
    root = reachable / "shared"
    saved(root)
    monkeypatch.delenv(GROUP_ENV)
    assert as_user(NOBODY, OTHER_GROUP, lambda: loads(root))
    assert not as_user(NOBODY, NOBODY, lambda: loads(root))


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
def test_root_loads_from_a_read_only_root_of_another(reachable: Path) -> None:
    """root loads from a read-only mount that belongs to another user, and ignores that user's agent files, which name
    hosts.
    """
    disk = reachable / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=0700", "tmpfs", str(disk)], check=False).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        saved(disk / "root")
        (disk / "root" / AGENT_DIR / "peers.json").write_text('[{"node_id": "theirs"}]')
        for path in (disk / "root", *(disk / "root").rglob("*")):
            os.chown(path, NOBODY, NOBODY)
        with pytest.raises(StoreDenied):
            LocalStore(disk / "root").agent_directory()
        subprocess.run(["mount", "-o", "remount,ro,bind", str(disk)], check=True)
        assert loads(disk / "root")
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_an_unknown_group_is_an_error_of_the_configuration(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown group raises ConfigInvalid with the variable's name, before any file is made."""
    monkeypatch.setenv(GROUP_ENV, "no-such-group-here")
    with pytest.raises(ConfigInvalid, match=GROUP_ENV):
        LocalStore(base / "root").agent_directory()
    assert not (base / "root" / AGENT_DIR).exists()


@pytest.mark.parametrize("variable", [TRUST_ROOT_ENV, PLAIN_ENV])
@pytest.mark.parametrize("text", ["false", "no", "off", "true"])
def test_a_switch_is_1_or_0(base: Path, monkeypatch: pytest.MonkeyPatch, variable: str, text: str) -> None:
    """A switch with another value than 1, 0 or empty raises ConfigInvalid with its name. "false" must not disable
    protection.
    """
    monkeypatch.setenv(variable, text)
    for make in (ReplicatedWriter, ReplicatedReader, AgentConfig):
        with pytest.raises(ConfigInvalid, match=f"{variable} must be 1, 0 or empty, not '{text}'"):
            make(str(base / "root"))
    with pytest.raises(ConfigInvalid, match=variable):
        is_switched_on(variable)
    for off in ("0", ""):
        monkeypatch.setenv(variable, off)
        assert not is_switched_on(variable)
