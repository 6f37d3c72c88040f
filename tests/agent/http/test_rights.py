"""Rights: which token may call which verb, as SECURITY.md and docs/verbs.md list it."""

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


def rights_in_the_table_of_verbs() -> dict[str, str]:
    """The right of each verb in the table of docs/verbs.md."""
    table = [row for row in rows(section("docs/verbs.md", "The agent's verbs")) if "/" in row[0]]
    return {quoted(row[0]): row[1] for row in table}


def rights_in_the_security_policy() -> dict[str, str]:
    """The right of each verb in SECURITY.md, where each right has a reason."""
    found: dict[str, str] = {}
    for right, verbs, why in rows(section("SECURITY.md", "What each right allows")):
        assert why
        for verb in re.findall(r"`([A-Z]+ /[^`]+)`", verbs):
            assert verb not in found, f"{verb} is listed twice"
            found[verb] = right
    return found


def test_both_tables_agree() -> None:
    """SECURITY.md lists the verbs and rights of docs/verbs.md. tests/docs compares docs/verbs.md with the routes."""
    assert len(VERBS) > 25
    assert rights_in_the_security_policy() == rights_in_the_table_of_verbs()


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAgent]:
    with running_agent(tmp_path_factory.mktemp("rights") / "a") as running:
        yield running


def is_denied(agent: RunningAgent, token: str, verb: str) -> bool:
    """Whether the agent refuses an empty request for lack of a right, and not for another reason."""
    method, path = verb.split()
    for name, value in FILLED.items():
        path = path.replace(name, value)
    is_opening = verb == "POST /v1/saves/{save_id}"
    if verb in ENDINGS:  # without an open save, these verbs answer without a check of the right
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


def test_all_routes_are_listed() -> None:
    """Each `match` on a request path in the agent is in the list of routes that the tables are compared with."""
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
    """Other tokens see which agent answers, and the progress of its check and copies: no paths, open saves or buckets."""
    public_fields = {"node_id", "incarnation", "start_id", "is_leaving", "tls_sha256", "verify", "bytes_fetched"}
    for token in (agent.endpoint.token, agent.endpoint.invitation()):
        with AgentClient(replace(agent.endpoint.address(), token=token)) as client:
            assert client.call("GET", f"/v1/status{query}").keys() == public_fields
    with agent.client() as owner:
        assert owner.call("GET", f"/v1/status{query}").keys() > public_fields | {"root", "pid"}


VERBS = sorted(rights_in_the_table_of_verbs(), key=lambda verb: (verb.endswith("shutdown"), verb))


def ask(agent: RunningAgent, token: str | None, verb: str, fields: Mapping[str, object], ticket: str = "") -> int:
    """The HTTP status of a request about SAVE. Without a token, no header is sent."""
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
    """Opens SAVE and another save. Yields their tickets by save id."""
    tickets = {SAVE: "a" * 32, "8" * 32: "b" * 32}
    with agent.client() as owner:
        for number, (save_id, ticket) in enumerate(tickets.items()):
            opening = {**OPENING, "checkpoint_id": f"s-{number}", "session": f"s-{number}", "ticket": ticket}
            owner.call("POST", f"/v1/saves/{save_id}", opening)
        yield tickets
        for save_id in tickets:
            owner.call("POST", f"/v1/saves/{save_id}/abort", {"why": "the next case"})


@pytest.mark.parametrize("verb", VERBS)
def test_without_a_valid_token_every_verb_is_refused(agent: RunningAgent, two_saves: dict[str, str], verb: str) -> None:
    """No token, an empty one, one of another agent, and the save's ticket in place of the token: each gets a 401."""
    for token in (None, "", Tokens.draw().owner, invite(Tokens.draw().owner, time.time()), two_saves[SAVE]):
        assert ask(agent, token, verb, OPENING, two_saves[SAVE]) == 401, token


@pytest.mark.parametrize("verb", VERBS)
def test_a_ticket_is_valid_only_for_its_save(agent: RunningAgent, two_saves: dict[str, str], verb: str) -> None:
    """A peer with the ticket of another save has no more rights than without it. The ticket of a save lets the peer
    settle and abort that save.
    """
    peer, listed = agent.endpoint.token, Right[rights_in_the_table_of_verbs()[verb]]
    fields = OPENING if verb == "POST /v1/saves/{save_id}" else {}
    others, own = (ask(agent, peer, verb, fields, two_saves[save_id]) for save_id in ("8" * 32, SAVE))
    if verb in TICKETED:
        assert (others, own) == (403, 200)
    elif verb == WRITTEN:
        assert (others, own) == (403, 400)  # 400: the request names no shard
    else:
        is_refused = listed > Right.PEER or verb in ENDINGS
        assert (others == 403, own == 403) == (is_refused, is_refused)


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_needs_the_right_that_is_listed(agent: RunningAgent, verb: str) -> None:
    """A token below the listed right is refused for lack of the right. The other tokens are not."""
    tokens = {
        Right.SCRAPER: (agent.root / ".agent" / "metrics.token").read_text(),
        Right.PEER: agent.endpoint.token,
        Right.JOB: agent.endpoint.invitation(),
        Right.OWNER: agent.endpoint.owner_token,
    }
    listed = Right[rights_in_the_table_of_verbs()[verb]]
    for right, token in tokens.items():
        assert is_denied(agent, token, verb) == (right < listed), right


def test_an_unknown_verb_needs_the_owner_token() -> None:
    """A verb that is missing in the list of rights needs the owner token."""
    for parts in (["v1", "new"], [], ["v1", "object", "new"], ["v2", "holdings"], ["v1", "saves"]):
        assert needed_right("GET", parts) == needed_right("POST", parts) == Right.OWNER
    assert needed_right("DELETE", ["v1", "saves", SAVE, "x"]) == Right.OWNER


def test_an_invitation_opens_one_agent_for_a_day(monkeypatch: pytest.MonkeyPatch) -> None:
    """An expired, changed or truncated invitation, and one of another agent, have no right. An invitation does not
    contain the owner token.
    """
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
    """The host clock jumps during a save, before or after the invitation is made: the invitation stays valid."""
    clock = SimpleNamespace(time=lambda: time.time() + jump_s, monotonic=time.monotonic)
    tokens = Tokens.draw()
    before = invite(tokens.owner, time.time())
    monkeypatch.setattr("replicated_ckpt.agent.state.rights.time", clock)
    after = invite(tokens.owner, clock.time())
    assert [tokens.right_of(given) for given in (before, after)] == [Right.JOB] * 2


def test_an_empty_token_has_no_right() -> None:
    """An empty token matches no right, even if the expected token is empty."""
    assert Tokens("", "").right_of("") is None
    assert Tokens("p", "").right_of("") is None


def test_a_refusal_has_a_hint(tmp_path: Path) -> None:
    """The error has the hint for this case. The log has one line for each refusal, whatever the request contains."""
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
