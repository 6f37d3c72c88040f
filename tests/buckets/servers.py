"""S3 servers that run on this machine while a test needs them. Their libraries are imported only then."""

import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from replicated_ckpt.drill.moto_server import make_moto_server

REGION = "us-east-1"
RADOSGW_SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "radosgw.sh"
RADOSGW_ROOT = Path(os.environ.get("REPLICATED_CKPT_RADOSGW") or "/var/cache/replicated_ckpt/radosgw")
WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")  # the kernel kills the process when the thread that started it ends


class Unavailable(Exception):
    """This machine cannot run the server. The message has the reason."""


@dataclass(frozen=True)
class Server:
    """An S3 endpoint on loopback, and the keys of a user with all permissions."""

    endpoint_url: str
    key: str
    secret: str

    def storage_options(self) -> dict[str, Any]:
        """A new dict in the form that s3fs takes. The caller may add to it."""
        client_kwargs = {"endpoint_url": self.endpoint_url, "region_name": REGION}
        return {"key": self.key, "secret": self.secret, "client_kwargs": client_kwargs}

    def at(self, endpoint_url: str) -> "Server":
        """The same server at another address, such as a proxy's."""
        return replace(self, endpoint_url=endpoint_url)

    def client(self, *, attempts: int = 1, timeout_s: float = 30, **config: Any) -> Any:
        """A boto3 S3 client that tries each request `attempts` times. `config` goes to botocore's Config."""
        import boto3
        from botocore.config import Config

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint_url,
            region_name=REGION,
            aws_access_key_id=self.key,
            aws_secret_access_key=self.secret,
            config=Config(
                retries={"total_max_attempts": attempts, "mode": "standard"},
                connect_timeout=timeout_s,
                read_timeout=timeout_s,
                **config,
            ),
        )

    def make_bucket(self, name: str) -> str:
        """Creates the bucket unless this user has it already. Returns its name."""
        self.client(attempts=3).create_bucket(Bucket=name)
        return name


@contextmanager
def moto_server() -> Iterator[Server]:
    """moto in a thread of this process. Its buckets live as long as the process: another moto_server() sees them, too."""
    server = make_moto_server()
    serving = threading.Thread(target=server.serve_forever, daemon=True)
    serving.start()
    try:
        yield Server(f"http://127.0.0.1:{server.server_port}", key="test", secret="testsecret")
    finally:
        server.shutdown()
        serving.join()


@contextmanager
def radosgw_server(root: Path = RADOSGW_ROOT) -> Iterator[Server]:
    """Ceph's gateway, empty, with its data in memory. The first use unpacks Debian's packages into `root`, which takes
    a minute or two.

    All its processes end with the block, or with the thread that entered it.

    Raises: Unavailable if the gateway cannot run here: no root, no mmdebstrap, no Debian mirror, no namespaces.
    """
    _create_radosgw(root)
    ports = [str(port) for port in _free_ports(2)]
    process = subprocess.Popen(
        [*WITH_PARENT, str(RADOSGW_SCRIPT), "run", str(root), *ports],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        try:
            ready = process.stdout.readline()  # each step of the script has a time limit
            if not ready.startswith("http://"):
                raise Unavailable(f"radosgw did not start: {process.communicate()[1].strip()}")
            yield Server(*ready.split())
        finally:
            process.kill()


def _create_radosgw(root: Path) -> None:
    try:
        command = [*WITH_PARENT, str(RADOSGW_SCRIPT), "create", str(root)]
        subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=900, check=True)
    except subprocess.CalledProcessError as exc:
        raise Unavailable(f"no radosgw: {exc.stderr.strip()}") from exc
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise Unavailable(f"no radosgw: {exc}") from exc


def _free_ports(count: int) -> list[int]:
    """Ports of loopback that are free at this moment."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports: list[int] = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports
