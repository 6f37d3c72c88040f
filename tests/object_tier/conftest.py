"""Fixtures: a site, a new bucket, a node's store. Agents end with their test."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from tests.agent.agents import stop_agent
from tests.buckets.faulty_bucket import faulty_bucket
from tests.buckets.servers import Server
from tests.harness.cluster import Cluster
from tests.object_tier.sites import Site

SiteOf = Callable[..., Site]


@pytest.fixture
def site_of(tmp_path: Path) -> Iterator[SiteOf]:
    """`site_of(moto, 2)` returns a site of two blank nodes with a new bucket. All its processes end with the test."""
    with ExitStack() as stack:

        def build(server: Server, node_count: int, **environment: Any) -> Site:
            faulty = stack.enter_context(faulty_bucket(server))
            cluster = Cluster(tmp_path / "cluster", node_count, quick_exit=True)
            cluster.environment.update({name: str(value) for name, value in environment.items()})
            name = server.make_bucket(f"b-{uuid4().hex[:12]}")
            return Site(stack.enter_context(cluster), server, faulty, name)

        yield build


@pytest.fixture
def where(moto: Server) -> Mapping[str, Any]:
    """Arguments that make a writer or reader use a new bucket of moto's."""
    bucket = moto.make_bucket(f"b-{uuid4().hex[:12]}")
    return {"object_store": f"s3://{bucket}/runs/one", "storage_options": moto.storage_options()}


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """The path of one node's store, which does not exist yet. Its agent ends with the test."""
    yield tmp_path / "node"
    stop_agent(tmp_path / "node")
