"""Recycled files: the next save writes over removed shards. Old bytes are never read as new ones, nor changed under a
reader.
"""

import contextlib
import errno
import io
import mmap
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from email.message import Message
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch

from replicated_ckpt import failpoints
from replicated_ckpt.agent.repair.mender import Mender
from replicated_ckpt.core.layout import RECYCLED_DIR, STAGING_DIR
from replicated_ckpt.core.upkeep.repair_plan import CopyShard
from replicated_ckpt.errors import StoreFull
from replicated_ckpt.node.saves.collector import Collector
from replicated_ckpt.node.saves.receive import receive_file
from replicated_ckpt.node.saves.request_body import Body
from replicated_ckpt.node.saves.service import NodeService
from replicated_ckpt.node.saves.shard_copies import WrittenCopies
from replicated_ckpt.node.saves.submissions import Submissions
from replicated_ckpt.stores.files.direct import PAGE_BYTES
from replicated_ckpt.stores.files.locks import exclusive
from replicated_ckpt.stores.local.directories.intent import Intent
from replicated_ckpt.stores.local.shard_file import FileSink
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.local.versions.full_disk import measure_room
from replicated_ckpt.stores.local.versions.recycled import RecycledFiles
from replicated_ckpt.stores.local.versions.remove import recycle, retire
from replicated_ckpt.stores.tee import Buffers, Tee
from replicated_ckpt.stores.throttle import Pace
from replicated_ckpt.testing.shards import table_of
from tests.agent.agents import running_agent
from tests.agent.checkpoints import checkpointed, findings, held, shard
from tests.killed import killed_at
from tests.stores.files.test_ownership import as_user
from tests.stores.leases import skip_without_leases

OLD_BYTES = 5 * PAGE_BYTES + 123
SAVE = "e" * 32


@pytest.fixture(autouse=True)
def recycles(tmp_path: Path) -> None:
    """Skips each test on file systems where no file is recycled."""
    skip_without_leases(tmp_path)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """A store whose pool has the one shard of a removed checkpoint."""
    return recycled_in(LocalStore(tmp_path / "node"))


def recycled_in(store: LocalStore, *ranks: int, number: int = 1, size_bytes: int = OLD_BYTES) -> LocalStore:
    """Makes a checkpoint and recycles it, as retention does."""
    shards = {shard(rank): (0,) for rank in ranks or (0,)}
    manifest = checkpointed([store], number, shards, checkpoint_id=f"step-{number}", size_bytes=size_bytes)
    assert recycle(store.root, manifest.checkpoint_id, manifest.save_id)
    return store


def pool(store: LocalStore) -> set[str]:
    return {path.name for path in (store.root / RECYCLED_DIR).iterdir()}


def pooled(store: LocalStore) -> Path:
    return store.root / RECYCLED_DIR / "__0_0.recycled"


def opened(store: LocalStore) -> Path:
    """Opens a save. Returns the path of its shard."""
    store.begin(Intent(SAVE, "step-9", "session", overwrite=False))
    return store.path_of_staged(SAVE, shard(0))


def write(store: LocalStore, data: bytes, direct_io: str = "off") -> Path:
    """Writes a shard of a new save as a rank does. Returns its path."""
    path = opened(store)
    sink = FileSink.create(path, direct_io, RecycledFiles(store.root))
    tee = Tee([sink], Buffers(2, 2 * PAGE_BYTES), copies=sink.is_direct)
    tee.write(data)
    error = tee.finish()[1][0].error
    if error is not None:
        raise error
    assert path.read_bytes() == whole(data)
    return path


@contextlib.contextmanager
def counting_uses() -> Iterator[list[str]]:
    """A list with an entry for each recycled file that is taken. New files can have the same inode numbers."""
    taken: list[str] = []
    with failpoints.arm("store.recycled", taken.append):
        yield taken


def whole(data: bytes) -> bytes:
    return data + table_of([data]).encode()


def receive(path: Path, data: bytes, pool_of: RecycledFiles, *, durable: bool = True) -> None:
    raw, headers = whole(data), Message()
    headers["Content-Length"] = str(len(raw))
    body = Body(io.BytesIO(raw), headers)
    receive_file(path, body, lambda _: None, durable=durable, direct_io="off", recycled=pool_of)
    assert path.read_bytes() == raw


