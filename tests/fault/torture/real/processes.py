"""The cluster of real processes: real agents, real ranks over gloo, real SIGKILL and SIGSTOP."""

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from replicated_ckpt import failpoints
from replicated_ckpt.agent.state.endpoint import read_endpoint
from replicated_ckpt.core.upkeep.repair_plan import Problem
from replicated_ckpt.dcp.save.agent_tasks import ObjectTier
from replicated_ckpt.errors import CheckpointNotFound, ReplicatedCkptError, ShardLost
from replicated_ckpt.stores.bucket_client.url import ObjectTarget
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.peer.client import AgentClient
from tests.fault.torture.contents import State, contents
from tests.fault.torture.course import Backend
from tests.fault.torture.real.submitted import SubmittedSaves
from tests.fault.torture.simulated.faults import Outage
from tests.fault.torture.simulated.jobs import FirstError, Policy, Saved
from tests.fault.torture.simulated.network import Actor
from tests.harness import cluster as multiprocess
from tests.harness.cluster import Call, call
from tests.harness.launch import T
from tests.harness.processes import end, signal_if_running, wait_until_gone
from tests.steps import torture

LOST_AFTER_S, AWAY_AFTER_S = 1.5, 5.0
PROTECT_WITHIN_S, LEAVE_WITHIN_S = 60.0, 120.0
IDLE_EXIT_S = 1200.0
"""Longer than any schedule. If a run is killed, its agents end after this time."""
WAIT_S_MAX = 6.0
"""The longest wait: longer than the grace period of a newly opened save, and than both times above."""
_POLL_S = 0.1
_LOOK_S = 0.005


class RealNode:
    """One node: its disk and its agent."""

    def __init__(self, cluster: "RealCluster", index: int) -> None:
        self._cluster = cluster
        self._node = cluster.processes.nodes[index]
        self.index = index
        self.root = self._node.disk
        self.is_off = False

    @property
    def is_up(self) -> bool:
        return self._node.agent_pid() is not None

    def node_id(self) -> str:
        return str(json.loads((self.root / "node.json").read_text())["node_id"])

    def boot(self, environment: dict[str, str] | None = None) -> None:
        """Starts the agent, if none runs."""
        assert not self.is_off, f"node {self.index} is off"
        if not self.is_up:
            self._cluster.processes.start_agents({self.index: environment or {}}, idle_exit_s=IDLE_EXIT_S)
            self._cluster.network.apply()

    def switch_off(self) -> None:
        self.is_off = True
        self.kill()

    def switch_on(self) -> None:
        self.is_off = False
        self.boot()

    def leave(self) -> None:
        """The agent ends in good order, and informs the others that its disk is intact. An agent that has stopped
        itself is continued.
        """
        pid = self._node.agent_pid()
        if pid is not None:
            signal_if_running(pid, signal.SIGTERM)
            deadline = time.monotonic() + LEAVE_WITHIN_S
            while wait_until_gone([pid], _POLL_S):
                assert time.monotonic() < deadline, f"the agent of node {self.index}, process {pid}, does not end"
                signal_if_running(pid, signal.SIGCONT)

    def signal(self, number: int) -> None:
        pid = self._node.agent_pid()
        if pid is not None:
            signal_if_running(pid, number)

    def kill(self) -> None:
        self._node.kill_agent()

    def wipe(self) -> None:
        self._node.lose()

    def status(self) -> dict[str, Any]:
        return self._asked("GET", "/v1/status")

    def scrub(self) -> None:
        """Reads all data on the node as the scrub would, and reports what is bad."""
        for finding in self._asked("POST", "/v1/verify", {})["findings"]:
            if finding["problem"] == Problem.CORRUPT.value and finding["save_id"]:
                names = {key: finding[key] for key in ("checkpoint_id", "save_id", "name")}
                self._asked("POST", "/v1/suspects", names)

    def has_round(self) -> None:
        """Starts a round of re-protection: an empty plan is carried out at once, and a round follows."""
        self._asked("POST", "/v1/repair", {"plan": {"restore": [], "copy": [], "short": []}})

    def _asked(self, method: str, path: str, document: dict[str, Any] | None = None) -> dict[str, Any]:
        endpoint = read_endpoint(self.root / ".agent")
        assert endpoint is not None, f"no agent of node {self.index}"
        with AgentClient(endpoint.local_address()) as client:
            return client.call(method, path, document)


class RealNetwork:
    """A partition: the agent of a node that is cut off is stopped. It accepts connections, but does not answer, not
    even its own ranks.
    """

    def __init__(self, cluster: "RealCluster") -> None:
        self._cluster = cluster
        self._cut: set[int] = set()

    @property
    def cut(self) -> set[int]:
        return self._cut

    @cut.setter
    def cut(self, nodes: set[int]) -> None:
        for index in self._cut - nodes:
            self._cluster.nodes[index].signal(signal.SIGCONT)
        self._cut = set(nodes)
        self.apply()

    def split(self, nodes: Collection[int]) -> None:
        self.cut = set(nodes)

    def is_reached(self, node: int, by: int) -> bool:
        return not {node, by} & self._cut

    def apply(self) -> None:
        for index in self._cut:
            self._cluster.nodes[index].signal(signal.SIGSTOP)


