"""The same cluster made of real processes: real agents, real ranks over gloo, real SIGKILL and SIGSTOP."""

import json
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from replicated_ckpt import failpoints
from replicated_ckpt.agent.endpoint import read_endpoint
from replicated_ckpt.core.finding import Problem
from replicated_ckpt.errors import CheckpointNotFound, ReplicatedCkptError, ShardLost
from replicated_ckpt.stores.agent_client import AgentClient
from tests.fault.torture.contents import State, contents
from tests.fault.torture.jobs import FirstError, Saved
from tests.fault.torture.network import Actor
from tests.fault.torture.schedule import Backend
from tests.multiprocess import cluster as multiprocess
from tests.multiprocess.cluster import call
from tests.multiprocess.processes import is_running, signal_if_running

LOST_AFTER_S = 1.5
PROTECT_WITHIN_S = 40.0
_POLL_S = 0.1


class RealNode:
    """One node: its disk and its agent."""

    def __init__(self, cluster: "RealCluster", index: int) -> None:
        self._cluster = cluster
        self._node = cluster.processes.nodes[index]
        self.index = index
        self.root = self._node.disk

    @property
    def is_up(self) -> bool:
        return self._node.agent_pid() is not None

    def node_id(self) -> str:
        return str(json.loads((self.root / "node.json").read_text())["node_id"])

    def boot(self, environment: dict[str, str] | None = None) -> None:
        """Starts the agent, if none runs."""
        if not self.is_up:
            self._cluster.processes.start_agents({self.index: environment or {}}, idle_exit_s=3600)
            self._cluster.network.apply()

    def stop(self) -> None:
        """Has the agent leave in good order."""
        pid = self._node.agent_pid()
        if pid is not None:
            signal_if_running(pid, signal.SIGTERM)
            while is_running(pid):
                time.sleep(0.02)

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
        """What the scrub would do in its time: reads all that lies there, and says what is bad."""
        for finding in self._asked("POST", "/v1/verify", {})["findings"]:
            if finding["problem"] == Problem.CORRUPT.value and finding["save_id"]:
                names = {key: finding[key] for key in ("checkpoint_id", "save_id", "name")}
                self._asked("POST", "/v1/suspects", names)

    def has_round(self) -> None:
        """Has re-protection look again now: an empty plan is carried out at once, and a round follows."""
        self._asked("POST", "/v1/repair", {"plan": {"adopt": [], "copy": [], "short": []}})

    def _asked(self, method: str, path: str, document: dict[str, Any] | None = None) -> dict[str, Any]:
        endpoint = read_endpoint(self.root / ".agent")
        assert endpoint is not None, f"no agent of node {self.index}"
        with AgentClient(endpoint.local_address()) as client:
            return client.call(method, path, document)


class RealNetwork:
    """A node that is cut off is one whose agent is stopped: it accepts connections and answers nothing."""

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

    def apply(self) -> None:
        for index in self._cut:
            self._cluster.nodes[index].signal(signal.SIGSTOP)


