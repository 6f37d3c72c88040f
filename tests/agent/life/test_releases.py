"""Two releases with different protocols: the error has both releases, their nodes, and what to do."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from replicated_ckpt.agent.launch import ensure_agent
from replicated_ckpt.agent.state.endpoint import Endpoint, read_endpoint
from replicated_ckpt.dcp.find.survey import Survey
from replicated_ckpt.errors import ConfigInvalid
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.peer.client import AgentClient
from replicated_ckpt.version import PROTOCOL, __version__
from tests.agent.agents import HOME, wait_for
from tests.harness.cluster import Cluster, call
from tests.harness.processes import end
from tests.steps import state

NEWER, OLDER = (PROTOCOL + 1, "9.0.0"), (PROTOCOL - 1, "0.0.1")
WHAT_TO_DO = "Install the newer release on all nodes"


@contextmanager
def agent_of(root: Path, release: tuple[int, str], *arguments: str) -> Iterator[Endpoint]:
    """A real agent that reports another release."""
    command = [sys.executable, "-m", "tests.agent.other_release", *map(str, release), "--root", str(root), *arguments]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(HOME)}, stderr=subprocess.DEVNULL) as process:
        try:
            yield wait_for(lambda: _endpoint(root, process.pid), 20, "the agent")
        finally:
            process.kill()


def _endpoint(root: Path, pid: int) -> Endpoint | None:
    found = read_endpoint(root / ".agent") if (root / ".agent").is_dir() else None
    return found if found is not None and found.pid == pid else None


@pytest.mark.parametrize("release", [NEWER, OLDER], ids=["newer", "older"])
def test_an_agent_refuses_another_protocol(tmp_path: Path, release: tuple[int, str]) -> None:
    """The error names the node, both releases and what to do. `status` and `shutdown` still work."""
    with agent_of(tmp_path / "a", release) as endpoint, AgentClient(endpoint.local_address()) as client:
        assert client.call("GET", "/v1/status")["version"] == release[1]
        named = f"node {endpoint.node_id} at .*runs replicated_ckpt {release[1]} "
        with pytest.raises(ConfigInvalid, match=named) as caught:
            client.call("GET", "/v1/holdings")
        assert f"runs {__version__} (protocol {PROTOCOL})" in caught.value.message
        assert WHAT_TO_DO in caught.value.hint
        client.call("POST", "/v1/shutdown")


def test_a_survey_of_another_release_is_read() -> None:
    """A survey of a later release has more fields, one of an earlier release has no silent nodes: both are read."""
    survey = Survey("{}", (), (), ("node a",), silent=("b",))
    document = survey.to_json()
    assert Survey.from_json(json.loads(json.dumps({**document, "of_a_later_release": 1}))) == survey
    del document["silent"], document["skipped"]
    assert Survey.from_json(json.loads(json.dumps(document))) == replace(survey, silent=())


def test_an_older_agent_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank replaces an older agent of its node by one of its own release.

    The rank does not announce its save to the older agent, which would wait for that save.
    """
    monkeypatch.setenv("REPLICATED_CKPT_AGENT_IDLE_S", "30")
    asked: list[str] = []

    def call(client: AgentClient, method: str, path: str, document: Any = None) -> dict[str, Any]:
        asked.append(path)
        return client.put(method, path, document)

    monkeypatch.setattr(AgentClient, "call", call)
    with agent_of(tmp_path / "a", OLDER, "--idle-exit-s", "60") as older:
        new = ensure_agent(LocalStore(tmp_path / "a"), "127.0.0.1", is_opening=True)
        end([new.pid])  # the agent waits for that save
        assert "opening" not in "".join(asked[: asked.index("/v1/shutdown")])
        assert (new.version, new.protocol, new.node_id) == (__version__, PROTOCOL, older.node_id)


def test_an_older_supervised_agent_is_not_replaced(tmp_path: Path) -> None:
    """An older agent without idle exit would be restarted by its supervisor: ranks with its protocol use it, and others
    raise.
    """
    store = LocalStore(tmp_path / "a")
    with agent_of(store.root, (PROTOCOL, OLDER[1])) as older:
        assert ensure_agent(store, "127.0.0.1", is_opening=True).pid == older.pid
    with agent_of(store.root, OLDER) as older:
        with pytest.raises(ConfigInvalid, match=rf"runs replicated_ckpt {OLDER[1]} \(protocol {OLDER[0]}\)") as caught:
            ensure_agent(store, "127.0.0.1")
        assert WHAT_TO_DO in caught.value.hint


@pytest.mark.multiprocess
@pytest.mark.timeout(300)
def test_a_save_fails_with_the_release_of_each_node(tmp_path: Path) -> None:
    """The agent of one node is newer: every rank raises the same error, and no file of the save remains."""
    with Cluster(tmp_path / "cluster", 2, quick_exit=True) as cluster:
        with agent_of(cluster.nodes[1].root, NEWER) as newer:
            save = call(state.save, kinds=["plain"], checkpoint_id="step-1")
            attempt = cluster.attempt([save], nodes=[0, 1], grace_s=30.0)
        assert attempt.codes == [1, 1]
        for failure in attempt.failures:
            assert f"The agent of node {newer.node_id} on " in failure
            assert f"runs replicated_ckpt {NEWER[1]} (protocol {NEWER[0]}), but this rank runs {__version__}" in failure
            assert WHAT_TO_DO in failure
        assert [node.checkpoints() | set(node.staging()) for node in cluster.nodes] == [set(), set()]
