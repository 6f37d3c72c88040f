"""A disk error in the middle of a request becomes an answer that names the path, and no descriptor stays open."""

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from replicated_ckpt.errors import StoreError
from replicated_ckpt.stores.files.existence import open_plain
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.peer.answer import file_path
from replicated_ckpt.stores.peer.client import AgentClient
from tests.agent.agents import opened_server
from tests.agent.scattered import ID, scattered
from tests.harness.processes import open_below

pytestmark = pytest.mark.timeout(60)
SAVE = "a" * 32


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """A node with a checkpoint of torch's own writer."""
    store = LocalStore(tmp_path / "node0")
    scattered([store], tmp_path)
    return store


@pytest.fixture
def client(store: LocalStore) -> Iterator[AgentClient]:
    """A client with the owner token, of an agent in this process."""
    with opened_server(store) as address, AgentClient(address) as client:
        yield client


def refuse_once(name: str, code: int, is_meant: Callable[[str], bool]) -> Callable[..., Any]:
    """`os.name`, which fails once for a path that `is_meant` accepts."""
    original, left = getattr(os, name), [1]

    def call(at: Any, *args: Any, **named: Any) -> Any:
        path = os.readlink(f"/proc/self/fd/{at}") if isinstance(at, int) else os.fspath(at)  # noqa: PTH115
        if left and is_meant(path):
            left.clear()
            raise OSError(code, os.strerror(code), path)
        return original(at, *args, **named)

    return call


def test_a_failed_fstat_closes_the_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`fstat` fails on a bad disk: the descriptor is closed, as an agent would leak one in each round."""
    (tmp_path / "file").touch()
    monkeypatch.setattr(os, "fstat", refuse_once("fstat", errno.EIO, lambda path: path == str(tmp_path / "file")))
    with pytest.raises(OSError, match="Input/output"):
        open_plain(tmp_path / "file")
    assert open_below(tmp_path) == []


def test_a_directory_in_a_shards_place_is_refused_and_leaves_nothing_open(
    store: LocalStore, client: AgentClient
) -> None:
    """A directory has the name of a shard: the error says so, and no descriptor leaks however often peers ask."""
    (store.root / ID / "__8_0.distcp").mkdir()
    for _ in range(5):
        with pytest.raises(StoreError, match="Is a directory"):
            client.fetch("GET", file_path(ID, SAVE, "__8_0.distcp"))
        client.close()
    assert open_below(store.root / ID) == []