class RealCluster:
    """What a schedule needs of a cluster, with real processes."""

    def __init__(self, base: Path, count: int, seed: int) -> None:
        del seed
        self.base = base
        environment = {"REPLICATED_CKPT_AGENT_LOST_AFTER_S": str(LOST_AFTER_S), "PYTHONWARNINGS": "ignore"}
        self.processes = multiprocess.Cluster(base / "cluster", count, environment=environment, quick_exit=True)
        self.nodes = [RealNode(self, index) for index in range(count)]
        self.network = RealNetwork(self)
        self._planned: tuple[int, bool] | None = None
        self.died: Actor | None = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.network.cut = set()
            self.processes.close()

    def wait(self, seconds: float) -> None:
        time.sleep(min(seconds, 6.0))  # beyond the grace of a save that was just opened

    def background(self) -> None:
        """The agents' own threads do it."""

    def plan_kill(self, name: str, node: int, *, is_agent: bool) -> None:
        armed = {failpoints.ENV: f"{name}=kill"}
        if is_agent:
            self.nodes[node].stop()
            self.nodes[node].boot(armed)
        else:
            self.nodes[node].boot()
            self.processes.nodes[node].environment = armed
        self._planned, self.died = (node, is_agent), None

    def settle_kill(self) -> Actor | None:
        """Who was killed, if anybody; nothing is armed afterwards."""
        if self._planned is None:
            return None
        (node, is_agent), self._planned = self._planned, None
        self.processes.nodes[node].environment = {}
        if not is_agent:
            return self.died
        if self.processes.agent_code(node, 0.3) == -signal.SIGKILL:
            return Actor(node, is_agent=True)
        self.nodes[node].stop()
        self.nodes[node].boot()
        return None

    def protect(self) -> list[Any]:
        """Waits until every agent that answers says that everything has its copies; what each says in the end."""
        time.sleep(LOST_AFTER_S)
        deadline = time.monotonic() + PROTECT_WITHIN_S
        up = [node for node in self.nodes if node.is_up and node.index not in self.network.cut]
        for node in up:
            node.scrub()
        while True:
            before = [node.status()["protection"]["rounds"] for node in up]
            for node in up:
                node.has_round()
            time.sleep(_POLL_S)
            said = [node.status()["protection"] for node in up]
            fresh = all(now["rounds"] > then + 1 for now, then in zip(said, before, strict=True))
            if (fresh and all(now["is_complete"] for now in said)) or time.monotonic() > deadline:
                return [SimpleNamespace(is_complete=now["is_complete"] and fresh) for now in said]


class RealJob:
    """A job: each save and each load is a world of new processes."""

    def __init__(self, cluster: RealCluster, nodes: Sequence[int], copies: int) -> None:
        self.cluster = cluster
        self.nodes = list(nodes)
        self.copies = copies
        self.is_dead = False

    def end(self) -> None:
        self.is_dead = True

    def _ran(self, step: str, **arguments: Any) -> tuple[list[int | None], list[dict[str, Any]]]:
        """Exit codes, and what the ranks that got there returned. Ranks of one node are neighbours here."""
        order = list(dict.fromkeys(self.nodes))
        for node in order:
            self.cluster.nodes[node].boot()
        counts = [self.nodes.count(node) for node in order]
        attempt = self.cluster.processes.attempt([call(step, **arguments)], nodes=order, ranks=counts)
        return attempt.codes, [values[0] for values in attempt.values if values]

    def save(self, checkpoint_id: str, attempt: int, *, overwrite: bool) -> Saved:
        codes, values = self._ran(
            "torture.save", checkpoint_id=checkpoint_id, attempt=attempt, overwrite=overwrite, copies=self.copies
        )
        if -signal.SIGKILL in codes:
            self.is_dead = True
            rank = codes.index(-signal.SIGKILL)
            order = [node for node in dict.fromkeys(self.nodes) for _ in range(self.nodes.count(node))]
            self.cluster.died = Actor(order[rank], is_agent=False, is_dead=True)
        if any(codes):
            return Saved(FirstError([ReplicatedCkptError(f"exit codes {codes}")]))
        failed = [value["message"] for value in values if "copies_made" not in value]
        if failed:
            return Saved(FirstError([ReplicatedCkptError(text) for text in failed]))
        warnings = tuple(text for value in values for text in value["warnings"])
        return Saved(None, min(value["copies_made"] for value in values), warnings)

    def load(self, checkpoint_id: str, readers: int) -> list[tuple[int, State]]:
        del readers
        codes, values = self._ran("torture.load", checkpoint_id=checkpoint_id)
        if any(codes) or not values:
            raise AssertionError(f"a load ended with {codes}")
        failed = [value for value in values if "attempt" not in value]
        if failed:
            types = {name for value in failed for name in value["types"]}
            if "ShardLost" in types:
                raise ShardLost(checkpoint_id, {}, [failed[0]["message"]])
            if types & {"CheckpointNotFound", "CheckpointNotCommitted"}:
                raise CheckpointNotFound(failed[0]["message"])
            raise AssertionError(f"a load failed otherwise: {failed}")
        return [(v["attempt"], contents(v["attempt"], v["ranks"]) if v["same"] else {}) for v in values]


REAL = Backend(RealCluster, RealJob)
