"""The files of examples/monitoring: Prometheus' tools accept them, and a server scrapes a real agent with them."""

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from replicated_ckpt import ReplicatedWriter, Retention
from replicated_ckpt.agent.launch import _client_lock_by_root
from tests.agent.agents import ANSWER_S, RunningAgent, running_agent, wait_for

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "monitoring"
DASHBOARD = json.loads((EXAMPLES / "dashboard.json").read_text())
EXPRESSIONS = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
WITHIN_S = 60.0
AGE_S = 3
"""The alert's time without a whole checkpoint, instead of half an hour."""

pytestmark = [
    pytest.mark.skipif(shutil.which("promtool") is None, reason="Debian's package prometheus is not installed"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),  # DCP warns that there is no process group
]


def promtool(*arguments: object) -> None:
    found = subprocess.run(["promtool", *map(str, arguments)], check=False, capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stdout + found.stderr


def test_each_alert_fires_for_its_reason(tmp_path: Path) -> None:
    """The rules are valid and pass the cases of alerts_test.yml."""
    for path in (EXAMPLES / "alerts.yml", Path(__file__).with_name("alerts_test.yml")):
        shutil.copy(path, tmp_path)
    promtool("check", "rules", tmp_path / "alerts.yml")
    promtool("test", "rules", tmp_path / "alerts_test.yml")
    assert (EXAMPLES / "alerts.yml").read_text().count("- alert: ") == 5


def test_the_dashboard_is_valid() -> None:
    """Panels do not overlap, and every query selects the chosen job."""
    places = [tuple(panel["gridPos"][key] for key in "xywh") for panel in DASHBOARD["panels"]]
    cells = [(x + i, y + j) for x, y, w, h in places for i in range(w) for j in range(h)]
    assert len(cells) == len(set(cells))
    assert all(x + w <= 24 for x, _, w, _ in places)
    assert all('job=~"$job"' in expression for expression in EXPRESSIONS)


def test_an_alert_fires_when_saving_stops(tmp_path: Path) -> None:
    """Prometheus scrapes an agent over TLS with the example's files. The alert fires when saves stop for its time.

    The alert ends with the job.
    """
    root = tmp_path / "root"
    options = "--host", "0.0.0.0", "--round-every-s", "0.3"
    with running_agent(root, *options) as agent, prometheus(tmp_path, agent) as server:
        saves = save_until(root, lambda: is_quiet(server))
        stopped_at = time.time()
        assert wait_for(server.firing, WITHIN_S, "the alert") == ["ReplicatedCkptNoWholeCheckpoint"]
        assert time.time() - stopped_at > AGE_S - 1
        end_job(root)
        wait_for(lambda: not server.firing(), WITHIN_S, "the end of the alert after the job's end")
        assert server.value_of("sum(replicated_ckpt_save_duration_seconds_count)") == saves
        kinds = server.kind_by_name()
        assert kinds["replicated_ckpt_saves_total"] == "counter"
        for expression in EXPRESSIONS:
            plain = expression.replace("$job", ".*").replace("$__rate_interval", "30s")
            server.query(plain)
            for name in re.findall(r"replicated_ckpt_\w+", plain):
                assert name.removesuffix("_bucket") in kinds, expression


def end_job(root: Path) -> None:
    """Releases this process's client lock at the agent, as the process's end does."""
    _client_lock_by_root.pop(root).release()


def is_quiet(server: "Server") -> bool:
    """Whether some saves have been scraped, the newest is recent, and no alert fires."""
    age = 'job:replicated_ckpt_commit_age:seconds{level="whole"}'
    is_seen = 3 <= server.value_of("max(replicated_ckpt_saves_total)") < float("inf")
    return is_seen and server.value_of(age) < AGE_S - 1 and server.firing() == []


def save_until(root: Path, is_over: Callable[[], bool]) -> int:
    """Saves repeatedly. Returns the number of saves."""
    writer = ReplicatedWriter(root, copies=1, retention=Retention(keep_last=2))
    saves, deadline = 0, time.monotonic() + WITHIN_S
    while not is_over():
        assert time.monotonic() < deadline, "saves do not arrive"
        dcp.save({"model": torch.rand(1000)}, checkpoint_id=f"step-{saves}", storage_writer=writer)
        saves += 1
    return saves


class Server:
    """A running Prometheus."""

    def __init__(self, port: int) -> None:
        self._port = port

    def _ask(self, path: str, **query: str) -> Any:
        url = f"http://127.0.0.1:{self._port}{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=ANSWER_S) as answer:
            return json.load(answer)["data"]

    def is_ready(self) -> bool:
        try:
            return bool(self._ask("/api/v1/targets")["activeTargets"][0]["health"] == "up")
        except (OSError, IndexError):
            return False

    def query(self, expression: str) -> Any:
        return self._ask("/api/v1/query", query=expression)["result"]

    def value_of(self, expression: str) -> float:
        """The only result, or infinity if there is none."""
        found = self.query(expression)
        assert len(found) < 2, found
        return float(found[0]["value"][1]) if found else float("inf")

    def kind_by_name(self) -> dict[str, str]:
        return {name: found[0]["type"] for name, found in self._ask("/api/v1/metadata").items()}

    def firing(self) -> list[str]:
        return [
            alert["labels"]["alertname"]
            for alert in self._ask("/api/v1/alerts")["alerts"]
            if alert["state"] == "firing"
        ]


@contextmanager
def prometheus(folder: Path, agent: RunningAgent) -> Iterator[Server]:
    """Prometheus with the example's files, as docs/monitoring.md says. Only paths, port and times differ."""
    token, certificate = folder / "replicated-ckpt.token", folder / "replicated-ckpt.pem"
    shutil.copy(agent.root / ".agent" / "metrics.token", token)
    pem = (agent.root / ".agent" / "tls.pem").read_text()
    certificate.write_text(pem[pem.index("-----BEGIN CERTIFICATE") :])
    config = (EXAMPLES / "prometheus.yml").read_text().replace("/etc/prometheus/", f"{folder}/")
    config = config.replace("localhost:29600", f"localhost:{agent.endpoint.port}").replace("15s", "200ms")
    (folder / "prometheus.yml").write_text(config)
    rules = (EXAMPLES / "alerts.yml").read_text()
    (folder / "alerts.yml").write_text(
        rules.replace("> 1800", f"> {AGE_S}").replace("[30m:1m]", f"[{AGE_S}s:1s]").replace("> 15", "> 1")
    )
    promtool("check", "config", folder / "prometheus.yml")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    try:
        server = Server(port)
        wait_for(server.is_ready, WITHIN_S, f"the first scrape: {(folder / 'prometheus.log').read_text()[-2000:]}")
        yield server
    finally:
        process.kill()
        process.wait(10)
