"""Simulated nodes: processes can be found, waited for within a limit, and ended completely."""

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


def test_a_process_that_starts_during_an_interrupt_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C arrives after the process is created, but before the call returns: the process is ended all the same."""
    started: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            started.append(self)
            signal.raise_signal(signal.SIGINT)

    cluster = Cluster(tmp_path)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background ignores SIGINT
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
    assert started[0].returncode is not None, "the process was recorded and ended"


def test_a_process_that_does_not_show_its_mark_yet_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a new process may not be readable yet: the process is ended all the same."""
    cluster = Cluster(tmp_path)
    node = cluster._start_node("long", tmp_path / "long", (sys.executable, "-c", "import time; time.sleep(60)"))
    monkeypatch.setattr(processes, "find_processes", lambda _: ())
    cluster.end()
    assert node.process.returncode == -signal.SIGKILL


def test_the_error_has_the_output_of_the_failed_command(tmp_path: Path) -> None:
    """The error contains what the command printed."""
    with pytest.raises(DrillError, match="no luck"):
        Cluster(tmp_path).run_alone("bad", (sys.executable, "-c", "raise SystemExit('no luck')"), 30)


def test_a_typed_error_keeps_its_hint(tmp_path: Path) -> None:
    """The hint that the command printed is the only hint of the error."""
    program = (
        "from replicated_ckpt.drill.plan import DatasetUnusable; raise SystemExit(str(DatasetUnusable('No data.')))"
    )
    with pytest.raises(DrillError) as raised:
        Cluster(tmp_path).run_alone("bad", (sys.executable, "-c", program), 30)
    assert raised.value.message == "No data."
    assert raised.value.hint == DatasetUnusable.default_hint
    assert str(raised.value).count("Hint:") == 1


def test_a_hang_ends_in_an_error_and_nothing_is_left(tmp_path: Path) -> None:
    """Every wait has a deadline. `end` also finds descendants in other sessions."""
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
    """All processes of the nodes end before their stores are deleted, also detached ones."""
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
    """The drill does not wait for reports of dead ranks."""
    cluster = Cluster(tmp_path)
    node = cluster._start_node("n", tmp_path / "node-0", (sys.executable, "-c", "raise SystemExit('ouch')"))
    job = Job("n", (node,), 1, tmp_path)
    with pytest.raises(DrillError, match=r"ended too early(.|\n)*ouch"):
        job.wait_until_reported(30)
    cluster.end()


def test_evidence_is_read_back_unchanged(tmp_path: Path) -> None:
    """The drill reads what ranks wrote, in rank order."""
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


def test_a_job_spec_is_read_back_unchanged(tmp_path: Path) -> None:
    """A job spec is read back unchanged."""
    spec = JobSpec("r", "d", "cpu", 8, 7, 48, 2, ("step-8", "latest"), (4, 8), 12, trains_on=False, limit_s=9.5)
    spec.write_spec(tmp_path / "job.json")
    assert JobSpec.read_spec(tmp_path / "job.json") == spec
    spec = replace(spec, object_store="s3://b/x", storage_options={"client_kwargs": {"endpoint_url": "http://h"}})
    spec.write_spec(tmp_path / "job.json")
    assert JobSpec.read_spec(tmp_path / "job.json") == spec


def test_the_work_directory_is_removed_unless_kept(tmp_path: Path) -> None:
    """The work directory is removed, also after an error, unless `keep` is set."""
    with drill_directory(tmp_path / "kept", keep=True) as kept:
        (kept / "x").touch()
    assert (tmp_path / "kept" / "x").exists()
    with pytest.raises(ZeroDivisionError), drill_directory(None, keep=False) as gone:
        raise ZeroDivisionError
    assert not gone.exists()


def test_a_folder_with_something_in_it_is_refused(tmp_path: Path) -> None:
    """The drill removes its work directory, so it refuses a directory with files."""
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ConfigInvalid, match="not empty"), drill_directory(tmp_path, keep=False):
        pass
    assert (tmp_path / "thesis.tex").exists()


def test_a_folder_that_cannot_be_created_is_a_usage_error(tmp_path: Path) -> None:
    """The error is ConfigInvalid, and names the option."""
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ConfigInvalid, match=r"--workdir .*/file/x cannot be created: Not a directory\."),
        drill_directory(tmp_path / "file" / "x", keep=False),
    ):
        pass
