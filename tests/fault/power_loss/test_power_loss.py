"""Power loss: whatever is lost that was not fsynced, a restart finds what was promised, and nothing else passes for it."""

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
"""The two that are left out restart as a first save does."""
QUICK = ["abort before the decision", "retirement"]
"""Two that have few states: in one a restart removes what was never promised, in the other it completes a removal."""
ALWAYS = [
    name
    for name in SCENARIOS
    if name not in {"removal and save over its files", "copies in memory", "abort after the decision"}
]
"""Of those that are left out, with the most states, the halves or the other copies are scenarios of their own."""
GoOn = Callable[[LocalStore], None]
SAMPLED = 25
"""Power losses, drawn with a fixed seed, after which the restart is itself cut off."""

UNNEEDED = {
    "disks/node": "before the staging area is made: the one after that does for both",
    "disks/node/.staging/SAVE.json.PID.tmp": "an intent that cannot be read is removed as one without a name",
    "disks/node/.staging/SAVE": "after .metadata, before the manifest; and before the commit if nothing was dropped",
    "disks/node/runs/seed-0": "after the commit, which a restart repeats",
}
"""Fsyncs of a first save one of which may be left out, and why. They stay: not every caller goes on as a save does."""


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory where there is one: thousands of states are built there."""
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
def test_after_a_power_loss_a_node_holds_what_it_promised(name: str, base: Path, memory: Path) -> None:
    """Every state that any moment can leave: no half checkpoint, no lost one, no leftover; and the next save works."""
    assert Judge(memory).findings(crash_states(recorded(SCENARIOS[name], base).log)) == []


@pytest.mark.parametrize("name", mark_long(NESTED, keep=QUICK))
def test_a_restart_after_a_kill_can_itself_lose_power(name: str, base: Path, memory: Path) -> None:
    """What a killed process had not made durable is not taken for durable by the one that comes after it."""
    assert findings_after_kills(recorded(SCENARIOS[name], base).log, memory, restarted) == []


@pytest.mark.long
@pytest.mark.parametrize("name", ["overwrite", "overwrite without hard links"])
@pytest.mark.parametrize("go_on", [settled_by_next_save, committed_again])
def test_whoever_goes_on_after_a_kill_can_lose_power(name: str, go_on: GoOn, base: Path, memory: Path) -> None:
    """A next save without a restart, and a commit that is repeated, stand on nothing that is not durable."""
    log = recorded(SCENARIOS[name], base).log
    assert findings_after_kills(log, memory, go_on, {"rename", "exchange", "unlink"}) == []


@pytest.mark.long
def test_a_save_after_a_kill_makes_all_durable_that_it_stands_on(base: Path, memory: Path) -> None:
    """A directory or an identity that a killed process made, and did not come to fsync, is not lost under a later save."""
    log = recorded(SCENARIOS["first save"], base).log
    assert findings_after_kills(log, memory, saved_again, {"mkdir", "link"}) == []


def findings_after_kills(log: Log, memory: Path, go_on: GoOn, after: Collection[str] = ()) -> list[str]:
    """What is wrong when the process is killed after any operation, or any of these, another goes on, and power is lost."""
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
    """What a restart completed or removed stays so, and one that was cut off is repeated by the next."""
    states = list(crash_states(recorded(SCENARIOS[name], base).log))
    judge = Judge(memory)
    for state in random.Random(0).sample(states, min(SAMPLED, len(states))):
        log = restarted_after_power_loss(state, memory / "lost")
        assert judge.findings(crash_states(log)) == [], state
        shutil.rmtree(memory / "lost")


# The tests can fail ----------------------------------------------------------------------------------------------


class WithoutFileFsync:
    """The module `os`, in which fsync does nothing for files."""

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
    """Without the fsync of directories, of shards or of small files the replay finds promises that are broken."""
    with monkeypatch.context() as patched:
        leave_out(patched)
        log = recorded(SCENARIOS[name], base).log
    assert Judge(memory).findings(crash_states(log)) != []


@pytest.mark.long
def test_each_fsync_of_a_save_is_needed_or_known_not_to_be(base: Path, memory: Path) -> None:
    """Taking any one fsync out of a first save is found, but for those whose work another one does as well."""
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
        "those, the checkpoint's directory and its parents, the identity, shards, .metadata, manifest"
    )


def test_giving_up_before_the_decision_is_gone_durably_is_found(
    base: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save that is aborted would come back in part, decided and without its shards."""
    monkeypatch.setattr(local, "fsync_directory", lambda path: None)
    log = recorded(SCENARIOS["abort after the decision"], base).log
    assert any("distcp" in finding for finding in Judge(memory).findings(crash_states(log)))


def test_removing_before_a_retirement_is_durable_is_found(
    base: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint would come back in part."""
    monkeypatch.setattr(removing, "fsync_directory", lambda path: None)
    log = recorded(SCENARIOS["retirement"], base).log
    found = Judge(memory).findings(crash_states(log)) or findings_after_kills(log, memory, restarted)
    assert any("distcp" in finding for finding in found)


@pytest.mark.parametrize("forgotten", ["the removal", "their bytes"])
def test_recycling_before_something_is_durable_is_found(
    base: Path, memory: Path, monkeypatch: pytest.MonkeyPatch, forgotten: str
) -> None:
    """The old checkpoint would come back with bytes of the new one, or a shard that was acknowledged would be lost."""
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
    """Also where a crash can leave both names of a rename, as without a journal: no later save finds it in the pool."""
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
    """A directory that is there need not be durable: without its fsync a committed save is lost with it."""
    log = recorded(SCENARIOS["first save"], base).log
    make_directories = durable.make_directories

    def only_new(path: Path, above: Path) -> None:
        if not path.is_dir():
            make_directories(path, above)

    monkeypatch.setattr(local, "make_directories", only_new)
    assert any("is of save None" in finding for finding in findings_after_kills(log, memory, saved_again, {"mkdir"}))