@pytest.mark.parametrize("direct_io", ["on", "off"])
@pytest.mark.parametrize("size_bytes", [0, 1, PAGE_BYTES, OLD_BYTES - 1, OLD_BYTES, OLD_BYTES + 1, 9 * PAGE_BYTES])
def test_a_shard_is_written_over_the_old_file_and_has_its_own_size(
    size_bytes: int, direct_io: str, store: LocalStore
) -> None:
    """A smaller, equal or larger shard takes the old file, and has no old bytes behind its own."""
    with counting_uses() as uses:
        path = write(store, os.urandom(size_bytes), direct_io)
    assert len(uses) == 1
    assert path.stat().st_mode & 0o777 == 0o640
    assert pool(store) == set()


@pytest.mark.parametrize("size_bytes", [1, OLD_BYTES, 9 * PAGE_BYTES])
def test_a_received_copy_is_written_over_the_old_file(size_bytes: int, store: LocalStore) -> None:
    """A received copy takes the old file, and is verified against its own footer."""
    path = opened(store)
    with counting_uses() as uses:
        receive(path, os.urandom(size_bytes), RecycledFiles(store.root))
    assert len(uses) == 1


def test_a_copy_that_is_not_made_durable_gets_a_new_file(store: LocalStore) -> None:
    """With ack="peer-memory" a power loss could leave intact old bytes under the new name: the copy gets a new file,
    and the pool is freed.
    """
    service, data = NodeService(store), os.urandom(OLD_BYTES)
    path, headers = opened(store), Message()
    headers["Content-Length"] = str(len(whole(data)))
    with counting_uses() as uses:
        service.receive(SAVE, path.name, Body(io.BytesIO(whole(data)), headers), durable=False)
    assert path.read_bytes() == whole(data)
    assert (uses, pool(store)) == ([], set())


def test_a_copy_that_is_fetched_is_written_over_the_old_file(store: LocalStore) -> None:
    """A copy that replaces a lost or damaged one takes the recycled file, too."""
    manifest = checkpointed([store], 2, {shard(0): (0,)}, checkpoint_id="step-2", size_bytes=OLD_BYTES)
    path, service = store.root / "step-2" / shard(0), NodeService(store)
    with path.open("r+b") as file:  # damages the footer only: the copy is made from the intact data
        file.seek(-1, os.SEEK_END)
        file.write(b"!")
    mender, own = Mender(service, Pace(1e15, threading.Event())), service.node_id
    mender.examine("step-2", manifest.save_id, shard(0))
    with counting_uses() as uses:
        mender.carry_out(CopyShard(own, "step-2", manifest.save_id, shard(0), path.stat().st_size, (own,), True))
    assert len(uses) == 1
    assert pool(store) == set()
    assert held(store, "step-2") == {shard(0)}
    assert store.catalog.look("step-2").unfinished == ()
    assert findings(store) == []


def test_the_third_checkpoint_is_written_over_the_first(tmp_path: Path) -> None:
    """With `keep_last=1`, two generations of files are allocated: from the third on, each save takes the files of the
    one retired last.
    """
    store = LocalStore(tmp_path / "node")
    before, counts = None, []
    for number in range(1, 6):
        sink = partial(FileSink.create, recycled=RecycledFiles(store.root))
        with counting_uses() as uses, mock.patch.object(FileSink, "create", sink):
            manifest = checkpointed([store], number, {shard(0): (0,)}, checkpoint_id=f"step-{number}")
        counts.append(len(uses))
        if before is not None:
            assert recycle(store.root, before.checkpoint_id, before.save_id)
        before = manifest
        assert held(store, f"step-{number}") == {shard(0)}
    assert counts == [0, 0, 1, 1, 1]
    assert findings(store) == []


def test_the_pool_holds_one_checkpoint(tmp_path: Path) -> None:
    """A second removal, also of other ranks' shards, replaces the files in the pool."""
    store = recycled_in(LocalStore(tmp_path / "node"), 0, 1)
    first = pooled(store).stat().st_ino
    recycled_in(store, 0, 2, number=2)
    assert pool(store) == {"__0_0.recycled", "__2_0.recycled"}
    assert pooled(store).stat().st_ino != first
    assert not (store.root / "step-2").exists()


def test_files_in_the_pool_are_no_checkpoint(store: LocalStore) -> None:
    """Files in the pool are in no listing, and survive an agent's start. A removal by hand frees them."""
    assert [list(store.catalog.committed()), list(store.catalog.without_manifest()), findings(store)] == [[], [], []]
    NodeService(store).recover()
    store.tidy(is_alone=True)
    assert pool(store) == {"__0_0.recycled"}
    manifest = checkpointed([store], 2, {shard(0): (0,)}, checkpoint_id="step-2")
    assert retire(store.root, "step-2", manifest.save_id)
    assert pool(store) == set()


def is_linked_in_the_pool(store: LocalStore, elsewhere: Path) -> None:
    os.link(pooled(store), elsewhere)