class Ambush(threading.Thread):
    """Waits until a process stops itself at a failpoint, causes the outage, and lets the process continue."""

    def __init__(self, cluster: "RealCluster", node: int, outage: Outage, *, is_agent: bool) -> None:
        super().__init__(daemon=True)
        self._cluster = cluster
        self._node = node
        self._outage = outage
        self._is_agent = is_agent
        self._over = threading.Event()
        self.hit: Actor | None = None
        self.start()

    def run(self) -> None:
        while not self._over.wait(_LOOK_S):
            stopped = [pid for pid in self._suspects() if _state_of(pid) == "T"]
            if stopped:
                self.hit = Actor(self._node, self._is_agent)
                self._cluster.suffer(self._outage)
                for pid in stopped:
                    signal_if_running(pid, signal.SIGCONT)
                return

    def _suspects(self) -> list[int]:
        if self._is_agent:
            pid = self._cluster.processes.nodes[self._node].agent_pid()
            return [] if pid is None else [pid]
        return self._cluster.rank_pids(self._node)

    def end(self) -> None:
        self._over.set()
        self.join()


def _state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


class RealCluster:
    """The operations that a schedule needs, with real processes."""

    is_bucket_down = False

    def __init__(self, base: Path, count: int, seed: int) -> None:
        del seed
        self.base = base
        environment = {
            "REPLICATED_CKPT_AGENT_LOST_AFTER_S": str(LOST_AFTER_S),
            "REPLICATED_CKPT_AGENT_AWAY_AFTER_S": str(AWAY_AFTER_S),
            "REPLICATED_CKPT_AGENT_ROUND_EVERY_S": "2",
            "PYTHONWARNINGS": "ignore",
        }
        self.processes = multiprocess.Cluster(base / "cluster", count, environment=environment, quick_exit=True)
        self.nodes = [RealNode(self, index) for index in range(count)]
        self.network = RealNetwork(self)
        self.world: list[int] = []
        """The node of each rank of the launch under way."""
        self.submitted = SubmittedSaves(self)
        self._planned: tuple[int, bool] | None = None
        self._ambush: Ambush | None = None
        self.died: Actor | None = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.network.cut = set()
            self.processes.close()

    def wait(self, seconds: float) -> None:
        time.sleep(min(seconds, WAIT_S_MAX))

    def pass_time(self, seconds: float) -> None:
        self.wait(seconds)

    def background(self) -> None:
        """Does nothing: the agents' own threads do the work."""

    # Faults at failpoints ----------------------------------------------------------------------------------------

    def plan_kill(self, name: str, node: int, *, is_agent: bool) -> None:
        self._arm({failpoints.ENV: f"{name}=kill"}, node, is_agent=is_agent)

    def plan_outage(self, name: str, node: int, *, is_agent: bool, outage: Outage) -> None:
        self._arm({failpoints.ENV: f"{name}=stop"}, node, is_agent=is_agent)
        self.submitted.outage_at = name
        self._ambush = Ambush(self, node, outage, is_agent=is_agent)

    def _arm(self, armed: dict[str, str], node: int, *, is_agent: bool) -> None:
        if is_agent:
            self.nodes[node].leave()
            self.nodes[node].boot(armed)
        else:
            self.nodes[node].boot()
            self.processes.nodes[node].environment = armed
        self._planned, self.died = (node, is_agent), None

    def suffer(self, outage: Outage) -> None:
        if outage.how == "cut":
            self.network.cut = set(outage.nodes)
            return
        if outage.how in ("trainers", "trainers and agents"):
            end([pid for node in dict.fromkeys(self.world) for pid in self.rank_pids(node)])
        for index in sorted(outage.nodes) if outage.how != "trainers" else ():
            if outage.how == "off":
                self.nodes[index].switch_off()
                end(self.rank_pids(index))
            else:
                self.nodes[index].kill()

    def rank_pids(self, node: int) -> list[int]:
        """The ranks of this node in the running launch."""
        folder = self.base / "cluster" / f"launch{self.processes._launches}"
        paths = [folder / f"rank{rank}.pid" for rank, place in enumerate(self.world) if place == node]
        return [int(text) for path in paths if path.exists() and (text := path.read_text())]

    def settle_kill(self) -> Actor | None:
        """The process that was hit, or None. Afterwards no fault is planned."""
        if self._planned is None:
            return None
        (node, is_agent), self._planned = self._planned, None
        self.processes.nodes[node].environment = {}
        if self._ambush is not None:
            ambush, self._ambush = self._ambush, None
            ambush.end()
            found = ambush.hit
        elif not is_agent:
            return self.died
        else:
            found = Actor(node, is_agent=True) if self.processes.agent_code(node, 0.3) == -signal.SIGKILL else None
        if is_agent and self.nodes[node].is_up and node not in self.network.cut:
            self.nodes[node].leave()  # It is armed.
            self.nodes[node].boot()
        return found

    # Background work ---------------------------------------------------------------------------------------------

    def protect(self) -> list[Any]:
        """Waits until every reachable agent reports that everything has its copies, and still reports it two rounds
        later.

        Returns the last reports, which are all alike.
        """
        time.sleep(LOST_AFTER_S)
        deadline = time.monotonic() + PROTECT_WITHIN_S
        up = [node for node in self.nodes if node.is_up and node.index not in self.network.cut]
        for node in up:
            node.scrub()
        since: list[int] | None = None
        while True:
            for node in up:
                node.has_round()
            time.sleep(_POLL_S)
            said = [node.status()["protection"] for node in up]
            rounds, is_complete = [now["rounds"] for now in said], all(now["is_complete"] for now in said)
            if not is_complete:
                since = None
            elif since is None:
                since = rounds
            is_done = since is not None and all(now > then + 1 for now, then in zip(rounds, since, strict=True))
            if is_done or time.monotonic() > deadline:
                return [SimpleNamespace(is_complete=is_done) for _ in said]

    def repair(self, node: int, lost: Sequence[str] = ()) -> str:
        """Runs `replicated-ckpt repair` on a node. Returns its exit code."""
        root, options = str(self.nodes[node].root), [part for name in lost for part in ("--lost", name)]
        program = "from replicated_ckpt.cli.main import main; raise SystemExit(main())"
        command = [sys.executable, "-c", program, "repair", "--root", root, *options]
        return str(subprocess.run(command, capture_output=True, check=False, timeout=120).returncode)

    def name_bucket(self, url: str) -> None:
        """Names the bucket to the agents, as ranks of the next job do."""
        for node in self.nodes:
            problems = ObjectTier(LocalStore(node.root), ObjectTarget.check_supported(url, None), 1).submit()
            assert not problems, problems


