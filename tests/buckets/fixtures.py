"""Pytest fixtures for all tests: one server of each kind for each session, started at its first use."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.buckets.servers import Server, Unavailable, moto_server, radosgw_server
from tests.buckets.weak import WeakStore, weak_server

RADOSGW_FIRST_USE_S = 1200


@pytest.fixture(scope="session")
def moto() -> Iterator[Server]:
    """A fast S3 server in this process. Keep objects under 16 MB, as moto reads the whole object for each range."""
    with moto_server() as server:
        yield server


@pytest.fixture(scope="session")
def radosgw() -> Iterator[Server]:
    """A real S3 server. Its tests get the marks `radosgw` and `long`, and are skipped with the reason where it cannot
    run.
    """
    with ExitStack() as stack:
        try:
            server = stack.enter_context(radosgw_server())
        except Unavailable as exc:
            pytest.skip(str(exc))
        yield server


@pytest.fixture
def weak_store() -> Iterator[WeakStore]:
    """An empty store with weaker guarantees than S3, for one test."""
    with weak_server() as store:
        yield store


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "radosgw" in getattr(item, "fixturenames", ()):
            item.add_marker("radosgw")
            item.add_marker("long")
            item.add_marker(pytest.mark.timeout(RADOSGW_FIRST_USE_S))
