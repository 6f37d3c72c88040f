"""Simulated nodes: what is started can be found, waited for within a limit, and ended without a rest."""

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from replicated_ckpt.drill import processes
from replicated_ckpt.drill.cluster import Cluster, Job
from replicated_ckpt.drill.drill import drill_directory
from replicated_ckpt.drill.evidence import (
    Evidence,
    JobSpec,
    LoadFailure,
    LoadRecord,
    RankReport,
    SaveRecord,
    WaitRecord,
    write_digests,
)
from replicated_ckpt.drill.plan import DatasetUnusable, DrillError
from replicated_ckpt.errors import ConfigInvalid

SLEEPER = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], "
DETACHED_SLEEPER = SLEEPER + "start_new_session=True); time.sleep(60)"


def test_a_command_that_ends_is_waited_for(tmp_path: Path) -> None:
    """Its output is in the log."""
    Cluster(tmp_path).run_alone("hello", (sys.executable, "-c", "print('hello')"), 30)
    assert (tmp_path / "logs" / "hello.log").read_text() == "hello\n"


def test_what_is_being_started_at_an_interrupt_is_ended_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes when the process is there, and the call that has made it has not returned."""
    started: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            started.append(self)
            signal.raise_signal(signal.SIGINT)

    cluster = Cluster(tmp_path)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in the background ignores it
    try:
        with monkeypatch.context() as patch:
            patch.setattr(subprocess, "Popen", Interrupted)
            with pytest.raises(KeyboardInterrupt):
                cluster.run_alone("long", (sys.executable, "-c", "import time; time.sleep(60)"), 30)
        assert started[0].poll() is None
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
        cluster.end()
    assert started[0].returncode is not None, "it was noted, so its end was awaited"


def test_a_process_that_does_not_show_its_mark_yet_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel has its environment a moment after the call that has started it returns."""
    cluster = Cluster(tmp_path)
    node = cluster._start_node("long", tmp_path / "long", (sys.executable, "-c", "import time; time.sleep(60)"))
    monkeypatch.setattr(processes, "find_processes", lambda _: ())
    cluster.end()
    assert node.process.returncode == -signal.SIGKILL


def test_a_command_that_fails_says_why(tmp_path: Path) -> None:
    """The error carries what the command printed."""
    with pytest.raises(DrillError, match="no luck"):
        Cluster(tmp_path).run_alone("bad", (sys.executable, "-c", "raise SystemExit('no luck')"), 30)


def test_an_error_of_ours_keeps_its_own_next_step(tmp_path: Path) -> None:
    """The hint that the command printed is the hint, and not one of two."""
    program = (
        "from replicated_ckpt.drill.plan import DatasetUnusable; raise SystemExit(str(DatasetUnusable('No data.')))"
    )
    with pytest.raises(DrillError) as raised:
        Cluster(tmp_path).run_alone("bad", (sys.executable, "-c", program), 30)
    assert raised.value.message == "No data."
    assert raised.value.hint == DatasetUnusable.default_hint
    assert str(raised.value).count("Hint:") == 1


def test_a_hang_ends_in_an_error_and_nothing_is_left(tmp_path: Path) -> None:
    """Every wait has a deadline, and `end` finds descendants that left the session, too."""
    cluster = Cluster(tmp_path)
    try:
        with pytest.raises(DrillError, match="hang: waited 2 s"):
            cluster.run_alone("hang", (sys.executable, "-c", DETACHED_SLEEPER), 2)
        found = processes.find_processes(cluster._mark)
        assert found
    finally:
        cluster.end()
    assert processes.find_processes(cluster._mark) == ()


def test_nodes_die_together_with_their_stores(tmp_path: Path) -> None:
    """All processes first, detached ones too: nobody is left to write into a store that is being deleted."""
    cluster = Cluster(tmp_path)
    stores = [tmp_path / f"node-{number}" for number in range(3)]
    for store in stores:
        (store / "step-1").mkdir(parents=True)
        cluster._start_node(store.name, store, (sys.executable, "-c", DETACHED_SLEEPER))
    try:
        cluster.kill_nodes(stores[:2])
        assert [store.exists() for store in stores] == [False, False, True]
        assert not any(processes.find_processes(cluster._mark_of(store)) for store in stores[:2])
        assert processes.find_processes(cluster._mark_of(stores[2]))
    finally:
        cluster.end()


def test_a_job_that_dies_early_is_an_error_at_once(tmp_path: Path) -> None:
    """Nobody waits for reports of ranks that are gone."""
    cluster = Cluster(tmp_path)
    node = cluster._start_node("n", tmp_path / "node-0", (sys.executable, "-c", "raise SystemExit('ouch')"))
    job = Job("n", (node,), 1, tmp_path)
    with pytest.raises(DrillError, match=r"ended too early(.|\n)*ouch"):
        job.wait_until_reported(30)
    cluster.end()


def test_evidence_survives_the_way_through_files(tmp_path: Path) -> None:
    """What ranks write is what the drill reads, in rank order."""
    failure = LoadFailure("ShardLost", "gone", 1, ("__1_0.distcp",))
    reports = tuple(
        RankReport(
            rank,
            (SaveRecord("step-1", 1, 0.5, ("__0_0.distcp",), 2),),
            (LoadRecord("latest", 0.25, raised="CheckpointException", failures=(failure,)),),
            {1: 0.1 + rank},
            WaitRecord(("step-1",), 0.1) if rank else None,
        )
        for rank in range(11)
    )
    for report in reversed(reports):
        report.write_report(tmp_path)
    write_digests(tmp_path, "saved-step-1", {"w": "aa"})
    assert Evidence.read_evidence(tmp_path) == Evidence(reports, {"saved-step-1": {"w": "aa"}})


def test_a_job_spec_survives_the_way_through_a_file(tmp_path: Path) -> None:
    """The ranks do what the drill decided."""
    spec = JobSpec("r", "d", "cpu", 8, 7, 48, 2, ("step-8", "latest"), (4, 8), 12, trains_on=False, limit_s=9.5)
    spec.write_spec(tmp_path / "job.json")
    assert JobSpec.read_spec(tmp_path / "job.json") == spec
    spec = replace(spec, object_store="s3://b/x", storage_options={"client_kwargs": {"endpoint_url": "http://h"}})
    spec.write_spec(tmp_path / "job.json")
    assert JobSpec.read_spec(tmp_path / "job.json") == spec


def test_the_work_directory_goes_unless_kept(tmp_path: Path) -> None:
    """Also after an error; with keep it stays."""
    with drill_directory(tmp_path / "kept", keep=True) as kept:
        (kept / "x").touch()
    assert (tmp_path / "kept" / "x").exists()
    with pytest.raises(ZeroDivisionError), drill_directory(None, keep=False) as gone:
        raise ZeroDivisionError
    assert not gone.exists()


def test_a_folder_with_something_in_it_is_refused(tmp_path: Path) -> None:
    """The drill removes its work directory, so it takes nobody else's."""
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ConfigInvalid, match="not empty"), drill_directory(tmp_path, keep=False):
        pass
    assert (tmp_path / "thesis.tex").exists()


def test_a_folder_that_cannot_be_made_is_an_argument_to_correct(tmp_path: Path) -> None:
    """It is no defect, and the option is named."""
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ConfigInvalid, match=r"--workdir .*/file/x cannot be created: Not a directory\."),
        drill_directory(tmp_path / "file" / "x", keep=False),
    ):
        pass
