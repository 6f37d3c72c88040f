"""Power loss: whichever operations without fsync are lost, a restarted node keeps its promises."""

import os
import random
import shutil
import stat
import tempfile
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

from replicated_ckpt.stores.files import durable
from replicated_ckpt.stores.local import shard_file
from replicated_ckpt.stores.local import store as local
from replicated_ckpt.stores.local.shard_file import FileSink
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.local.versions import publish as publishing
from replicated_ckpt.stores.local.versions import remove as removing
from tests.fault.power_loss.nested import (
    committed_again,
    gone_on_after_kill,
    restarted,
    restarted_after_power_loss,
    saved_again,
    settled_by_next_save,
)
from tests.fault.power_loss.operations import Log, Mark, Names, Sync
from tests.fault.power_loss.replay import crash_states
from tests.fault.power_loss.scenarios import SCENARIOS, STORE, recorded
from tests.fault.power_loss.verdict import Judge
from tests.marks import long, mark_long
from tests.stores.leases import skip_without_leases

pytestmark = pytest.mark.fault

NESTED = [name for name in SCENARIOS if name not in {"buddy's side", "copies in memory"}]
"""The two scenarios that are left out restart like a first save."""
QUICK = ["abort before the decision", "retirement"]
"""Two scenarios with few states: one restart drops an undecided save, the other one completes a removal."""
ALWAYS = [
    name
    for name in SCENARIOS
    if name not in {"removal and save over its files", "copies in memory", "abort after the decision"}
]
"""The scenarios left out have the most states, and their parts are scenarios of their own."""
GoOn = Callable[[LocalStore], None]
SAMPLED = 25
"""The number of power losses, drawn with a fixed seed, whose restart loses power as well."""

UNNEEDED = {
    "disks/node": "before the staging area is created: the fsync after it covers both",
    "disks/node/.staging/SAVE.json.PID.tmp": "an unreadable intent is removed, like one without a name",
    "disks/node/.staging/SAVE": "after .metadata, before the manifest; before the commit, if nothing was dropped",
    "disks/node/runs/seed-0": "after the commit, which a restart repeats",
}
"""Fsyncs of a first save, any one of which may be left out, and why. They stay, as not every caller is a whole save."""


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory if there is one, as the tests build thousands of states."""
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=shared) as name:
        yield Path(name)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base"
    path.mkdir()
    return path


@pytest.mark.parametrize("name", mark_long(SCENARIOS, keep=ALWAYS))
def test_a_node_keeps_its_promises_after_a_power_loss(name: str, base: Path, memory: Path) -> None:
    """After a power loss at any moment, no checkpoint is partial or lost, no file is left over, and the next save
    works.
    """
    assert Judge(memory).findings(crash_states(recorded(SCENARIOS[name], base).log)) == []


@pytest.mark.parametrize("name", mark_long(NESTED, keep=QUICK))
def test_a_restart_after_a_kill_can_itself_lose_power(name: str, base: Path, memory: Path) -> None:
    """The process after a kill does not rely on anything that the killed process had not made durable."""
    assert findings_after_kills(recorded(SCENARIOS[name], base).log, memory, restarted) == []


@pytest.mark.long
@pytest.mark.parametrize("name", ["overwrite", "overwrite without hard links"])
@pytest.mark.parametrize("go_on", [settled_by_next_save, committed_again])
def test_a_continuation_after_a_kill_can_lose_power(name: str, go_on: GoOn, base: Path, memory: Path) -> None:
    """A next save without a restart and a repeated commit rely only on what is durable."""
    log = recorded(SCENARIOS[name], base).log
    assert findings_after_kills(log, memory, go_on, {"rename", "exchange", "unlink"}) == []


@pytest.mark.long
def test_a_save_after_a_kill_makes_durable_what_it_relies_on(base: Path, memory: Path) -> None:
    """A killed process had created a directory or an identity without an fsync: the next save makes them durable."""
    log = recorded(SCENARIOS["first save"], base).log
    assert findings_after_kills(log, memory, saved_again, {"mkdir", "link"}) == []


def findings_after_kills(log: Log, memory: Path, go_on: GoOn, after: Collection[str] = ()) -> list[str]:
    """The problems after a kill, a continuation and a power loss. The kill is after any operation, or after those named
    in `after`.
    """
    found, judge = [], Judge(memory)
    for position, operation in enumerate(log.operations, 1):
        what = operation.what if isinstance(operation, Names) else ""
        if isinstance(operation, Mark) or (after and what not in after):
            continue
        states = crash_states(gone_on_after_kill(log, position, memory / "killed", go_on), start=position)
        found += [f"killed after {operation}, then {finding}" for finding in judge.findings(states)]
        shutil.rmtree(memory / "killed")
    return found


@pytest.mark.parametrize("name", mark_long(NESTED, keep=QUICK))
def test_a_restart_after_a_power_loss_can_itself_lose_power(name: str, base: Path, memory: Path) -> None:
    """What a restart completed or removed stays so. The next restart repeats a restart that was cut off."""
    states = list(crash_states(recorded(SCENARIOS[name], base).log))
    judge = Judge(memory)
    for state in random.Random(0).sample(states, min(SAMPLED, len(states))):
        log = restarted_after_power_loss(state, memory / "lost")
        assert judge.findings(crash_states(log)) == [], state
        shutil.rmtree(memory / "lost")


# Removed fsyncs are detected ----------------------------------------------------------------------------------------------


class WithoutFileFsync:
    """The module `os`, with an fsync that does nothing for files."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def fsync(self, fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            os.fsync(fd)


