"""Fixtures for every test: no process may outlive the suite, and GPU tests need a GPU."""

import gc
import os
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import settings

from replicated_ckpt.agent import launch
from tests.harness.forked import spawner
from tests.harness.processes import end, processes_of, wait_until_gone
from tests.harness.zygote import stop_the_zygotes, the_light_zygote
from tests.stopwatch import Stopwatch

pytest_plugins = ["tests.buckets.fixtures"]


settings.register_profile("no test is timed", deadline=None)
settings.load_profile("no test is timed")

HERE = Path(__file__).parent
LONGEST = (
    "fault/test_bad_peers.py",
    "fault/killed/test_memory_tier.py",
    "fault/power_loss/test_power_loss.py",
    "fault/killed/test_kill_at_every_step.py",
    "multiprocess/loads/test_resharding.py",
    "multiprocess/saves/test_async.py",
    "multiprocess/saves/test_saving.py",
    "object_tier/faults/test_bucket_faults.py",
    "fault/combined/test_two_histories.py",
    "object_tier/faults/test_loads_with_bucket_faults.py",
    "object_tier/faults/test_half_uploaded.py",
    "multiprocess/saves/test_peers.py",
    "agent/repair/test_retention.py",
    "multiprocess/loads/test_node_loss.py",
    "object_tier/faults/test_kill_at_every_upload_step.py",
    "object_tier/faults/test_damage.py",
    "multiprocess/saves/test_endurance.py",
    "multiprocess/saves/test_errors_reach_all.py",
    "fault/test_torture.py",
    "agent/repair/test_healing.py",
    "fault/hostile/test_hostile_bucket.py",
    "multiprocess/test_examples.py",
)
"""Files that take longest, in `make test`, the longest first. Then come those that wait for processes, then all others."""

IDLE_AGENTS_WITHIN_S = 15.0

WAITING = (
    "fault/test_bad_peers.py",
    "fault/killed/test_submitted_saves.py",
    "agent/life/test_told_to_stop.py",
    "multiprocess/saves/test_ranks_missed.py",
    "agent/test_submissions.py",
    "object_tier/faults/test_bucket_faults.py",
    "fault/combined/test_two_histories.py",
    "object_tier/faults/test_loads_with_bucket_faults.py",
    "object_tier/faults/test_half_uploaded.py",
    "agent/repair/test_retention.py",
    "cli/removal/test_removal.py",
    "fault/combined/test_saves_over_another_run.py",
    "agent/test_agent.py",
    "stores/test_peer_sink.py",
    "cli/test_status.py",
    "multiprocess/saves/test_peers.py",
    "multiprocess/loads/test_hung_agent.py",
    "object_tier/faults/test_takeover.py",
    "fault/hostile/test_greetings.py",
    "fault/hostile/test_http_server.py",
    "dcp/load/test_silent_peers.py",
    "stores/bucket/test_object_body.py",
    "object_tier/faults/test_frozen_share.py",
    "fault/hostile/test_hostile_connections.py",
    "agent/repair/test_reprotect.py",
    "fault/killed/test_ack_levels.py",
    "stores/node_cache/test_stall_timeout.py",
    "fault/hostile/test_peers_token.py",
)
"""Files that mostly wait for time-outs: of several workers, half take these first, while the others compute."""


@pytest.fixture(scope="session", autouse=True)
def agents_are_forked() -> Iterator[None]:
    """Agents that a save or load of the test process starts are forked, as those of simulated nodes are."""
    with mock.patch.object(launch, "spawn_agent", spawner(lambda: the_light_zygote().path)):
        yield


@pytest.fixture(scope="session", autouse=True)
def no_agent_survives(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fails the suite if an agent of one of its stores still runs at its end. Ends the zygotes.

    An agent with an idle time-out may still use up that time.
    """
    yield
    stop_the_zygotes()
    base = f"{tmp_path_factory.getbasetemp()}{os.sep}"
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in processes_of(base)}
    agents = {pid: command for pid, command in commands.items() if b"replicated_ckpt" in command}
    left = wait_until_gone(list(agents), IDLE_AGENTS_WITHIN_S)
    end(left)
    told = [agents[pid] for pid in left]
    assert not left, f"agents of stores under {base} outlived the tests that started them: {told}"


@pytest.fixture
def stopwatch() -> Iterator[Stopwatch]:
    """A stopwatch that runs for this test, and stands still while the machine does."""
    with Stopwatch() as running:
        yield running


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Names bytes by their argument. Compressed bytes contain the time, and all workers must collect the same names."""
    return argname if isinstance(val, bytes) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs the longest files first, so that the workers end at about the same time."""
    items.sort(key=_turn)
    _check_names(items)
    needs_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if needs_gpu and not Path("/dev/nvidiactl").exists():
        for item in needs_gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))


def _check_names(items: list[pytest.Item]) -> None:
    """Refuses tests that are named by the text of a set. It differs by process, so workers would collect different
    tests.
    """
    for item in items:
        given = item.callspec.params if hasattr(item, "callspec") else {}
        for value in given.values():
            if isinstance(value, (set, frozenset)) and len(value) > 1 and str(value) in item.name:
                raise pytest.UsageError(f"{item.nodeid} is named by a set: give its parameters as a list, or an id")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Gives whole files to a worker, as `--dist loadfile` does. Half of the workers prefer files that mostly wait."""
    scheduler: Any = import_module("xdist.scheduler").LoadFileScheduling(config, log)
    assign = scheduler._assign_work_unit

    def assign_fitting(worker: Any) -> None:
        queue, waits = scheduler.workqueue, worker in scheduler.nodes[len(scheduler.nodes) // 2 :]
        fitting = (file for file in queue if (file.removeprefix("tests/") in WAITING) == waits)
        queue.move_to_end(next(fitting, next(iter(queue))), last=False)
        assign(worker)

    scheduler._assign_work_unit = assign_fitting
    return scheduler


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    """Stops garbage collection during the collection of tests, of which it is a quarter of the time."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Excludes everything imported so far from garbage collection, which takes 0.3 s with torch."""
    gc.enable()
    gc.collect()
    gc.freeze()


def _turn(item: pytest.Item) -> tuple[int, bool]:
    path = item.path.relative_to(HERE).as_posix()
    waits = any(item.get_closest_marker(name) for name in ("fault", "multiprocess"))
    return LONGEST.index(path) if path in LONGEST else len(LONGEST), not waits
