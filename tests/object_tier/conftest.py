"""Sites and nodes that end with their test, each with a bucket of its own."""

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
    """`site_of(moto, 2)` is a site of two blank nodes; every process in it ends with the test."""
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
    """Arguments of a writer or reader that name a new bucket of moto's."""
    bucket = moto.make_bucket(f"b-{uuid4().hex[:12]}")
    return {"object_store": f"s3://{bucket}/runs/one", "storage_options": moto.storage_options()}


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """One node's store, not made yet; its agent ends with the test."""
    yield tmp_path / "node"
    stop_agent(tmp_path / "node")
