"""The replacements of a simulation: network, clock, random numbers, threads, and a rank's view of its world."""

import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

from replicated_ckpt.agent import launch
from replicated_ckpt.agent.repair import reprotect
from replicated_ckpt.agent.state import rights
from replicated_ckpt.agent.state.endpoint import Endpoint
from replicated_ckpt.cli.checkpoints import repair
from replicated_ckpt.cli.look import given_root, nodes
from replicated_ckpt.core.integrity.checksum import FOOTER_TAIL_BYTES, BlockHasher, tables_of_size
from replicated_ckpt.core.manifest import Manifest, decode_manifest
from replicated_ckpt.core.reading.windows import Window
from replicated_ckpt.dcp.agreement import node_post
from replicated_ckpt.dcp.agreement.node_post import NodePost
from replicated_ckpt.dcp.c10d import world
from replicated_ckpt.dcp.c10d.world import World
from replicated_ckpt.dcp.load import load_attempt, loading, reader
from replicated_ckpt.dcp.load.shard_reader import ShardReader
from replicated_ckpt.dcp.save import commit as finish
from replicated_ckpt.dcp.save import numbering, save_attempt, shard_writer, writer
from replicated_ckpt.errors import ReplicatedCkptError, StoreUnavailable
from replicated_ckpt.node.saves import service
from replicated_ckpt.node.state import upload_book
from replicated_ckpt.node.uploads import uploader
from replicated_ckpt.stores import tee, threads, verified
from replicated_ckpt.stores.bucket_client.client import ObjectClient
from replicated_ckpt.stores.bucket_client.opening import open_client
from replicated_ckpt.stores.bucket_client.retry import RetryingClient
from replicated_ckpt.stores.bucket_client.url import ObjectTarget
from replicated_ckpt.stores.files.locks import DescriptorLock
from replicated_ckpt.stores.local.directories import catalog, committed
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.peer import client as agent_client

if TYPE_CHECKING:
    from tests.fault.torture.simulated.cluster import Cluster, Node

BLOCK_BYTES = 512
Seen = dict[Any, Any]


@dataclass
class RankView:
    """One rank's view of its process and its world. `said`: the package's warnings."""

    world: World
    post: Callable[[], NodePost]
    session: str
    seen_lineages: Seen
    said: list[str]
    met: Callable[..., Any] | None = None


@dataclass
class _Now:
    """The view of the running rank."""

    cluster: "Cluster"
    alone: Seen = field(default_factory=dict)

    @property
    def rank(self) -> RankView:
        view = self.cluster.operations.running.rank
        assert isinstance(view, RankView), "no rank runs"
        return view

    @property
    def name(self) -> str:
        """Replaces the session name of a process."""
        return self.rank.session

    def seen(self) -> Seen:
        """What this process has loaded and saved."""
        view = self.cluster.operations.running.rank
        return self.alone if view is None else view.seen_lineages

    def get(self, key: Any) -> Any:
        return self.seen().get(key)

    def __setitem__(self, key: Any, newest: Any) -> None:
        self.seen()[key] = newest

    def warn(self, text: str, *_: Any) -> None:
        """Replaces `caller.warn`."""
        self.rank.said.append(text)

    def meet(self, *arguments: Any, **more: Any) -> Any:
        assert self.rank.met is not None
        return self.rank.met(*arguments, **more)


class FetchInTurn:
    """Replaces `FetchAhead`: fetches a window only when it is needed, in the one thread that runs."""

    def __init__(self, reader: ShardReader, *_: object) -> None:
        self._reader = reader.sibling()

    def take_window(self, window: Window) -> memoryview:
        return self._reader.read_range(window.shard, window.offset, window.length)

    def release(self, window: Window) -> None:
        """Does nothing, as no window is kept."""

    def stop(self) -> None:
        self._reader.close()


