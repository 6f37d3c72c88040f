"""A rank or an agent is killed in a save in which the buddies' ranks write the copies from their own memory."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from replicated_ckpt import failpoints
from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.cli.main import main
from tests.harness.cluster import Cluster, call
from tests.marks import mark_long
from tests.steps import fault, replicas

pytestmark = [pytest.mark.multiprocess, pytest.mark.fault, pytest.mark.timeout(300)]

KINDS = ["app:unwrapped"]
COPIES_WITHIN_S = 30.0
# The first save sends its copies; the second one, step-1, is the first in which buddies write them. `@n` counts the hits
# in one process.
BEFORE_DECISION = [
    ("rank.helped=kill", "rank0"),
    ("rank.helped=kill", "rank1"),
    ("store.shard-fsynced=kill@3", "rank1"),  # hit 3 is the copy: the rank writes its own shard of each save first
    ("store.shard-named=kill@3", "rank0"),
    ("rank.written=kill@2", "rank1"),
    ("rank.receipted=kill@2", "rank1"),
    ("coordinator.metadata-staged=kill@2", "rank0"),
]
AFTER_DECISION = [("coordinator.decided=kill@2", "rank0"), ("coordinator.published=kill@2", "rank0")]
CASES = [(*case, False) for case in BEFORE_DECISION] + [(*case, True) for case in AFTER_DECISION]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path / "cluster", 2, quick_exit=True) as cluster:
        yield cluster


def await_copies(cluster: Cluster, checkpoint_id: str) -> None:
    """Waits until both nodes have the same two shards of the checkpoint."""
    deadline = time.monotonic() + COPIES_WITHIN_S
    while True:
        found = [
            {path.name: path.read_bytes() for path in (node.disk / checkpoint_id).glob("*.distcp")}
            for node in cluster.nodes
        ]
        if len(found[0]) == 2 and found[0] == found[1]:
            return
        assert time.monotonic() < deadline, [sorted(names) for names in found]
        time.sleep(0.1)


SUBMITTED = [
    ("rank.submitted=kill@3", "rank1", None),  # hit 3 is the copy: a rank submits its own shard first
    ("rank.receipted=kill@2", "rank0", None),
    ("agent.writing=kill@4", "agent1", None),
    ("agent.submitted=kill@3", "agent0", None),
    ("agent.finishing=kill@2", "agent0", None),
    ("agent.decided=kill@2", "agent0", True),
    ("coordinator.submitted=kill@2", "rank0", True),
]


@pytest.mark.parametrize(("armed", "victim", "is_decided"), mark_long(SUBMITTED, keep=[SUBMITTED[0], SUBMITTED[4]]))
@pytest.mark.parametrize("ack", mark_long(["peer", "local"], keep=["peer"]))
def test_a_kill_in_an_asynchronous_save_loses_nothing(
    cluster: Cluster, armed: str, victim: str, is_decided: bool | None, ack: str
) -> None:
    """A rank or an agent is killed while agents write the copies. Where `is_decided` is None, the save may be complete
    or absent.
    """
    node = int(victim[-1])
    environment = {failpoints.ENV: armed}
    cluster.start_agents({index: environment if victim == f"agent{index}" else {} for index in (0, 1)})
    if victim.startswith("rank"):
        cluster.nodes[node].environment = environment
    save = call(replicas.save_repeatedly, kind="unwrapped", saves=3, is_kept=True, is_async=True, ack=ack)
    attempt = cluster.attempt([save], nodes=[0, 1])
    if victim.startswith("rank"):
        assert attempt.codes[node] == -signal.SIGKILL, f"{armed} was not reached: {attempt}"
    else:
        assert cluster.agent_code(node) == -signal.SIGKILL, f"{armed} was not reached: {attempt}"
    cluster.nodes[node].environment = {}
    newest = call(fault.seed_of, kinds=KINDS, checkpoint_id="latest", seeds=[0])
    named = call(fault.seed_of, kinds=KINDS, checkpoint_id="run/step-1", seeds=[0])
    again = call(replicas.save_repeatedly, kind="unwrapped", saves=2, is_kept=True, is_async=True, ack=ack)
    results = cluster.launch([newest, named, again], nodes=[0, 1])
    assert results.of(newest).agreed() == 0
    assert results.of(named).agreed() in (
        [0] if is_decided else [0, ["CheckpointNotFound"], ["CheckpointNotCommitted"]]
    )
    for name in ("run/step-0", "run/step-1"):
        await_copies(cluster, name)
    assert main(["verify", "--root", str(cluster.nodes[0].disk), "run/step-1"]) in (ExitCode.OK, ExitCode.UNREACHABLE)


@pytest.mark.parametrize(("armed", "victim", "is_decided"), mark_long(CASES, keep=[CASES[1], CASES[3], CASES[-2]]))
@pytest.mark.parametrize("lost", mark_long([None, 0, 1], keep=[None]))
def test_a_kill_loses_nothing(cluster: Cluster, armed: str, victim: str, is_decided: bool, lost: int | None) -> None:
    """The killed save is complete or absent, even if either node's disk is lost as well. The acknowledged save loads."""
    rank = int(victim[-1])
    cluster.nodes[rank].environment = {failpoints.ENV: armed}
    attempt = cluster.attempt([call(replicas.save_repeatedly, kind="unwrapped", saves=3, is_kept=True)], nodes=[0, 1])
    assert attempt.codes[rank] == -signal.SIGKILL, f"{armed} was not reached: {attempt}"
    cluster.nodes[rank].environment = {}
    for node in cluster.nodes:
        node.kill_agent()
    if lost is not None:
        cluster.nodes[lost].lose()
    newest = call(fault.seed_of, kinds=KINDS, checkpoint_id="latest", seeds=[0])
    named = call(fault.seed_of, kinds=KINDS, checkpoint_id="run/step-1", seeds=[0])
    again = call(replicas.save_repeatedly, kind="unwrapped", saves=2, is_kept=True)
    results = cluster.launch([newest, named, again], nodes=[0, 1])
    assert results.of(newest).agreed() == 0
    # If only the lost disk had the decision, the save is lost. It was not acknowledged.
    if lost is None or not is_decided or armed.startswith("coordinator.published"):
        assert (results.of(named).agreed() == 0) == is_decided
    for name in ("run/step-0", "run/step-1"):
        await_copies(cluster, name)
    assert main(["verify", "--root", str(cluster.nodes[0].disk), "run/step-1"]) in (ExitCode.OK, ExitCode.UNREACHABLE)
