"""The agent's image, built from Debian's packages and hashed wheels, and run as its configuration says."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.agent.agents import wait_for

BUILD = Path(__file__).resolve().parents[2] / "tools" / "agent_image" / "build.sh"
SIZE_MAX_BYTES = 80_000_000
ENTER = 'mount --bind /dev "$0/dev" && mount -t proc proc "$0/proc" && exec env -i "$@"'
"""As a container runtime: mounts, the image's user and environment, then the command in the same process."""
METRICS = """
import sys
from replicated_ckpt.agent.state.endpoint import read_endpoint
from replicated_ckpt.stores.peer.client import AgentClient
from pathlib import Path
with AgentClient(read_endpoint(Path("/ckpt/.agent")).local_address()) as client:
    sys.stdout.write(client.fetch("GET", "/metrics").decode())
"""

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.geteuid() != 0, reason="building a root and entering it needs root"),
    pytest.mark.skipif(
        not shutil.which("umoci") or not shutil.which("mmdebstrap"), reason="needs umoci and mmdebstrap"
    ),
]


@dataclass(frozen=True)
class Image:
    """An unpacked image, and the process of its configuration."""

    layout: Path
    root: Path
    process: dict[str, Any]

    def start(self, *words: str) -> "subprocess.Popen[str]":
        """Starts a command in the image, as its user and with its environment."""
        user = self.process["user"]
        enter: list[str | Path] = [
            shutil.which("chroot") or "chroot",
            f"--userspec={user['uid']}:{user['gid']}",
            self.root,
        ]
        return subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", ENTER, self.root, *self.process["env"], *enter, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *words: str) -> str:
        """Runs a command, which must exit with 0. Returns its output."""
        with self.start(*words) as process:
            output, _ = process.communicate(timeout=60)
        assert process.returncode == 0, output
        return output


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    folder = tmp_path_factory.mktemp("image")
    layout, bundle = folder / "layout", folder / "bundle"
    environment = {**os.environ, "PYTHON": sys.executable}
    built = subprocess.run([BUILD, layout], capture_output=True, text=True, check=False, env=environment, timeout=500)
    assert built.returncode == 0, built.stderr[-2000:]
    (version,) = [entry["annotations"]["org.opencontainers.image.ref.name"] for entry in manifests(layout)]
    subprocess.run(["umoci", "unpack", "--image", f"{layout}:{version}", bundle], capture_output=True, check=True)
    yield Image(layout, bundle / "rootfs", json.loads((bundle / "config.json").read_text())["process"])
    shutil.rmtree(folder)


def manifests(layout: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((layout / "index.json").read_text())["manifests"]
    return found


def measure_bytes(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() or path.is_symlink())


def test_the_image_has_at_most_80_mb_and_no_torch(image: Image) -> None:
    """Packed and unpacked. The image has no torch, numpy, shell or package manager."""
    assert measure_bytes(image.layout) < SIZE_MAX_BYTES
    assert measure_bytes(image.root) < SIZE_MAX_BYTES
    names = {path.name for path in image.root.rglob("*")}
    assert names.isdisjoint({"torch", "numpy", "sh", "bash", "apt", "dpkg", "pip"})
    assert {"replicated_ckpt", "botocore"} <= names


def test_an_agent_of_the_image_answers_and_ends(image: Image) -> None:
    """The image's command starts an agent as user 1000. Status and metrics answer, and SIGTERM ends the agent with 0."""
    assert image.process["args"] == ["replicated-ckpt", "agent", "--root", "/ckpt"]
    assert image.process["user"]["uid"] == 1000
    agent = image.start(*image.process["args"])
    try:
        wait_for(
            lambda: (image.root / "ckpt/.agent/endpoint.json").exists() or agent.poll() is not None, 60, "an agent"
        )
        assert agent.poll() is None, agent.communicate()[0]
        assert (image.root / "ckpt").stat().st_uid == 1000
        status = json.loads(image.run("replicated-ckpt", "status", "--root", "/ckpt", "--json"))
        assert status["reasons"] == []
        image.run("replicated-ckpt", "status", "--own-agent", "--root", "/ckpt")
        assert "\nreplicated_ckpt_" in image.run("/usr/bin/python3", "-c", METRICS)
        agent.terminate()
        assert agent.wait(30) == 0
    finally:
        agent.kill()
        agent.communicate()


def test_a_verb_that_needs_torch_names_it(image: Image) -> None:
    """`import` makes a checkpoint with DCP. In the image it exits as after a wrong argument and names torch."""
    with image.start("replicated-ckpt", "import", "--root", "/tmp/a", "--from", "torch", "/tmp/x", "one") as process:
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "`import` needs torch, which this Python (/usr/bin/python3) does not have." in output


def test_the_image_has_an_s3_client(image: Image) -> None:
    """The S3 client of the image opens, and reports that nothing listens at the endpoint."""
    code = """
from replicated_ckpt.errors import StoreUnavailable
from replicated_ckpt.stores.bucket_client.opening import open_client
from replicated_ckpt.stores.bucket_client.url import ObjectTarget
options = {"key": "k", "secret": "s", "endpoint_url": "http://127.0.0.1:9", "client_kwargs": {"region_name": "x"}}
try:
    open_client(ObjectTarget("s3://bucket/run", options)).put("key", b"")
except StoreUnavailable as exc:
    print(exc)
"""
    assert "Could not connect to the endpoint" in image.run("/usr/bin/python3", "-c", code)
