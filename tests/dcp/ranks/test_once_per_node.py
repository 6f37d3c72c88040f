"""One rank per node reads a large decision from the c10d store. The others find it in their agent's directory."""

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from replicated_ckpt.dcp.c10d import once_per_node
from replicated_ckpt.dcp.c10d.blackboard import Blackboard
from replicated_ckpt.dcp.c10d.once_per_node import NAME, read_once_per_node
from replicated_ckpt.stores.files import durable
from replicated_ckpt.stores.files.locks import exclusive
from tests.dcp.ranks.test_scale import CountingStore

RANKS_OF_A_NODE = 4
LARGE = {"what": os.urandom(20_000).hex()}  # compresses to half of that
RAW = b"what was decided"
DIGEST = hashlib.sha256(RAW).hexdigest()


class Job:
    """Ranks of two nodes on one c10d store. The coordinator decides `fields`."""

    def __init__(self, base: Path) -> None:
        self.store = CountingStore()
        self.nodes = [base / "a", base / "b"]
        self.boards: list[Blackboard] = []
        for rank in range(2 * RANKS_OF_A_NODE):
            self.boards.append(Blackboard(self.store, rank, 2 * RANKS_OF_A_NODE))  # type: ignore[arg-type]
            self.boards[-1].share_in(self.nodes[rank // RANKS_OF_A_NODE])
        for node in self.nodes:
            node.mkdir()

    def decide(self, fields: dict[str, str]) -> int:
        """Gives every rank the decision. Returns how often it was read from the store."""
        nonces = [board.post("load", {}) for board in self.boards]
        self.boards[0].decide("load", self.boards[0].posts("load", 5.0), fields)
        self.store.calls.clear()

        def read(rank: int) -> dict[str, str]:
            return self.boards[rank].decision("load", nonces[rank], 5.0)

        with ThreadPoolExecutor(len(nonces)) as pool:
            assert list(pool.map(read, range(len(nonces)))) == [fields] * len(nonces)
        return self.store.calls["get"] - len(nonces)  # each rank also reads its own post

    def left(self) -> Sequence[bool]:
        return [(node / NAME).exists() for node in self.nodes]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_one_rank_of_each_node_reads_a_large_decision(job: Job) -> None:
    """For each of several decisions, one rank per node reads the store. One file with mode 0600 is left per node."""
    for number in range(3):
        assert job.decide({**LARGE, "number": str(number)}) == len(job.nodes)
        for node in job.nodes:
            assert sorted(path.name for path in node.iterdir()) == [NAME]
            assert (node / NAME).stat().st_mode & 0o777 == 0o600


def test_a_small_decision_is_left_nowhere(job: Job) -> None:
    """Every rank reads a small decision from the store, and no file is left."""
    assert job.decide({"what": "little"}) == len(job.boards)
    assert job.left() == [False, False]


def test_each_rank_of_a_node_without_the_directory_reads_it(job: Job) -> None:
    """Without the agent's directory, every rank of that node reads the store. Other nodes read it once."""
    job.nodes[1].rmdir()
    assert job.decide(LARGE) == 1 + RANKS_OF_A_NODE
    assert job.left() == [True, False]


@pytest.mark.parametrize("there", ["other bytes", "a longer file", "a link to it", "a directory", "a fifo"])
def test_a_file_that_does_not_match_the_digest_is_not_used(tmp_path: Path, there: str) -> None:
    """A file that does not match the digest is not used. The rank reads the store and replaces the file, which the next
    rank uses.
    """
    path = tmp_path / NAME
    match there:
        case "other bytes":
            path.write_bytes(RAW[::-1])
        case "a longer file":
            path.write_bytes(RAW + bytes(1 << 20))
        case "a link to it":
            (tmp_path / "elsewhere").write_bytes(RAW)
            path.symlink_to(tmp_path / "elsewhere")
        case "a directory":
            path.mkdir()
        case _:
            os.mkfifo(path)
    fetched: list[bytes] = []

    def fetch() -> bytes:
        fetched.append(RAW)
        return RAW

    for _ in range(2):
        assert read_once_per_node(tmp_path, DIGEST, fetch) == RAW
    assert len(fetched) == (2 if there == "a directory" else 1)


def test_a_rank_that_is_stopped_while_it_fetches_delays_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped rank holds the lock: after a bounded wait another rank reads the store itself."""
    monkeypatch.setattr(once_per_node, "WAIT_S", 0.1)
    with exclusive(tmp_path):
        assert read_once_per_node(tmp_path, DIGEST, lambda: RAW) == RAW
        assert not (tmp_path / NAME).exists()


def test_a_full_disk_keeps_no_rank_from_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk each rank still gets the decision."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(durable, "write_all", full)
    assert read_once_per_node(tmp_path, DIGEST, lambda: RAW) == RAW
    assert list(tmp_path.iterdir()) == []