def without_directory_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (durable, local, publishing, removing, shard_file):
        monkeypatch.setattr(module, "fsync_directory", lambda path: None)


def without_shard_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FileSink, "sync", lambda sink: None)


def without_small_file_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable, "os", WithoutFileFsync())


@pytest.mark.parametrize("leave_out", [long(without_directory_fsync), without_shard_fsync, without_small_file_fsync])
@pytest.mark.parametrize("name", mark_long(["first save", "buddy's side", "overwrite"], keep=["buddy's side"]))
def test_a_missing_kind_of_fsync_is_found(
    name: str, leave_out: Any, base: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the fsync of directories, of shards or of small files, the replay finds broken promises."""
    with monkeypatch.context() as patched:
        leave_out(patched)
        log = recorded(SCENARIOS[name], base).log
    assert Judge(memory).findings(crash_states(log)) != []


@pytest.mark.long
def test_each_fsync_of_a_save_is_needed_or_known_not_to_be(base: Path, memory: Path) -> None:
    """If any one fsync of a first save is left out, the replay finds a broken promise. The exceptions are in UNNEEDED."""
    recorder = recorded(SCENARIOS["first save"], base)
    operations = recorder.log.operations
    paths = iter([call[1] for call in recorder.calls if call[0] == "fsync"])
    judge = Judge(memory)
    assert judge.findings(crash_states(recorder.log)) == []
    needed: set[str] = set()
    unneeded: set[str] = set()
    for position, operation in enumerate(operations):
        if isinstance(operation, Sync):
            log = Log(recorder.log.initial, operations[:position] + operations[position + 1 :])
            path = next(paths).replace("2" * 32, "SAVE").replace(str(os.getpid()), "PID")
            (needed if judge.findings(crash_states(log)) else unneeded).add(path)
    assert unneeded <= set(UNNEEDED)
    assert {"", "disks", "disks/node", "disks/node/.staging", "disks/node/.staging/SAVE"} <= needed
    assert len(needed) == 14, (
        "the five above, the checkpoint's directory and its parents, the identity, shards, .metadata, manifest"
    )


def test_an_abort_before_the_decision_is_durably_removed_is_found(
    base: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise an aborted save could reappear, decided and without its shards."""
    monkeypatch.setattr(local, "fsync_directory", lambda path: None)
    log = recorded(SCENARIOS["abort after the decision"], base).log
    assert any("distcp" in finding for finding in Judge(memory).findings(crash_states(log)))


def test_removing_before_a_retirement_is_durable_is_found(
    base: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a part of the checkpoint could reappear."""
    monkeypatch.setattr(removing, "fsync_directory", lambda path: None)
    log = recorded(SCENARIOS["retirement"], base).log
    found = Judge(memory).findings(crash_states(log)) or findings_after_kills(log, memory, restarted)
    assert any("distcp" in finding for finding in found)


@pytest.mark.parametrize("forgotten", ["the removal", "the bytes"])
def test_recycling_before_something_is_durable_is_found(
    base: Path, memory: Path, monkeypatch: pytest.MonkeyPatch, forgotten: str
) -> None:
    """Otherwise the old checkpoint could reappear with bytes of the new one, or an acknowledged shard could be lost."""
    skip_without_leases(base)
    if forgotten == "the removal":
        name = "removal and save over its files"
        monkeypatch.setattr(removing, "fsync_directory", lambda path: None)
    else:
        name = "save over recycled files"
        without_shard_fsync(monkeypatch)
    log = recorded(SCENARIOS[name], base).log
    assert Judge(memory).findings(crash_states(log)) != []


def test_a_recycled_file_has_left_the_pool_durably_before_it_is_a_shard(base: Path) -> None:
    """Without a journal, a crash can leave both names of a rename: even then no later save finds the file in the pool."""
    skip_without_leases(base)
    calls = recorded(SCENARIOS["save over recycled files"], base).calls
    for name in ("__0_0", "__1_0"):
        left = next(at for at, call in enumerate(calls) if call[1].endswith(f".recycled/{name}.recycled"))
        named = next(at for at, call in enumerate(calls) if call[0] == "rename" and call[2].endswith(f"/{name}.distcp"))
        assert left < calls.index(("fsync", f"{STORE}/.recycled"), left) < named


@pytest.mark.long
def test_trusting_a_directory_that_a_killed_process_made_is_found(
    base: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An existing directory need not be durable: without its fsync, a committed save is lost with the directory."""
    log = recorded(SCENARIOS["first save"], base).log
    make_directories = durable.make_directories

    def only_new(path: Path, above: Path) -> None:
        if not path.is_dir():
            make_directories(path, above)

    monkeypatch.setattr(local, "make_directories", only_new)
    assert any("is of save None" in finding for finding in findings_after_kills(log, memory, saved_again, {"mkdir"}))
