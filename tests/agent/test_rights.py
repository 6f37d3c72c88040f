"""Rights: who may ask an agent for what, route by route, as SECURITY.md and the design say it."""

import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from replicated_ckpt.agent.state.rights import INVITATION_S, Right, Tokens, invite, needed_right
from replicated_ckpt.errors import PeerProtocolError, StoreDenied
from replicated_ckpt.stores.peer.client import AgentClient
from tests.agent.agents import RunningAgent, running_agent
from tests.docs.test_docs import quoted, rows, section

SAVE = "9" * 32
FILLED = {"{save_id}": SAVE, "{name}": "__0_0.distcp"}
OPENING = {"checkpoint_id": "step-1", "session": "s", "overwrite": False, "peers": []}
ENDINGS = ("POST /v1/saves/{save_id}/commit", "POST /v1/saves/{save_id}/pull")


def rights_in_the_design() -> dict[str, str]:
    """The right of each verb, as the table of verbs has it."""
    table = [row for row in rows(section("docs/verbs.md", "The agent's verbs")) if "/" in row[0]]
    return {quoted(row[0]): row[1] for row in table}


def rights_in_the_threat_model() -> dict[str, str]:
    """The same as SECURITY.md has it, which says why."""
    found: dict[str, str] = {}
    for right, verbs, why in rows(section("SECURITY.md", "What each right allows")):
        assert why
        for verb in re.findall(r"`([A-Z]+ /[^`]+)`", verbs):
            assert verb not in found, f"{verb} is listed twice"
            found[verb] = right
    return found


def test_both_tables_say_the_same_of_every_verb() -> None:
    """tests/docs holds the design's to the routes; the threat model leaves none out."""
    assert len(VERBS) > 30
    assert rights_in_the_threat_model() == rights_in_the_design()


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAgent]:
    with running_agent(tmp_path_factory.mktemp("rights") / "a") as running:
        yield running


def is_denied(agent: RunningAgent, token: str, verb: str) -> bool:
    """Whether the agent refuses a request for lack of a right; an empty one, which is mostly refused for something else."""
    method, path = verb.split()
    for name, value in FILLED.items():
        path = path.replace(name, value)
    is_opening = verb == "POST /v1/saves/{save_id}"
    if verb in ENDINGS:  # where nothing is staged nothing is ended, and anybody is told so
        with agent.client() as owner:
            owner.call("POST", f"/v1/saves/{SAVE}", OPENING)
    body = json.dumps(OPENING if is_opening else {}).encode()
    with AgentClient(replace(agent.endpoint.address(), token=token)) as client:
        client._connection.request(method, path, body, client._headers())
        response = client._connection.getresponse()
        raw = response.read()
    if verb in ENDINGS or (is_opening and response.status == 200):
        with agent.client() as owner:
            owner.call("POST", f"/v1/saves/{SAVE}/abort", {"why": "the next case"})
    assert response.status != 401
    return response.status == 403 and (method == "HEAD" or b"needs the right" in raw)


VERBS = sorted(rights_in_the_design(), key=lambda verb: (verb.endswith("shutdown"), verb))


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_needs_the_right_that_is_listed(agent: RunningAgent, verb: str) -> None:
    """Each token is refused below the listed right, and not for lack of it from there on."""
    tokens = {
        Right.PEER: agent.endpoint.token,
        Right.JOB: agent.endpoint.invitation(),
        Right.OWNER: agent.endpoint.owner_token,
    }
    listed = Right[rights_in_the_design()[verb]]
    for right, token in tokens.items():
        assert is_denied(agent, token, verb) == (right < listed), right


def test_what_is_no_verb_is_the_owners() -> None:
    """A verb that is added and forgotten in the list of rights is nobody else's."""
    for parts in (["v1", "new"], [], ["v1", "object", "new"], ["v2", "holdings"], ["v1", "saves"]):
        assert needed_right("GET", parts) == needed_right("POST", parts) == Right.OWNER
    assert needed_right("DELETE", ["v1", "saves", SAVE, "x"]) == Right.OWNER


def test_an_invitation_opens_one_agent_for_a_day(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither another agent's nor an old one, a changed one or a piece of one; and it does not reveal the owner's token."""
    tokens, others, now = Tokens.draw(), Tokens.draw(), time.time()
    invitation = invite(tokens.owner, now)
    until, _, signature = invitation.partition(".")
    assert tokens.right_of(invitation) is Right.JOB
    assert tokens.right_of(invite(tokens.owner, now - INVITATION_S - 1)) is None
    wrong = [invite(others.owner, now), invite(tokens.peer, now), f"{int(until) + 1}.{signature}", f"{until}.", until]
    wrong += [".", "", "x.y", f".{signature}", f"{signature}.{until}", "9" * 5000 + "." + signature, "ü.ü", "\udc80"]
    assert [tokens.right_of(given) for given in wrong] == [None] * len(wrong)
    assert tokens.owner not in invitation
    monkeypatch.setattr("replicated_ckpt.agent.state.rights.time.time", lambda: now + INVITATION_S + 1)
    assert tokens.right_of(invitation) is None
    assert tokens.right_of(tokens.peer) is Right.PEER
    assert repr(tokens) == "Tokens()"


def test_no_token_opens_an_agent_without_one() -> None:
    """Where a token is empty, nothing shows it."""
    assert Tokens("", "").right_of("") is None
    assert Tokens("p", "").right_of("") is None


def test_a_refusal_says_what_to_do(tmp_path: Path) -> None:
    """The error that arrives has the next step of this case, and the log has one line, whatever the request says."""
    with running_agent(tmp_path / "a") as agent:
        with agent.peer() as client, pytest.raises(StoreDenied) as raised:
            client.call("POST", "/v1/object/probe", {"url": "x\ny"})
        assert "OWNER" in raised.value.detail
        assert "own host" in raised.value.hint
        with agent.client() as client, pytest.raises(PeerProtocolError):
            client.call(
                "POST", f"/v1/saves/{SAVE}", {**OPENING, "announced": {"shard_bytes_max": "x\nrefused to forged"}}
            )
        log = (agent.root / "agent.out").read_text().splitlines()
    (denied, malformed) = [line for line in log if "refused" in line]
    assert re.search(r"INFO .*127\.0\.0\.1:[0-9]+: refused 'POST' '/v1/object/probe': 403 ", denied)
    assert re.search(r"INFO .*127\.0\.0\.1:[0-9]+: refused 'POST' '/v1/saves/9+': 400 ", malformed)
