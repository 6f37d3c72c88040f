"""Pytest fixtures, for every test: one server of each kind a session, started at its first use."""

from collections.abc import Iterator

import pytest

from tests.buckets.servers import Server, moto_server


@pytest.fixture(scope="session")
def moto() -> Iterator[Server]:
    """A quick S3 server in this process; keep objects under 16 MB: it reads a whole one for each range."""
    with moto_server() as server:
        yield server
