"""Which port of its range an agent takes: the one that its peers know, else the first free one."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from replicated_ckpt.agent.launch import ensure_agent
from replicated_ckpt.config import AgentConfig, parse_ports
from replicated_ckpt.environment import PORT_ENV
from replicated_ckpt.errors import AgentUnavailable, ConfigInvalid
from replicated_ckpt.stores.local.store import LocalStore
from tests.agent.agents import running_agent, stop_agent


@pytest.fixture
def free_ports() -> Iterator[int]:
    """The first of three consecutive ports that are free."""
    for first in range(29600, 32000, 3):
        with ExitStack() as stack:
            try:
                for port in range(first, first + 3):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
        yield first
        return


def test_an_agent_takes_the_first_free_port_of_its_range(tmp_path: Path, free_ports: int) -> None:
    """Two agents on one host share a range, and a firewall needs only the range."""
    ports = f"{free_ports}-{free_ports + 2}"
    with (
        running_agent(tmp_path / "a", "--port", ports) as first,
        running_agent(tmp_path / "b", "--port", ports) as second,
    ):
        assert (first.endpoint.port, second.endpoint.port) == (free_ports, free_ports + 1)


def test_an_agent_comes_back_on_the_port_that_it_had(tmp_path: Path, free_ports: int) -> None:
    """A restarted agent keeps its port, which peers have in their books, unless the port is outside its range now."""
    with running_agent(tmp_path, "--port", str(free_ports + 1)):
        pass
    with running_agent(tmp_path, "--port", f"{free_ports}-{free_ports + 2}") as again:
        assert again.endpoint.port == free_ports + 1
    with running_agent(tmp_path, "--port", str(free_ports)) as moved:
        assert moved.endpoint.port == free_ports


def test_the_variable_sets_the_ports_of_an_agent_that_a_rank_starts(
    tmp_path: Path, free_ports: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variable sets the range, as a rank has no option for it."""
    monkeypatch.setenv(PORT_ENV, f"{free_ports}-{free_ports + 2}")
    try:
        assert ensure_agent(LocalStore(tmp_path), "127.0.0.1").port == free_ports
    finally:
        stop_agent(tmp_path)


def test_without_a_free_port_the_agent_does_not_start(
    tmp_path: Path, free_ports: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent takes no port outside the range: a firewall may block it."""
    monkeypatch.setenv(PORT_ENV, str(free_ports))
    with (
        socket.create_server(("127.0.0.1", free_ports)),
        pytest.raises(AgentUnavailable, match=f"127.0.0.1:{free_ports}"),
    ):
        ensure_agent(LocalStore(tmp_path), "127.0.0.1")


def test_the_error_quotes_whole_lines_of_the_log(
    tmp_path: Path, free_ports: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error quotes whole lines of the log, and only those of the agent that failed now."""
    monkeypatch.setenv(PORT_ENV, str(free_ports))
    with socket.create_server(("127.0.0.1", free_ports)):
        for _ in range(2):
            with pytest.raises(AgentUnavailable) as raised:
                ensure_agent(LocalStore(tmp_path), "127.0.0.1")
            with (tmp_path / ".agent" / "log").open("a") as log:
                log.write("an earlier agent\n")
    shown = raised.value.message.partition("End of its log: ")[2]
    assert (tmp_path / ".agent" / "log").stat().st_size > len(shown)
    assert shown[1:].startswith("agent: Cannot listen on")
    assert "an earlier agent" not in shown


@pytest.mark.parametrize("text", ["x", "-1", "65536", "2-1", "1-65536", "29600-", "0-5", "29600,29601", "²"])
def test_an_invalid_port_is_refused(text: str) -> None:
    """The error shows an example of a range."""
    with pytest.raises(ConfigInvalid, match="29600-29631"):
        AgentConfig("/x", port=text)


@pytest.mark.parametrize(
    ("text", "ports"), [("", range(0)), ("0", range(0)), ("7", range(7, 8)), ("7-9", range(7, 10))]
)
def test_a_port_or_a_range_is_read(text: str, ports: range) -> None:
    """0 and the empty text mean any port."""
    assert parse_ports(text) == ports
