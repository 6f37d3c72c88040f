"""The fixture that starts clusters and ends them with the test; every test of this folder is marked `multiprocess`."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.harness.cluster import Cluster

HERE = Path(__file__).parent
ClusterOf = Callable[..., Cluster]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.multiprocess)
            item.add_marker(pytest.mark.timeout(300))


@pytest.fixture
def cluster_of(tmp_path: Path) -> Iterator[ClusterOf]:
    """`cluster_of(3)` starts a cluster of three nodes with empty stores. The test's end stops all its processes.

    Ranks skip the interpreter's shutdown. Tests of that shutdown pass `quick_exit=False`.
    """
    with ExitStack() as stack:

        def build(node_count: int, *, base: Path = tmp_path, quick_exit: bool = True, **options: Any) -> Cluster:
            return stack.enter_context(Cluster(base / "cluster", node_count, quick_exit=quick_exit, **options))

        yield build