def replacements(cluster: "Cluster") -> Iterator[AbstractContextManager[Any]]:
    """The patches, each to be entered for the time of the simulation."""
    now = _Now(cluster)
    known_manifests = _KnownManifests()
    clock = SimpleNamespace(monotonic=cluster.now, sleep=cluster.wait, time=cluster.unix_now)
    replaced: Sequence[tuple[object, str, object]] = (
        (agent_client, "open_connection", cluster.network.connection),
        (agent_client, "limit_time", _no_deadline),
        (time, "time", cluster.read_wall_clock),
        (service, "time", clock),
        (reprotect, "time", clock),
        (finish, "time", clock),
        (rights, "time", clock),
        (uuid, "uuid4", cluster.draw_uuid),
        (numbering, "secrets", SimpleNamespace(randbelow=cluster.random.randrange)),
        (threads.FanOut, "run", _run_inline),
        (tee._SinkThread, "start", lambda _: None),
        (tee._SinkThread, "join", tee._SinkThread.run),
        (tee, "BlockHasher", partial(BlockHasher, BLOCK_BYTES)),
        (shard_writer, "Buffers", partial(tee.Buffers, 4, 1 << 16)),
        (os, "fsync", lambda _: None),  # Power loss is not simulated.
        (DescriptorLock, "wait", cluster.operations.wait_for_lock()),
        (verified, "SCRATCH_BYTES", 1 << 16),
        (verified, "tables_of_size", _tables_of_size),
        (loading, "FetchAhead", FetchInTurn),
        (upload_book, "random", cluster.random),
        (upload_book, "open_client", partial(_open_bucket, cluster)),
        (load_attempt, "open_client", partial(_open_bucket, cluster)),
        (load_attempt, "RetryingClient", partial(RetryingClient, clock=cluster.now, sleep=cluster.wait)),
        (uploader, "RetryingClient", partial(RetryingClient, clock=cluster.now, sleep=cluster.wait)),
        (catalog, "decode_manifest", known_manifests),
        (committed, "decode_manifest", known_manifests),
        (catalog, "leads_out", _never),  # There are no symbolic links, and the check takes a fifth of the time.
        (committed, "leads_out", _never),
        (world, "_SESSION", now),
        (node_post, "_seen", now),
        (save_attempt, "warn", now.warn),
        (load_attempt, "warn", now.warn),
        (writer, "world_of_call", lambda *_: now.rank.world),
        (reader, "world_of_call", lambda *_: now.rank.world),
        (reader, "find_call", lambda: True),
        (load_attempt, "meet", now.meet),
        (node_post, "register_node", lambda *_: now.rank.post()),
        (save_attempt, "register_for_save", lambda *_: now.rank.post()),
        (node_post, "ensure_agent", partial(_endpoint_of, cluster)),
        (repair, "ensure_agent", partial(_endpoint_of, cluster)),
        (given_root, "ensure_agent", partial(_endpoint_of, cluster)),
        (nodes, "running_agent", partial(_running_endpoint_of, cluster)),
        (launch, "_start", _start_no_process),
    )
    for target, name, stand_in in (*replaced, *cluster.threads.replacements()):
        yield mock.patch.object(target, name, stand_in)


class _KnownManifests:
    """Replaces `decode_manifest`: parses equal bytes only once."""

    def __init__(self) -> None:
        self._by_raw: dict[bytes, Manifest] = {}

    def __call__(self, raw: bytes, source: str) -> Manifest:
        if raw not in self._by_raw:
            self._by_raw[raw] = decode_manifest(raw, source)
        return self._by_raw[raw]


class _FaultyBucket:
    """A bucket that does not answer while it is down."""

    def __init__(self, cluster: "Cluster", client: ObjectClient) -> None:
        self._cluster = cluster
        self._client = client
        self.target = client.target

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def called(*arguments: Any) -> Any:
            if self._cluster.is_bucket_down:
                raise StoreUnavailable(self.target.url, name, "", "the bucket is down")
            return getattr(self._client, name)(*arguments)

        return called


def _open_bucket(cluster: "Cluster", target: ObjectTarget, *options: Any) -> _FaultyBucket:
    return _FaultyBucket(cluster, open_client(target, *options))


def _node_of(cluster: "Cluster", store: LocalStore) -> "Node":
    return next(node for node in cluster.nodes if node.root == store.root)


def _endpoint_of(cluster: "Cluster", store: LocalStore, *_: Any) -> Endpoint:
    """Replaces `ensure_agent`: returns the node's agent, and starts it if none runs."""
    node = _node_of(cluster, store)
    node.boot()
    return node.endpoint


def _running_endpoint_of(cluster: "Cluster", store: LocalStore) -> Endpoint | None:
    """Replaces `running_agent`: returns the node's agent if it runs."""
    node = _node_of(cluster, store)
    return node.endpoint if node.is_up else None


def _start_no_process(store: LocalStore, *_: Any) -> Endpoint:
    raise AssertionError(f"a simulation starts a real agent for {store.root}")


def _tables_of_size(tail: bytes, file_bytes: int) -> list[tuple[int, int]]:
    """Rebuilds a table of checksums with the simulation's block size, too, if a footer no longer contains the size."""
    data_bytes = file_bytes - FOOTER_TAIL_BYTES - 4 * -(-(file_bytes - FOOTER_TAIL_BYTES) // (BLOCK_BYTES + 4))
    return [*[(BLOCK_BYTES, data_bytes)] * (data_bytes >= 0), *tables_of_size(tail, file_bytes)]


def _never(*_: Any) -> bool:
    return False


@contextmanager
def _no_deadline(*_: Any) -> Iterator[None]:
    yield


def _run_inline(
    keys: Any, call: Callable[[Any], Any], *, most: int = 0, until_error: bool = False
) -> threads.FanOut[Any, Any]:
    """Makes one call after the other, whatever `most` allows."""
    outcome = threads.FanOut[Any, Any]()
    for key in keys:
        if until_error and outcome.errors:
            break
        try:
            outcome.results[key] = call(key)
        except ReplicatedCkptError as exc:
            outcome.errors[key] = exc
    return outcome