def is_linked_before(store: LocalStore, elsewhere: Path) -> None:
    pooled(store).unlink()
    manifest = checkpointed([store], 2, {shard(0): (0,)}, checkpoint_id="step-2", size_bytes=OLD_BYTES)
    os.link(store.root / "step-2" / shard(0), elsewhere)
    assert recycle(store.root, "step-2", manifest.save_id)
    assert pool(store) == set()


@pytest.mark.parametrize("make", [is_linked_in_the_pool, is_linked_before])
def test_a_file_that_is_linked_elsewhere_is_not_used(
    make: Callable[[LocalStore, Path], None], store: LocalStore, tmp_path: Path
) -> None:
    """A shard with a second hard link, as in a backup, is not written over."""
    elsewhere = tmp_path / "backup"
    make(store, elsewhere)
    before = elsewhere.read_bytes()
    path = write(store, os.urandom(OLD_BYTES))
    assert not path.samefile(elsewhere)
    assert elsewhere.read_bytes() == before


@pytest.mark.parametrize("how", ["read", "mmap", "other process"])
def test_a_file_that_is_read_never_changes(how: str, tmp_path: Path) -> None:
    """A file that a reader in this or another process has open is not written over."""
    store = LocalStore(tmp_path / "node")
    manifest = checkpointed([store], 1, {shard(0): (0,)}, size_bytes=OLD_BYTES)
    old = store.root / "step-1" / shard(0)
    before, inode = old.read_bytes(), old.stat().st_ino
    with reading(how, old) as read:
        assert recycle(store.root, "step-1", manifest.save_id)
        path = write(store, os.urandom(OLD_BYTES))
        assert path.stat().st_ino != inode
        assert read() == before
    assert pool(store) == set()


