"""What holds for every test: nothing runs on after the suite, and GPU tests need a GPU."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.multiprocess.processes import end, processes_of
from tests.multiprocess.zygote import stop_the_zygote

pytest_plugins = ["tests.buckets.fixtures"]


@pytest.fixture(scope="session", autouse=True)
def no_agent_survives(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fails the suite if an agent of one of its stores still runs at its end; ends what forked its ranks."""
    yield
    stop_the_zygote()
    base = f"{tmp_path_factory.getbasetemp()}{os.sep}"
    agents = [pid for pid in processes_of(base) if b"replicated_ckpt" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    end(agents)
    assert not agents, f"agents {agents} of stores under {base} outlived the tests that started them"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that wait for processes begin first: what is left at the end is short, so several at once end together."""
    items.sort(key=lambda item: not any(item.get_closest_marker(name) for name in ("fault", "multiprocess")))
    needs_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if needs_gpu and not Path("/dev/nvidiactl").exists():
        for item in needs_gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))
