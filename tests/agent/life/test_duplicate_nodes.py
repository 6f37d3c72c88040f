"""Two agents run as the same node, from a cloned disk: peers warn, and `status` reports it until one of the agents
ends.
"""

import shutil
from functools import partial
from pathlib import Path
from unittest import mock

import pytest

from replicated_ckpt.agent.http.greeting import Greeter
from replicated_ckpt.agent.state.endpoint import Endpoint
from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.errors import ConfigInvalid, StoreUnavailable
from replicated_ckpt.node.peers.address_book import PeerBook
from replicated_ckpt.stores.peer.client import AgentAddress
from tests.agent.agents import RunningAgent, peers_of, running_agent, wait_for
from tests.cli.commands import as_json

pytestmark = [pytest.mark.fault, pytest.mark.timeout(120)]
OFTEN = ("--round-every-s", "1")


def duplicate_nodes(agent: RunningAgent) -> list[str]:
    with agent.client() as client:
        found: list[str] = client.call("GET", "/v1/status")["duplicate_nodes"]
    return found


def introduce(one: RunningAgent, other: RunningAgent) -> None:
    for to, who in ((one, other), (other, one)):
        with to.client() as client:
            client.call("POST", "/v1/peers", {"peers": peers_of(who)})


@pytest.mark.parametrize("starts", [0, 1, 2], ids=["fewer starts", "as many starts", "more starts"])
def test_a_cloned_disk_is_named_while_both_agents_run(tmp_path: Path, starts: int) -> None:
    """However often each agent was started: the peer that both greet warns in its log and status, and the second agent
    in its status.
    """
    roots = [tmp_path / name for name in ("peer", "node", "clone")]
    with running_agent(roots[0], *OFTEN) as peer, running_agent(roots[1], *OFTEN) as node:
        introduce(peer, node)
        node_id = node.endpoint.node_id
    shutil.copytree(roots[1], roots[2], ignore=shutil.ignore_patterns("*.sock"))
    for _ in range(1, starts):
        with running_agent(roots[2]):
            pass
    for _ in range(1, 2 - starts):
        with running_agent(roots[1]):
            pass
    with running_agent(roots[0], *OFTEN) as peer:
        with running_agent(roots[1], *OFTEN) as node:
            with running_agent(roots[2], *OFTEN) as clone:
                assert clone.endpoint.node_id == node_id
                for agent in (peer, clone):
                    (warning,) = wait_for(partial(duplicate_nodes, agent), 30.0, "the warning about two agents")
                    assert f"Two agents are node {node_id}: at 127.0.0.1:" in warning
                    code, found = as_json("status", "--root", agent.root)
                    assert code == ExitCode.FAILED
                    assert warning in found["reasons"]
                assert duplicate_nodes(node) == []
            wait_for(lambda: not duplicate_nodes(peer), 30.0, "the end of the warning")
        (known,) = PeerBook(peer.root / ".agent").read_all()
        assert known.port == node.endpoint.port, "the peer took the address of the clone"
    log = (roots[0] / "agent.out").read_text()
    assert log.count("WARNING replicated_ckpt.node.peers.address_book: Two agents are node") == 1


def test_a_peer_without_an_answer_does_not_clear_a_refusal(tmp_path: Path) -> None:
    """A peer that refuses to check again, or is silent, does not clear an earlier refusal: the second agent stays
    degraded.
    """
    book = PeerBook(tmp_path)
    book.learn([AgentAddress("a" * 12, "127.0.0.1", 1, "t" * 32)])
    greeter = Greeter(book, Endpoint("b" * 12, "127.0.0.1", 2, "t" * 32, 1, "0"))
    unheard = StoreUnavailable("a peer", "hear", "node b", "greets too often")
    answers = [ConfigInvalid("Two agents are node b."), unheard, unheard, None]
    refusals = []
    with mock.patch.object(Greeter, "_send_hello", side_effect=answers):
        for _ in answers:
            greeter.greet_all()
            refusals.append([*greeter.describe_refusals()])
    assert refusals == [[str(answers[0])]] * 3 + [[]]
