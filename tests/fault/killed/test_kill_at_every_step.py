"""SIGKILL at every failpoint of a save, in every role: nothing acknowledged is lost, and no partial checkpoint remains."""

import json
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from replicated_ckpt import failpoints
from replicated_ckpt.cli.main import main
from replicated_ckpt.stores.local.store import LocalStore
from tests.harness.cluster import Attempt, Call, Cluster, call
from tests.harness.node import Node
from tests.marks import mark_long
from tests.steps import fault, state

pytestmark = [pytest.mark.fault, pytest.mark.timeout(120)]

KINDS = ["plain", "own"]
OLD, NEW, NEXT = SEEDS = [1, 2, 3]
GONE = ["CheckpointNotFound"]
COPIES_WITHIN_S = 40.0
LITTER_WITHIN_S = 10.0
LITTER = call(fault.litter, within_s=LITTER_WITHIN_S)
ORDER = list(failpoints.POINTS)


def is_of_upload(name: str) -> bool:
    """Whether tests/object_tier has the kill at this failpoint."""
    return name.startswith("upload.")


@dataclass(frozen=True)
class Case:
    """`victim` is killed at `point`: a rank, or the agent of a node. Rank 0 and node 0 coordinate.

    `overwrite`: the save replaces the old checkpoint. `writer`, `others`: options of the writer and failpoints of other
    processes that bring the save to that point.
    """

    point: str
    victim: str
    overwrite: bool = False
    writer: dict[str, Any] = field(default_factory=dict)
    others: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.point}-{self.victim}{'-overwrite' if self.overwrite else ''}"

    @property
    def node(self) -> int:
        return int(self.victim[-1])

    @property
    def is_decided(self) -> bool:
        """Whether the decision is durable on some node when the victim dies."""
        return ORDER.index("coordinator.decided") <= ORDER.index(self.point) < ORDER.index("abort.undecided")

    def armed(self, who: str) -> dict[str, str]:
        actions = dict(self.others)
        points = [f"{self.point}=kill"] if who == self.victim else []
        points += [actions[who]] if who in actions else []
        return {failpoints.ENV: ",".join(points)}


SUBMITTED = {"rank.handing-over", "rank.submitted", "agent.submitted", "agent.writing", "coordinator.submitted"}
SUBMITTED |= {"agent.finishing", "agent.decided", "agent.finished"}
LATER_SAVES = {"rank.helped"}  # test_kill_in_own_copies.py
RANKS = ["rank0", "rank1"]
AGENTS = ["agent0", "agent1"]
COMMIT = [point for point in ORDER if point.startswith("commit.")]
VICTIMS_BY_POINT: dict[str, list[str]] = {
    **{point: RANKS for point in ORDER if point.startswith("rank.") and point not in SUBMITTED | LATER_SAVES},
    **{point: ["rank0"] for point in ORDER if point.startswith("coordinator.") and point not in SUBMITTED},
    **dict.fromkeys(("store.intent-written", "store.opened", "agent.receiving"), AGENTS),
    **dict.fromkeys(("store.shard-fsynced", "store.shard-named"), RANKS + AGENTS),
    "agent.decision-staged": ["agent1"],
    **dict.fromkeys(COMMIT, AGENTS),
}
PUBLISHING = ["coordinator.decided", "agent.decision-staged", *COMMIT, "coordinator.published"]
NEW_ID = [Case(point, victim) for point, victims in VICTIMS_BY_POINT.items() for victim in victims]
NEW_ID += [Case("abort.undecided", agent, others={"rank1": "rank.writing=raise"}) for agent in AGENTS]
NEW_ID += [Case("restore.copied", agent, writer={"ack": "local"}) for agent in AGENTS]
SAME_ID = [
    Case(point, victim, overwrite=True) for point in PUBLISHING for victim in VICTIMS_BY_POINT.get(point, AGENTS)
]
LOSSES = [
    (Case("coordinator.metadata-staged", "rank0"), 0),
    (Case("coordinator.decided", "rank0"), 0),
    (Case("coordinator.decided", "rank0"), 1),
    (Case("coordinator.published", "rank0"), 0),
    (Case("agent.decision-staged", "agent1"), 0),
    (Case("commit.checked", "agent1"), 0),
    (Case("commit.named", "agent0"), 1),
    (Case("commit.prepared", "agent1", overwrite=True), 0),
]
DECISIVE = {
    "coordinator.opened", "rank.writing", "store.shard-fsynced", "coordinator.metadata-staged", "coordinator.decided",
    "agent.decision-staged", "commit.named", "abort.undecided", "restore.copied",
}  # fmt: skip
LEFT_TO_A_LOAD = [
    Case("coordinator.opened", "rank0"),
    Case("rank.written", "rank1"),
    Case("coordinator.metadata-staged", "rank0"),
    Case("coordinator.decided", "rank0"),
]