class RealJob:
    """A job. Each save and each load runs in a world of new processes."""

    def __init__(self, cluster: RealCluster, nodes: Sequence[int], policy: Policy) -> None:
        self.cluster = cluster
        self.nodes = list(nodes)
        self.policy = policy
        self.is_dead = False

    def end(self) -> None:
        self.is_dead = True

    def _ran(self, step: Call[T]) -> tuple[list[int | None], list[T]]:
        """Exit codes, and the results of the ranks that returned one. Ranks of one node are neighbours here."""
        order = list(dict.fromkeys(self.nodes))
        for node in order:
            self.cluster.nodes[node].boot()
        counts = [self.nodes.count(node) for node in order]
        self.cluster.world = [node for node, count in zip(order, counts, strict=True) for _ in range(count)]
        attempt = self.cluster.processes.attempt([step], nodes=order, ranks=counts)
        return attempt.codes, list(attempt.of(step).values())

    def save(self, checkpoint_id: str, attempt: int, *, overwrite: bool, hands_over: bool = False) -> Saved:
        """One save by new processes."""
        step = call(
            torture.save,
            checkpoint_id=checkpoint_id,
            attempt=attempt,
            overwrite=overwrite,
            copies=self.policy.copies,
            keep_last=self.policy.keep_last,
            object_store=self.policy.object_store,
            hands_over=hands_over,
        )
        codes, values = self._ran(step)
        if -signal.SIGKILL in codes:
            self.is_dead = True
            self.cluster.died = Actor(self.cluster.world[codes.index(-signal.SIGKILL)], is_agent=False, is_dead=True)
        if any(code != 0 for code in codes):
            return Saved(FirstError([ReplicatedCkptError(f"exit codes {codes}")]))
        failed = [value["message"] for value in values if "copies_made" not in value]
        if failed:
            return Saved(FirstError([ReplicatedCkptError(text) for text in failed]))
        warnings = tuple(text for value in values for text in value["warnings"])
        return Saved(None, min(value["copies_made"] for value in values), warnings)

    def save_with_stock_torch(self, checkpoint_id: str, attempt: int) -> None:
        """Saves with torch's own writer to node-local disks."""
        codes, _ = self._ran(call(torture.save_with_stock_torch, checkpoint_id=checkpoint_id, attempt=attempt))
        assert not any(codes), f"stock torch's save ended with {codes}"

    def load(self, checkpoint_id: str, readers: int, *, with_bucket: bool = False) -> list[tuple[int, State]]:
        del readers
        place = self.policy.object_store if with_bucket else None
        codes, values = self._ran(call(torture.load, checkpoint_id=checkpoint_id, object_store=place))
        if any(codes) or not values:
            raise AssertionError(f"a load ended with {codes}")
        failed = [value for value in values if "attempt" not in value]
        if failed:
            types = {name for value in failed for name in value["types"]}
            if types & {"ShardLost", "MetadataUnsafe", "ManifestInvalid", "CheckpointAmbiguous"}:
                raise ShardLost(checkpoint_id, {}, [failed[0]["message"]])
            if types & {"CheckpointNotFound", "CheckpointNotCommitted"}:
                raise CheckpointNotFound(failed[0]["message"])
            raise AssertionError(f"a load failed otherwise: {failed}")
        return [(v["attempt"], contents(v["attempt"], v["ranks"]) if v["same"] else {}) for v in values]


REAL = Backend(RealCluster, RealJob, can_pause=False)
