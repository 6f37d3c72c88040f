"""Unreadable sectors count as damage: the bytes around them are used, and the damage is reported."""

import errno
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import pytest

from replicated_ckpt.agent.repair.mender import pull_shard
from replicated_ckpt.core.integrity.checksum import BLOCK_BYTES
from replicated_ckpt.core.manifest import Manifest
from replicated_ckpt.errors import ObjectCorrupt, ReplicatedCkptError
from replicated_ckpt.stores.any_source import AnySource, Source
from replicated_ckpt.stores.bucket_client.client import UploadSource
from replicated_ckpt.stores.local.inspection import Inspector
from replicated_ckpt.stores.local.shard_file import FileSink, ShardFile
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.peer.client import AgentAddress, AgentClient
from replicated_ckpt.stores.peer.copy import PeerShard
from replicated_ckpt.stores.verified import Expected, VerifiedShard
from tests.agent.agents import opened_server
from tests.agent.checkpoints import checkpointed, findings, shard

pytestmark = pytest.mark.timeout(60)
SHARD = shard(0)
BLOCKS = 3
DATA_BYTES = BLOCKS * BLOCK_BYTES - 1000
PAGE_BYTES = 4096


@contextmanager
def losing(*lost: tuple[Path, int]) -> Iterator[None]:
    """Reads of the byte at each of these places fail. sendfile first sends the bytes before it."""
    preadv, sendfile = os.preadv, os.sendfile

    def readable_bytes(fd: int, offset: int, size: int) -> int:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))  # noqa: PTH115
        ahead = [place - offset for at, place in lost if at == path and offset <= place < offset + size]
        return min(ahead) // PAGE_BYTES * PAGE_BYTES if ahead else size

    def read(fd: int, into: list[memoryview], offset: int) -> int:
        size = sum(map(len, into))
        if readable_bytes(fd, offset, size) < size:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(fd, into, offset)

    def send(to: int, fd: int, offset: int, size: int) -> int:
        count = readable_bytes(fd, offset, size)
        if count == 0 < size:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return sendfile(to, fd, offset, count)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", read)
        patch.setattr(os, "sendfile", send)
        yield


@pytest.fixture
def stores(tmp_path: Path) -> list[LocalStore]:
    return [LocalStore(tmp_path / f"node{index}") for index in range(2)]


@pytest.fixture
def manifest(stores: list[LocalStore]) -> Manifest:
    return checkpointed(stores, 1, {SHARD: (0, 1)}, size_bytes=DATA_BYTES)


def path_in(store: LocalStore) -> Path:
    return store.root / "step-1" / SHARD


def expected_of(manifest: Manifest) -> Expected:
    entry = manifest.shards[SHARD]
    return Expected(entry.size_bytes, entry.crc32c)


def sources_of(stores: list[LocalStore], agent: AgentAddress, manifest: Manifest, bad: list[str]) -> AnySource:
    """The first store's disk and the second store's agent as sources."""
    save = "step-1", manifest.save_id, SHARD

    def at_home(expected: Expected) -> VerifiedShard:
        return ShardFile(partial(stores[0].open_file, *save), "own store", SHARD, expected)

    def at_peer(expected: Expected) -> VerifiedShard:
        return PeerShard(AgentClient(agent), *save, expected)

    def note(node: str, error: ReplicatedCkptError) -> None:
        assert isinstance(error, ObjectCorrupt), error  # only ObjectCorrupt makes the agent read the file again
        bad.append(node)

    expected = expected_of(manifest)
    return AnySource([Source("own", expected, at_home), Source("peer", expected, at_peer)], note)


@pytest.mark.parametrize("own", range(BLOCKS))
@pytest.mark.parametrize("peers", range(BLOCKS))
def test_two_copies_with_different_lost_sectors_are_read_together(
    stores: list[LocalStore], manifest: Manifest, own: int, peers: int, tmp_path: Path
) -> None:
    """Two copies have lost sectors: both are reported, and all is read and copied unless both lost the same block."""
    lost = [(path_in(stores[0]), own * BLOCK_BYTES + 5000), (path_in(stores[1]), peers * BLOCK_BYTES + 9000)]
    raw, bad = path_in(stores[0]).read_bytes(), list[str]()
    with opened_server(stores[1]) as agent, losing(*lost):
        with closing(sources_of(stores, agent, manifest, bad)) as sources:
            found = sources.read(0, DATA_BYTES)
        assert (None if found is None else bytes(found)) == (None if own == peers else raw[:DATA_BYTES])
        assert bad == ["own", "peer"]
        with closing(sources_of(stores, agent, manifest, bad)) as sources:
            if own != peers:
                pull_shard(sources, SHARD, FileSink.create(tmp_path / SHARD), lambda _: None)
                assert (tmp_path / SHARD).read_bytes() == raw
    assert [findings(store) for store in stores] == [[], []]


def test_data_is_read_although_one_footer_is_lost(stores: list[LocalStore], manifest: Manifest) -> None:
    """One copy's footer cannot be read, and the other copy has lost a block: all data is read."""
    lost = [(path_in(stores[0]), manifest.shards[SHARD].size_bytes - 20), (path_in(stores[1]), 9000)]
    raw, bad = path_in(stores[0]).read_bytes(), list[str]()
    with (
        opened_server(stores[1]) as agent,
        losing(*lost),
        closing(sources_of(stores, agent, manifest, bad)) as sources,
    ):
        found = sources.read(0, DATA_BYTES)
        assert found is not None
        assert bytes(found) == raw[:DATA_BYTES]
    assert [findings(store) for store in stores] == [[], []]


@pytest.mark.parametrize(("place", "footer_damaged"), [(-20, (SHARD,)), (9000, ())])
def test_a_lost_footer_is_reported_apart_from_lost_data(
    stores: list[LocalStore], manifest: Manifest, place: int, footer_damaged: tuple[str, ...]
) -> None:
    """The only copy has an unreadable footer: the inspection reports `footer_damaged`, so that its data still counts as
    a source.
    """
    inspector = Inspector(stores[0], stores[0].node_id())
    with losing((path_in(stores[0]), place % manifest.shards[SHARD].size_bytes)):
        assert [finding.name for finding in inspector.inspect()] == [SHARD]
    (holding,) = inspector.holdings
    assert (holding.damaged, holding.footer_damaged) == ((SHARD,), footer_damaged)
    assert findings(stores[0]) == []


def test_an_upload_that_meets_a_lost_sector_names_the_shard_as_damaged(
    stores: list[LocalStore], manifest: Manifest, tmp_path: Path
) -> None:
    """An upload that meets a lost sector raises ObjectCorrupt with the shard, so that the node replaces its copy."""
    opened = stores[0].open_file("step-1", manifest.save_id, SHARD)
    with (
        UploadSource(opened, "this node", SHARD, expected_of(manifest)) as source,
        losing((path_in(stores[0]), BLOCK_BYTES + 10)),
    ):
        memory = memoryview(bytearray(BLOCK_BYTES))
        source.read(0, memory)
        with pytest.raises(ObjectCorrupt, match="Input/output error") as raised:
            source.read(BLOCK_BYTES, memory)
    assert raised.value.store == "this node"
    assert [findings(store) for store in stores] == [[], []]