def one_of_each_point(cases: Sequence[Case]) -> list[Case]:
    """One case of each failpoint, with alternating roles."""
    by_point = {case.point: [other for other in cases if other.point == case.point] for case in cases}
    return [of_point[number % len(of_point)] for number, of_point in enumerate(by_point.values())]


QUICK = [case for case in one_of_each_point(NEW_ID) if case.point in DECISIVE]
"""The cases of `make test`. The power-loss tests cover each step of an agent's commit in one process."""


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes whose last acknowledged checkpoint is step-1, with values from the seed OLD."""
    with Cluster(tmp_path_factory.mktemp("old") / "cluster", 2, quick_exit=True) as cluster:
        cluster.launch([save("step-1", OLD)], nodes=[0, 1])
        cluster.stop_agents()
        yield cluster


@pytest.fixture
def cluster(old: Cluster, tmp_path: Path) -> Iterator[Cluster]:
    """A copy of `old` for one test."""
    with Cluster(tmp_path / "cluster", 2, quick_exit=True) as cluster:
        for source, node in zip(old.nodes, cluster.nodes, strict=True):
            shutil.copytree(source.disk, node.disk, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".agent"))
        yield cluster


def save(checkpoint_id: str, seed: int, **writer: Any) -> Call[Any]:
    return call(state.save, kinds=KINDS, checkpoint_id=checkpoint_id, seed=seed, **writer)


def seed_of(checkpoint_id: str) -> Call[Any]:
    return call(fault.seed_of, kinds=KINDS, checkpoint_id=checkpoint_id, seeds=SEEDS)


def killed(cluster: Cluster, case: Case) -> Attempt:
    """Runs a save in which the victim is killed at its failpoint, and no other agent or rank is killed."""
    cluster.start_agents({node: case.armed(f"agent{node}") for node in (0, 1)})
    for rank in (0, 1):
        cluster.nodes[rank].environment = case.armed(f"rank{rank}")
    checkpoint_id = "step-1" if case.overwrite else "step-2"
    writer = {**case.writer, "overwrite": case.overwrite}
    attempt = cluster.attempt([save(checkpoint_id, NEW, **writer)], nodes=[0, 1])
    for node in cluster.nodes:
        node.environment = {}
    if case.victim.startswith("rank"):
        assert attempt.codes[case.node] == -signal.SIGKILL, f"{case.name} was not reached: {attempt}"
    else:
        assert cluster.agent_code(case.node) == -signal.SIGKILL, f"{case.name} was not reached: {attempt}"
        assert -signal.SIGKILL not in attempt.codes
    return attempt


def expected_seed(case: Case, attempt: Attempt) -> int:
    """The seed of the newest checkpoint after the restart: a save that was acknowledged or decided stays."""
    return NEW if attempt.codes == [0, 0] or case.is_decided else OLD


def assert_nodes_are_alike(cluster: Cluster, checkpoint_ids: set[str]) -> None:
    """Both nodes have exactly these checkpoints, from the same saves, and a copy of every shard."""
    deadline = time.monotonic() + COPIES_WITHIN_S
    for node in cluster.nodes:
        assert node.checkpoints() == checkpoint_ids
    for checkpoint_id in checkpoint_ids:
        first, second = (
            json.loads((node.disk / checkpoint_id / ".manifest.json").read_text()) for node in cluster.nodes
        )
        assert first == second
        names = {".metadata", ".manifest.json", *first["manifest"]["shards"]}
        assert len(names) == 4
        for node in cluster.nodes:
            while node.files(checkpoint_id) != names and time.monotonic() < deadline:
                time.sleep(0.05)
            assert node.files(checkpoint_id) == names


@pytest.mark.parametrize("case", mark_long(NEW_ID, keep=QUICK), ids=lambda case: case.name)
def test_a_kill_during_a_save(cluster: Cluster, case: Case) -> None:
    """The old checkpoint loads bit for bit. The killed save is complete or absent, on both nodes alike. The next save
    succeeds.
    """
    expected = expected_seed(case, killed(cluster, case))
    latest, old, new, old_at_last = (seed_of(name) for name in ("latest", "step-1", "step-2", "step-1"))
    save_next = call(fault.save_next, kinds=KINDS, attempted="step-2", otherwise="step-3")
    of_next = call(fault.seed_of_next, kinds=KINDS, seeds=SEEDS)
    results = cluster.launch([latest, old, new, save_next, of_next, old_at_last, LITTER], nodes=[0, 1])
    assert results.of(latest).agreed() == expected
    assert results.of(old).agreed() == results.of(old_at_last).agreed() == OLD
    assert results.of(new).agreed() in ([NEW] if expected == NEW else [GONE, ["CheckpointNotCommitted"]])
    assert results.of(save_next).agreed() == ("step-3" if expected == NEW else "step-2")
    assert results.of(of_next).agreed() == NEXT
    assert results.of(LITTER) == [[], []]
    assert_nodes_are_alike(cluster, {"step-1", "step-2"} | ({"step-3"} if expected == NEW else set()))


@pytest.mark.parametrize("case", mark_long(SAME_ID, keep=[SAME_ID[0], SAME_ID[-1]]), ids=lambda case: case.name)
def test_a_kill_while_a_checkpoint_is_replaced(cluster: Cluster, case: Case) -> None:
    """The replacement is decided: afterwards the name loads the new values on every node, and can be replaced again."""
    killed(cluster, case)
    latest, replaced, replaced_again = (seed_of(name) for name in ("latest", "step-1", "step-1"))
    again = save("step-1", NEXT, overwrite=True)
    results = cluster.launch([latest, replaced, again, replaced_again, LITTER], nodes=[0, 1])
    assert results.of(latest).agreed() == results.of(replaced).agreed() == NEW
    assert results.of(replaced_again).agreed() == NEXT
    assert results.of(LITTER) == [[], []]
    assert_nodes_are_alike(cluster, {"step-1"})


@pytest.mark.parametrize("case", mark_long(LEFT_TO_A_LOAD, keep=LEFT_TO_A_LOAD[-1:]), ids=lambda case: case.name)
def test_a_load_alone_settles_a_killed_job(cluster: Cluster, case: Case) -> None:
    """All ranks and agents are killed: after the next load the killed save is complete or absent, and no staged files
    are left.
    """
    expected = expected_seed(case, killed(cluster, case))
    for node in cluster.nodes:
        node.kill_agent()
    latest, old = seed_of("latest"), seed_of("step-1")
    results = cluster.launch([latest, old, LITTER], nodes=[0, 1])
    assert results.of(latest).agreed() == expected
    assert results.of(old).agreed() == OLD
    assert results.of(LITTER) == [[], []]
    assert_nodes_are_alike(cluster, {"step-1"} | ({"step-2"} if expected == NEW else set()))


@pytest.mark.parametrize(
    ("case", "lost"), mark_long(LOSSES, keep=LOSSES[-2:]), ids=lambda value: getattr(value, "name", f"lost{value}")
)
def test_a_kill_and_then_the_loss_of_a_node(cluster: Cluster, case: Case, lost: int) -> None:
    """One node's disk is lost as well: acknowledged checkpoints load bit for bit, and the killed save is complete or
    absent.

    If only the lost node may have the decision, the save stays in doubt on the other node until the operator declares
    the lost node gone.
    """
    attempt = killed(cluster, case)
    for node in cluster.nodes:
        node.kill_agent()
    cluster.nodes[lost].lose()
    only_decision_is_lost = case.victim == f"rank{lost}" and case.point == "coordinator.decided"
    expected = OLD if only_decision_is_lost else expected_seed(case, attempt)
    old_id = NEW if case.overwrite else OLD
    latest, old, new = (seed_of(name) for name in ("latest", "step-1", "step-3"))
    results = cluster.launch([latest, old, save("step-3", NEXT), new, LITTER], nodes=[0, 1])
    assert results.of(latest).agreed() == expected
    assert results.of(old).agreed() == old_id
    assert results.of(new).agreed() == NEXT
    is_in_doubt = only_decision_is_lost or (case.victim, case.point) == (f"rank{lost}", "coordinator.metadata-staged")
    if is_in_doubt:
        abort_for_lost_nodes(cluster.nodes[1 - lost])
    assert results.of(LITTER)[lost] == []
    assert (results.of(LITTER)[1 - lost] == []) != is_in_doubt


def abort_for_lost_nodes(node: Node) -> None:
    """Runs `repair --lost` for every other node of the save that is in doubt."""
    store = LocalStore(node.disk)
    (staged,) = store.list_staged()
    lost = set(staged.nodes) - {store.node_id()}
    options = [option for name in sorted(lost) for option in ("--lost", name)]
    # The exit code is not checked: the other node's agent may have exited.
    main(["repair", "--root", str(node.disk), *options])
    assert store.list_staged() == ()


def test_every_failpoint_has_a_kill() -> None:
    """For each failpoint, a test kills a process there."""
    elsewhere = {"retire.gone"}  # tests/agent/repair/test_retention.py
    elsewhere |= {"retire.recycled", "store.recycled"}  # tests/stores/local/test_recycled.py
    elsewhere |= {name for name in ORDER if name.startswith("slim.")}  # test_kill_while_slimmed.py
    elsewhere |= {"store.linked"}  # tests/fault/killed/test_kill_in_links.py
    elsewhere |= SUBMITTED | LATER_SAVES  # tests/fault/killed/test_submitted_saves.py, test_kill_in_own_copies.py
    killed_at = {case.point for case in NEW_ID + SAME_ID} | elsewhere
    assert killed_at == {name for name in failpoints.POINTS if not is_of_upload(name)}