@pytest.fixture
def container(tmp_path: Path) -> Iterator[Path]:
    """A directory on overlayfs, as in a container without a volume."""
    disk, place = tmp_path / "layers", tmp_path / "container"
    for path in (disk, place):
        path.mkdir(mode=0o700)
    mounted = ["mount", "-t", "tmpfs", "-o", "mode=0700", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mounted, check=False, capture_output=True).returncode:
        pytest.skip("mounting needs root")
    try:
        for name in ("lower", "upper", "work"):
            (disk / name).mkdir(mode=0o700)
        layers = f"lowerdir={disk}/lower,upperdir={disk}/upper,workdir={disk}/work"
        laid = ["mount", "-t", "overlay", "-o", layers, "overlay", str(place)]
        if subprocess.run(laid, check=False, capture_output=True).returncode:
            pytest.skip("there is no overlayfs")
        yield place
        subprocess.run(["umount", "--lazy", str(place)], check=True)
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.mark.parametrize("place", ["disk", "container"])
def test_a_file_that_is_only_mapped_never_changes(place: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """A mapped file without an open descriptor, as after torch.from_file, is not written over."""
    root = tmp_path if place == "disk" else request.getfixturevalue("container")
    store = LocalStore(root / "node")
    manifest = checkpointed([store], 1, {shard(0): (0,)}, size_bytes=OLD_BYTES)
    old = store.root / "step-1" / shard(0)
    before = old.read_bytes()
    mapped = torch.from_file(str(old), shared=False, size=len(before), dtype=torch.uint8)
    assert recycle(store.root, "step-1", manifest.save_id)
    write(store, os.urandom(OLD_BYTES))
    assert bytes(mapped.numpy()) == before


READ_ON_INPUT = """
import sys
with open(sys.argv[1], "rb", 0) as file:
    print(1, flush=True)
    input()
    sys.stdout.buffer.write(file.read())
"""


class reading:  # noqa: N801 - a context manager
    """Opens a file, and returns a function that reads it."""

    def __init__(self, how: str, path: Path) -> None:
        self._how, self._path = how, path

    def __enter__(self) -> Callable[[], bytes]:
        if self._how == "other process":
            command = [sys.executable, "-c", READ_ON_INPUT, str(self._path)]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            assert self._process.stdout is not None
            assert self._process.stdout.readline() == b"1\n"
            return lambda: self._process.communicate(b"\n", timeout=60)[0]
        self._file = self._path.open("rb", 0)
        if self._how == "read":
            return self._file.read
        self._map = mmap.mmap(self._file.fileno(), 0, prot=mmap.PROT_READ)
        self._file.close()
        return lambda: bytes(self._map)

    def __exit__(self, *_: object) -> None:
        if self._how == "other process":
            self._process.kill()
            self._process.communicate()
        elif self._how == "read":
            self._file.close()
        else:
            self._map.close()


def is_a_link(path: Path) -> None:
    target = path.with_name("target")
    path.rename(target)
    path.symlink_to(target)


def is_a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def is_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def is_lost(path: Path) -> None:
    path.unlink()


def is_another_users(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("giving a file away needs root")
    os.chown(path, 4711, -1)


@pytest.mark.parametrize("make", [is_a_link, is_a_directory, is_a_pipe, is_lost, is_another_users])
def test_a_pool_entry_that_is_no_own_file_is_not_used(make: Callable[[Path], None], store: LocalStore) -> None:
    """With a link, a directory, a pipe, another user's file or no file in the pool, the save makes a new file. A link's
    target keeps its bytes.
    """
    make(pooled(store))
    target = pooled(store).with_name("target")
    before = target.read_bytes() if target.exists() else b""
    with counting_uses() as uses:
        path = write(store, os.urandom(OLD_BYTES))
    assert uses == []
    assert not path.is_symlink()
    assert (target.read_bytes() if target.exists() else b"") == before


def test_a_file_system_without_leases_gets_new_files(store: LocalStore) -> None:
    """If the kernel cannot tell who has a file open, no file is written over."""
    refused = mock.patch(
        "replicated_ckpt.stores.local.versions.recycled.fcntl.fcntl", side_effect=OSError(errno.EINVAL, "none")
    )
    with refused, counting_uses() as uses:
        write(store, os.urandom(OLD_BYTES))
    assert uses == []


def test_the_free_space_includes_the_pool(store: LocalStore) -> None:
    """The reported free space includes the recycled files."""
    with mock.patch("os.statvfs", return_value=os.statvfs(store.root)):
        taken = measure_room(store.root).free_bytes
        size = RecycledFiles(store.root).drop()
        assert size >= OLD_BYTES
        assert measure_room(store.root).free_bytes == taken - size


def test_a_user_who_may_only_read_a_store_can_measure_its_space() -> None:
    """Another user, who can list the root but not the pool, can measure its space, as `ls` and `status` do."""
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    with tempfile.TemporaryDirectory(prefix="rckpt-") as base:
        store = recycled_in(LocalStore(Path(base) / "node"))
        for path in (Path(base), store.root):
            path.chmod(0o755)
        assert as_user(4711, 4711, lambda: measure_room(store.root).size_bytes)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[LocalStore]:
    """A store on a disk of 8 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir(mode=0o700)
    mounted = ["mount", "-t", "tmpfs", "-o", "size=8m,mode=0700", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mounted, check=False, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    yield LocalStore(disk)
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.mark.parametrize("direct_io", ["on", "off"])
def test_the_pool_makes_room_on_a_full_disk(direct_io: str, small_disk: LocalStore) -> None:
    """On a full disk a shard frees other recycled files. StoreFull is raised only when none is left."""
    recycled_in(small_disk, 1, size_bytes=5 << 20)
    write(small_disk, os.urandom(6 << 20), direct_io)
    assert pool(small_disk) == set()
    small_disk.abort(SAVE)
    with pytest.raises(StoreFull):
        write(small_disk, os.urandom(9 << 20), direct_io)


def test_a_save_opens_on_a_disk_that_the_pool_fills(small_disk: LocalStore) -> None:
    """Opening a save on a full disk frees the pool for its intent and small files."""
    recycled_in(small_disk, 1, size_bytes=5 << 20)
    fill(small_disk)
    opened(small_disk)
    assert pool(small_disk) == set()


def note_places(store: LocalStore) -> None:
    """Notes places in the intent until they need a new page."""
    for _ in range(2 * os.sysconf("SC_PAGESIZE") // 50):
        store.note_place(SAVE, "a" * 16, 7)
    assert store.read_places()[SAVE].sequence == 7


def note_written(store: LocalStore) -> None:
    """Records a submitted shard as written, as the agent does."""
    path = store.path_of_staged(SAVE, shard(0))
    path.write_bytes(b"x")
    Submissions(store)._note(SAVE, WrittenCopies(path.name, 1, 0, (store.node_id(),)))
    assert Submissions(store).wait_for_shards(SAVE, [path.name])[0].size_bytes == 1


@pytest.mark.parametrize("note", [note_places, note_written])
def test_notes_of_an_open_save_get_room_from_the_pool(
    note: Callable[[LocalStore], None], small_disk: LocalStore
) -> None:
    """The disk fills while a save is open: its notes and records free the pool."""
    recycled_in(small_disk, 1, size_bytes=5 << 20)
    opened(small_disk)
    fill(small_disk, but=1 if note is note_written else 0)
    note(small_disk)
    assert pool(small_disk) == set()


def fill(store: LocalStore, but: int = 0) -> None:
    """Fills the disk except for `but` pages."""
    filler = store.root / "filler"
    with contextlib.suppress(OSError):
        filler.write_bytes(bytes(8 << 20))
    os.truncate(filler, filler.stat().st_size - but * PAGE_BYTES)
    assert os.statvfs(store.root).f_bavail == but


class SignallingPool(RecycledFiles):
    """A pool that sets `is_asked` before it frees space."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.is_asked = threading.Event()

    def drop(self) -> int:
        self.is_asked.set()
        return super().drop()


def test_ranks_that_meet_a_full_disk_at_once_all_get_room(small_disk: LocalStore) -> None:
    """A rank that finds the pool empty while another rank frees it waits for the space, and does not raise StoreFull."""
    recycled_in(small_disk, 1, size_bytes=5 << 20)
    path, asked = opened(small_disk), SignallingPool(small_disk.root)
    sink = FileSink.create(path, "off", asked)
    with ThreadPoolExecutor(1) as threads:
        with exclusive(
            small_disk.root / RECYCLED_DIR
        ):  # the other rank removed the name, but the space is not yet free
            gone = (small_disk.root / RECYCLED_DIR / "__1_0.recycled").rename(small_disk.root / "gone")
            written = threads.submit(sink.write, memoryview(bytes(6 << 20)))
            assert asked.is_asked.wait(60)
            assert not written.done()
            gone.unlink()
        written.result(60)
    sink.finish_durably()
    assert path.stat().st_size == 6 << 20


def test_recycled_files_that_cannot_be_removed_stop_no_round(store: LocalStore) -> None:
    """If the pool cannot be removed, as when another user owns it, the collector's round goes on."""
    denied = mock.patch.object(RecycledFiles, "drop", side_effect=PermissionError(errno.EACCES, "denied"))
    with denied as drop:
        assert Collector(NodeService(store), threading.Event()).retire({}, (), (), in_doubt=False) == (
            frozenset(),
            False,
        )
    assert drop.call_count == 1


def test_an_agent_starts_on_a_disk_that_the_pool_fills(small_disk: LocalStore) -> None:
    """An agent that starts on a full disk frees the pool for its own files."""
    recycled_in(small_disk, 1, size_bytes=5 << 20)
    fill(small_disk)
    with running_agent(small_disk.root) as agent:
        assert agent.endpoint.pid == agent.process.pid


@pytest.mark.parametrize("point", ["store.recycled", "store.shard-fsynced", "store.shard-named"])
def test_a_save_that_is_killed_over_a_recycled_file_leaves_nothing(point: str, store: LocalStore) -> None:
    """A save is killed while it writes over a recycled file: neither old nor new bytes count, and the next save
    succeeds.
    """
    killed_at(point, lambda: write(store, bytes(OLD_BYTES)))
    assert pool(store) == set()
    store.abort(SAVE)
    assert list((store.root / STAGING_DIR).iterdir()) == []
    assert list(store.catalog.committed()) == []
    write(store, os.urandom(OLD_BYTES))


def test_a_removal_that_is_killed_is_completed_and_its_files_are_used(store: LocalStore) -> None:
    """A removal is killed: the checkpoint is no longer listed, the next start completes the removal, and the next save
    uses the files.
    """
    checkpointed([store], 2, {shard(0): (0,)}, checkpoint_id="step-2", size_bytes=OLD_BYTES)
    killed_at("retire.recycled", lambda: recycle(store.root, "step-2", f"{2:032x}"))
    assert store.catalog.look("step-2").gone == (f"{2:032x}",)
    NodeService(store).recover()
    store.tidy(is_alone=True)
    assert not (store.root / "step-2").exists()
    assert list(store.catalog.committed()) == []
    with counting_uses() as uses:
        write(store, os.urandom(OLD_BYTES))
    assert len(uses) == 1


def test_another_process_that_writes_the_shard_anew_ends_the_first(store: LocalStore) -> None:
    """Two processes write one shard: the later one's file is published, whichever has the recycled file."""
    path = opened(store)
    first = FileSink.create(path, "off", RecycledFiles(store.root))
    first.write(memoryview(b"first"))
    second = FileSink.create(path, "off", RecycledFiles(store.root))
    second.write(memoryview(b"second"))
    first.discard()
    second.finish_durably()
    assert path.read_bytes() == b"second"


def test_failpoints_of_recycling_are_known() -> None:
    """The failpoints of these tests are registered."""
    assert {"store.recycled", "retire.recycled"} <= set(failpoints.POINTS)
