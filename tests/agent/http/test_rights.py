"""Rights: who may ask an agent for what, route by route, as SECURITY.md and the design say it."""

import ast
import json
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from replicated_ckpt.agent.state.rights import INVITATION_S, Right, Tokens, invite, needed_right
from replicated_ckpt.errors import PeerProtocolError, StoreDenied
from replicated_ckpt.stores.peer.client import AgentClient
from tests.agent.agents import RunningAgent, running_agent
from tests.docs.test_docs import AGENT_ROUTES, ROOT, quoted, rows, section

SAVE = "9" * 32
FILLED = {"{save_id}": SAVE, "{name}": "__0_0.distcp"}
OPENING = {"checkpoint_id": "step-1", "session": "s", "overwrite": False, "peers": []}
WRITTEN = "POST /v1/saves/{save_id}/written"
TICKETED = ("GET /v1/saves/{save_id}", "POST /v1/saves/{save_id}/abort")
ENDINGS = tuple(f"POST /v1/saves/{{save_id}}/{how}" for how in ("commit", "pull", "abort"))


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
    assert len(VERBS) > 25
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
    return response.status == 403 and b"needs the right" in raw


def test_no_route_hands_on_to_one_that_is_not_listed() -> None:
    """Each `match` on a request's path in the agent's doors is one of those that the tables are held against."""
    found = {
        (path.stem, function.name)
        for path in (ROOT / "replicated_ckpt/agent/http").glob("*.py")
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef)
        for match in ast.walk(function)
        if isinstance(match, ast.Match) and "request.method" in ast.unparse(match.subject)
    }
    assert found == AGENT_ROUTES.keys()


@pytest.mark.parametrize("query", ["", "?brief=1", "?brief=1&opening=1"])
def test_only_the_owner_sees_the_whole_status(agent: RunningAgent, query: str) -> None:
    """Others see which agent answers, and how far its check and copies are: no paths, no open saves, no buckets."""
    told = {"node_id", "incarnation", "start_id", "is_leaving", "tls_sha256", "verify", "bytes_fetched"}
    for token in (agent.endpoint.token, agent.endpoint.invitation()):
        with AgentClient(replace(agent.endpoint.address(), token=token)) as client:
            assert client.call("GET", f"/v1/status{query}").keys() == told
    with agent.client() as owner:
        assert owner.call("GET", f"/v1/status{query}").keys() > told | {"root", "pid"}


VERBS = sorted(rights_in_the_design(), key=lambda verb: (verb.endswith("shutdown"), verb))


def ask(agent: RunningAgent, token: str | None, verb: str, fields: Mapping[str, object], ticket: str = "") -> int:
    """The status of the answer to a request about SAVE; without a header where there is no token."""
    method, path = verb.split()
    for name, value in FILLED.items():
        path = path.replace(name, value)
    query = f"?settle=over&ticket={ticket}" if ticket else ""
    with AgentClient(replace(agent.endpoint.address(), token=token or "")) as client:
        headers = client._headers() if token is not None else {}
        client._connection.request(method, path + query, json.dumps({**fields, "ticket": ticket}).encode(), headers)
        response = client._connection.getresponse()
        response.read()
        return response.status


@pytest.fixture
def two_saves(agent: RunningAgent) -> Iterator[dict[str, str]]:
    """Their tickets, by id; both are open, and SAVE is one of them."""
    tickets = {SAVE: "a" * 32, "8" * 32: "b" * 32}
    with agent.client() as owner:
        for number, (save_id, ticket) in enumerate(tickets.items()):
            opening = {**OPENING, "checkpoint_id": f"s-{number}", "session": f"s-{number}", "ticket": ticket}
            owner.call("POST", f"/v1/saves/{save_id}", opening)
        yield tickets
        for save_id in tickets:
            owner.call("POST", f"/v1/saves/{save_id}/abort", {"why": "the next case"})


@pytest.mark.parametrize("verb", VERBS)
def test_without_a_right_there_is_no_verb(agent: RunningAgent, two_saves: dict[str, str], verb: str) -> None:
    """No token, an empty one, one of another agent and a ticket of the very save in a token's place: 401, each time."""
    for token in (None, "", Tokens.draw().owner, invite(Tokens.draw().owner, time.time()), two_saves[SAVE]):
        assert ask(agent, token, verb, OPENING, two_saves[SAVE]) == 401, token


@pytest.mark.parametrize("verb", VERBS)
def test_a_ticket_is_good_for_its_own_save_alone(agent: RunningAgent, two_saves: dict[str, str], verb: str) -> None:
    """A peer with the ticket of another save may do what it may without one; its own gives up, and settles, its save."""
    peer, listed = agent.endpoint.token, Right[rights_in_the_design()[verb]]
    fields = OPENING if verb == "POST /v1/saves/{save_id}" else {}
    others, own = (ask(agent, peer, verb, fields, two_saves[save_id]) for save_id in ("8" * 32, SAVE))
    if verb in TICKETED:
        assert (others, own) == (403, 200)
    elif verb == WRITTEN:
        assert (others, own) == (403, 400)  # 400: it names no shard
    else:
        is_refused = listed > Right.PEER or verb in ENDINGS
        assert (others == 403, own == 403) == (is_refused, is_refused)


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_needs_the_right_that_is_listed(agent: RunningAgent, verb: str) -> None:
    """Each token is refused below the listed right, and not for lack of it from there on."""
    tokens = {
        Right.SCRAPER: (agent.root / ".agent" / "metrics.token").read_text(),
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
    later = SimpleNamespace(time=lambda: now + INVITATION_S + 1, monotonic=lambda: time.monotonic() + INVITATION_S + 1)
    monkeypatch.setattr("replicated_ckpt.agent.state.rights.time", later)
    assert tokens.right_of(invitation) is None
    assert tokens.right_of(tokens.peer) is Right.PEER
    assert repr(tokens) == "Tokens()"


@pytest.mark.parametrize("jump_s", [12 * INVITATION_S, -12 * INVITATION_S], ids=["forward", "back"])
def test_a_clock_that_is_set_ends_no_invitation(monkeypatch: pytest.MonkeyPatch, jump_s: float) -> None:
    """The host's clock is set while a save goes on, before its rank posts or after it: the coordinator is let in."""
    clock = SimpleNamespace(time=lambda: time.time() + jump_s, monotonic=time.monotonic)
    tokens = Tokens.draw()
    before = invite(tokens.owner, time.time())
    monkeypatch.setattr("replicated_ckpt.agent.state.rights.time", clock)
    after = invite(tokens.owner, clock.time())
    assert [tokens.right_of(given) for given in (before, after)] == [Right.JOB] * 2


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
