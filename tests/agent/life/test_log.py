"""The log of an agent: two files of bounded size, whatever the agent and its clients do."""

import logging
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from replicated_ckpt.agent.http.connections import ADDRESSES_MAX, INTERVAL_S, UnauthenticatedClients
from replicated_ckpt.agent.launch import ensure_agent
from replicated_ckpt.agent.state.log_file import LOG_NAME, BoundedLog, open_log
from replicated_ckpt.core.upkeep.repair_plan import RestoreManifest
from replicated_ckpt.errors import StoreDenied
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.peer.client import AgentClient
from tests.agent.agents import running_agent, stop_agent, wait_for

TALKER = """
import logging, os, sys
from pathlib import Path
from replicated_ckpt.agent.state import log_file
log_file.LOG_BYTES_MAX = 20_000
folder = Path(sys.argv[1])
fd = log_file.open_log(folder)
os.dup2(fd, 1)
os.dup2(fd, 2)
logging.basicConfig(level=logging.INFO, handlers=[log_file.BoundedLog(folder)])
for number in range(1000):
    logging.info("line %d %s", number, "x" * 80)
print("and what is printed", flush=True)
raise SystemExit("and how it ended")
"""


def test_a_full_log_is_rotated(tmp_path: Path) -> None:
    """`log` has the newest lines, with prints and tracebacks. `log.1` has the lines before. Older lines are gone."""
    done = subprocess.run([sys.executable, "-c", TALKER, str(tmp_path)], timeout=60, check=False)
    assert done.returncode == 1
    assert {path.name for path in tmp_path.iterdir()} == {"log", "log.1"}
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 2 * 20_000 + 500
    newest = (tmp_path / "log").read_text()
    older = (tmp_path / "log.1").read_text()
    assert newest.splitlines()[-2:] == ["and what is printed", "and how it ended"]
    numbers = [int(line.split("line ")[1].split()[0]) for line in (older + newest).splitlines() if "line " in line]
    assert numbers == list(range(numbers[0], 1000))


def test_a_log_that_cannot_be_rotated_ends_no_thread(tmp_path: Path) -> None:
    """The log cannot be rotated: the file grows to twice its limit, then lines are dropped. No thread ends."""
    (tmp_path / "log.1").mkdir()
    subprocess.run([sys.executable, "-c", TALKER, str(tmp_path)], timeout=60, check=False)
    log = (tmp_path / "log").read_text()
    assert log.splitlines()[-2:] == ["and what is printed", "and how it ended"]
    assert 2 * 20_000 < len(log) < 2 * 20_000 + 500


def test_a_record_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Line breaks and control characters in quoted values are escaped."""
    forged = "x\n2026-01-01 00:00:00,000 INFO replicated_ckpt.agent.process: stopping\r\x1b[2J"
    quoted = (RestoreManifest("n", "step-1", "1" * 32, (forged,)), forged)
    BoundedLog(tmp_path).handle(logging.makeLogRecord({"msg": "not done: %s: %s", "args": quoted}))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.isprintable()


def test_a_full_log_is_rotated_before_an_agent_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents that fail at their start again and again do not let the log grow."""
    monkeypatch.setattr("replicated_ckpt.agent.state.log_file.LOG_BYTES_MAX", 10)
    for text in (b"first, long enough", b"second, long enough", b"third"):
        with open(open_log(tmp_path), "ab") as log:  # noqa: PTH123 - a descriptor
            log.write(text)
    assert (tmp_path / "log").read_bytes() == b"third"
    assert (tmp_path / "log.1").read_bytes() == b"second, long enough"


def test_a_log_that_is_a_symbolic_link_is_refused(tmp_path: Path) -> None:
    """An agent does not write through a symbolic link in place of its log."""
    (tmp_path / LOG_NAME).symlink_to(tmp_path / "precious")
    with pytest.raises(StoreDenied, match="symbolic link"):
        open_log(tmp_path)
    assert not (tmp_path / "precious").exists()


def test_unauthenticated_clients_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    """Unauthenticated requests: one line a minute for each address, with a count. Addresses above the limit share one
    line.
    """
    now = 0.0
    unauthenticated = UnauthenticatedClients(lambda: now)
    for _ in range(1000):
        unauthenticated.log_refusal("10.0.0.1", "401")
    assert len(caplog.messages) == 1
    now = INTERVAL_S
    unauthenticated.log_refusal("10.0.0.2", "no TLS")
    assert caplog.messages[1:] == [
        "no valid token from 10.0.0.1: 999 times in 60 s, last: 401",
        "no valid token from 10.0.0.2: no TLS",
    ]
    caplog.clear()
    for number in range(100_000):
        unauthenticated.log_refusal(f"2001:db8::{number:x}", "401")
    assert len(caplog.messages) <= ADDRESSES_MAX
    now = 2 * INTERVAL_S
    caplog.clear()
    unauthenticated.log_refusal("10.0.0.3", "401")
    assert any("other addresses: " in message for message in caplog.messages)
    assert len(caplog.messages) <= 2


def flood(port: int) -> None:
    """Makes many kinds of connections without a valid token."""
    kinds = [
        b"GET /v1/status HTTP/1.1\r\nAuthorization: Bearer " + b"x" * 32 + b"\r\n\r\n",
        b"PUT /" + b"y" * 5000 + b" HTTP/1.1\r\nContent-Length: 100\r\n\r\nshort",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"GET / HTTP/9.9\r\n\r\n", b"", b"\r\n\r\n", b"\xff" * 3000,
        b"GET / HTTP/1.1\r\nX: " + b"z" * 70_000 + b"\r\n\r\n",
    ]  # fmt: skip
    for _ in range(40):
        for raw in kinds:
            with socket.create_connection(("127.0.0.1", port), 10) as connection:
                try:
                    connection.sendall(raw)
                    connection.recv(100) if b"Bearer" in raw else None
                except OSError:
                    continue  # the agent refused the request before all of it was sent


def test_connections_without_a_token_leave_a_line_or_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flood of them adds at most two lines to the log of a real agent. A request with the token is logged as before."""
    monkeypatch.setenv("REPLICATED_CKPT_AGENT_IDLE_S", "30")
    root = tmp_path / "root"
    endpoint = ensure_agent(LocalStore(root), "127.0.0.1")
    try:
        log = root / ".agent" / "log"
        before = log.read_text()
        flood(endpoint.port)
        with AgentClient(endpoint.local_address()) as client:
            with pytest.raises(Exception, match="no such verb"):
                client.call("GET", "/v1/nothing")
            client.call("GET", "/v1/status")
        added = log.read_text().removeprefix(before)
        unauthenticated = [line for line in added.splitlines() if "/v1/nothing" not in line]
        assert len(unauthenticated) <= 2, added[:2000]
        assert len(added) < 2000
        assert "no valid token from 127.0.0.1" in added
        assert "/v1/nothing" in added
    finally:
        stop_agent(root)


def test_a_reset_connection_is_one_line(tmp_path: Path) -> None:
    """A peer resets its connection, as a killed one does: the log has one line and no traceback."""
    with running_agent(tmp_path / "root") as agent:
        ask = f"GET /v1/status?brief=1 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {agent.endpoint.token}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", agent.endpoint.port), 10) as peer:
            peer.sendall(ask.encode())
            assert peer.recv(1 << 16).startswith(b"HTTP/1.1 200")
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing sends a reset
        log = tmp_path / "root" / "agent.out"
        wait_for(lambda: "connection broke: ConnectionResetError" in log.read_text(), 10, "the log line")
        assert "Traceback" not in log.read_text()
