"""S3 servers that run on this machine while a test needs them. Imports their libraries only then."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

REGION = "us-east-1"


class Unavailable(Exception):
    """This machine cannot run the server; the message says why."""


@dataclass(frozen=True)
class Server:
    """An S3 endpoint on loopback and the keys of a user who may do everything there."""

    endpoint_url: str
    key: str
    secret: str

    def storage_options(self) -> dict[str, Any]:
        """A new dict in the form that s3fs takes; the caller may add to it."""
        client_kwargs = {"endpoint_url": self.endpoint_url, "region_name": REGION}
        return {"key": self.key, "secret": self.secret, "client_kwargs": client_kwargs}

    def at(self, endpoint_url: str) -> "Server":
        """The same server, reached through another address: a proxy's."""
        return replace(self, endpoint_url=endpoint_url)

    def client(self, *, attempts: int = 1, timeout_s: float = 30, **config: Any) -> Any:
        """A boto3 S3 client that tries each request `attempts` times; `config` goes to botocore's Config."""
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
        """Creates the bucket, or finds it already there as this user's; returns its name."""
        self.client(attempts=3).create_bucket(Bucket=name)
        return name


@contextmanager
def moto_server() -> Iterator[Server]:
    """moto in a thread of this process. Its buckets live as long as the process: another moto_server() sees them too."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # else one line for each request
    running = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    try:
        host, port = running.get_host_and_port()
        yield Server(f"http://{host}:{port}", key="test", secret="testsecret")
    finally:
        running.stop()
