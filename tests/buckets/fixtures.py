"""Pytest fixtures, for every test: one server of each kind a session, started at its first use."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.buckets.servers import Server, Unavailable, moto_server, radosgw_server
from tests.buckets.weak import WeakStore, weak_server

RADOSGW_FIRST_USE_S = 1200


@pytest.fixture(scope="session")
def moto() -> Iterator[Server]:
    """A quick S3 server in this process; keep objects under 16 MB: it reads a whole one for each range."""
    with moto_server() as server:
        yield server


@pytest.fixture(scope="session")
def radosgw() -> Iterator[Server]:
    """A real S3 server. Tests that use it are `radosgw` and `long`, and skipped with the reason where there is none."""
    with ExitStack() as stack:
        try:
            server = stack.enter_context(radosgw_server())
        except Unavailable as exc:
            pytest.skip(str(exc))
        yield server


@pytest.fixture
def weak_store() -> Iterator[WeakStore]:
    """An empty store that promises less than S3, for one test."""
    with weak_server() as store:
        yield store


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "radosgw" in getattr(item, "fixturenames", ()):
            item.add_marker("radosgw")
            item.add_marker("long")
            item.add_marker(pytest.mark.timeout(RADOSGW_FIRST_USE_S))
