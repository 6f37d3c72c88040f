"""The recorded scenarios: each operation of a node on its store, with the promises made during it.

Subjects of the promises: `node` (the identity), `checkpoint X` (the save ids that may be found under that id; None: no
checkpoint), `whole X` (saves of X that are complete, published or replaced), `durable X` (the save whose shard X was
acknowledged), `slim X` (saves of X without their optimizer), `missing X` (shards that X may lack), `memory X` (shards
of X that were acknowledged in memory only), and `peers`.
"""

import errno
import io
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import Protocol
from unittest import mock

from replicated_ckpt.agent.repair.mender import pull_shard
from replicated_ckpt.core.integrity.checksum import crc32c
from replicated_ckpt.core.layout import MANIFEST_NAME, METADATA_NAME, replaced_name, version_metadata_name
from replicated_ckpt.core.manifest import Manifest, NodeEntry, ShardEntry, WeightsEntry
from replicated_ckpt.core.parts import Part, part_of_shard
from replicated_ckpt.node.saves.receive import receive_file
from replicated_ckpt.node.saves.request_body import Body
from replicated_ckpt.node.saves.service import NodeService
from replicated_ckpt.stores.any_source import AnySource, Source
from replicated_ckpt.stores.files.direct import PAGE_BYTES
from replicated_ckpt.stores.local.directories.committed import open_committed_save
from replicated_ckpt.stores.local.directories.intent import Intent
from replicated_ckpt.stores.local.inspection import at_once
from replicated_ckpt.stores.local.shard_file import CommittedShard, FileSink
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.local.versions.recycled import RecycledFiles, RoomOfRecycled
from replicated_ckpt.stores.local.versions.remove import recycle, retire, slim
from replicated_ckpt.stores.peer.client import AgentAddress
from replicated_ckpt.stores.tee import Buffers, Tee
from replicated_ckpt.stores.verified import Expected, VerifiedShard
from replicated_ckpt.testing.shards import table_of
from tests.agent.checkpoints import next_file_number, renumbered
from tests.fault.power_loss.recorder import Recorder

CHECKPOINT, OLDER = "runs/seed-0/step-1", "runs/seed-0/step-0"
SHARDS = ("__0_0.distcp", "__1_0.distcp")
WITH_OPTIMIZER = ("__0_0.distcp", "__0_1.distcp", "__1_0.distcp", "__1_1.distcp")
STORE = "disks/node"
"""Path of the store's root below the directory that is recorded; it does not exist at first."""
OLD, NEW, NEXT, LAST = "1" * 32, "2" * 32, "3" * 32, "4" * 32
ALIKE = "1" * 31 + "2"
"""A save with the bytes of OLD."""


class Marker(Protocol):
    """Records the promises from now on."""

    def __call__(self, subject: str, *allowed: object) -> None: ...


@dataclass(frozen=True)
class Scenario:
    """`prepare` is durable when `run` begins. Only `run` is recorded."""

    name: str
    prepare: Callable[[LocalStore], None]
    run: Callable[[LocalStore, Marker], None]
    has_hard_links: bool = True


def shard_data(save_id: str, shard: str) -> bytes:
    """A shard's data, different for each save and shard, and longer than a buffer."""
    return f"{save_id[:4]} {shard} ".encode() * 230


def metadata_of(save_id: str) -> bytes:
    """A save's metadata, different for each save, and always of the same length."""
    return f"metadata of save {save_id}".encode()


def weights_of(save_id: str) -> bytes:
    """The metadata of the weights alone. In `.metadata` it follows the save's full metadata."""
    return f"weights of {save_id}".encode()


def shard_file(save_id: str, shard: str) -> bytes:
    """The complete file of a shard, footer included."""
    data = shard_data(save_id, shard)
    return data + table_of([data]).encode()


def manifest_of(node_id: str, save_id: str, checkpoint_id: str, shards: Sequence[str] = SHARDS) -> Manifest:
    tables = {shard: table_of([shard_data(save_id, shard)]) for shard in shards}
    raw, weights = described(save_id, shards), weights_of(save_id)
    entry = WeightsEntry(len(weights), crc32c(weights), 0, 0, ("optim",))
    return Manifest(
        save_id=save_id,
        checkpoint_id=checkpoint_id,
        sequence=int(save_id[0]),
        created_unix_s=0.0,
        world_size=2,
        copies=1,
        metadata_bytes=len(raw),
        metadata_crc32c=crc32c(raw),
        nodes=(NodeEntry(node_id, "host", None, (0, 1)),),
        shards={
            shard: ShardEntry(table.file_bytes, table.file_crc(), int(shard[2]), node_id, (node_id,))
            for shard, table in tables.items()
        },
        weights=entry if _has_optimizer(shards) else None,
    )


def described(save_id: str, shards: Sequence[str]) -> bytes:
    """The bytes of `.metadata` of a save with these shards."""
    return metadata_of(save_id) + (weights_of(save_id) if _has_optimizer(shards) else b"")


def _has_optimizer(shards: Sequence[str]) -> bool:
    return any(part_of_shard(shard) is Part.OPTIMIZER for shard in shards)


def no_mark(subject: str, *allowed: object) -> None:
    """Records no promise."""


def nothing(store: LocalStore) -> None:
    """The store does not exist yet."""


def write_own(store: LocalStore, save_id: str, shard: str) -> None:
    """Writes a rank's shard as the writer does: the first shard with direct I/O, the others through the page cache."""
    sink = FileSink.create(store.path_of_staged(save_id, shard), _direct_io(shard), RecycledFiles(store.root))
    tee = Tee([sink], Buffers(2, PAGE_BYTES), copies=sink.is_direct)
    tee.write(shard_data(save_id, shard))
    for outcome in tee.finish()[1]:
        if outcome.error is not None:
            raise outcome.error


def receive_copy(store: LocalStore, save_id: str, shard: str, *, in_memory: bool = False) -> None:
    """Receives a peer's copy as the agent does."""
    raw = shard_file(save_id, shard)
    headers = Message()
    headers["Content-Length"] = str(len(raw))
    body, path = Body(io.BytesIO(raw), headers), store.path_of_staged(save_id, shard)
    pool = (RoomOfRecycled if in_memory else RecycledFiles)(store.root)
    receive_file(path, body, lambda _: None, durable=not in_memory, direct_io=_direct_io(shard), recycled=pool)


def _direct_io(shard: str) -> str:
    return "on" if shard == SHARDS[0] else "off"


def save(
    store: LocalStore,
    mark: Marker,
    save_id: str,
    *,
    checkpoint_id: str = CHECKPOINT,
    before: str | None = None,
    write: Callable[[LocalStore, str, str], None] = write_own,
    names: Sequence[str] = SHARDS,
) -> None:
    """One save, from opening to commit. `before`: the save that it overwrites."""
    subject = f"checkpoint {checkpoint_id}"
    mark(subject, before)
    service = NodeService(store)
    mark("node", service.node_id)
    shards = [renumbered(shard, next_file_number([store], checkpoint_id)) for shard in names]
    service.open_save(Intent(save_id, checkpoint_id, "session", overwrite=before is not None))
    for shard in shards:
        write(store, save_id, shard)
        mark(f"durable {shard}", save_id)
    store.put_small(save_id, ".metadata", described(save_id, shards))
    mark(subject, before, save_id)
    store.put_small(save_id, ".manifest.json", manifest_of(service.node_id, save_id, checkpoint_id, shards).encode())
    mark(subject, save_id)
    service.commit(save_id)


def first_save(store: LocalStore, mark: Marker) -> None:
    save(store, mark, NEW)


def buddy_save(store: LocalStore, mark: Marker) -> None:
    save(store, mark, NEW, write=receive_copy)


def memory_save(store: LocalStore, mark: Marker) -> None:
    """With ack="peer-memory" the bytes of copies are not fsynced before the commit."""
    mark(f"memory {CHECKPOINT}", SHARDS[1])

    def write(store: LocalStore, save_id: str, shard: str) -> None:
        receive_copy(store, save_id, shard, in_memory=shard == SHARDS[1])

    save(store, mark, NEW, write=write)


def committed(store: LocalStore) -> None:
    save(store, no_mark, OLD)


def overwrite(store: LocalStore, mark: Marker) -> None:
    save(store, mark, NEW, before=OLD)


def overwrite_in_part(store: LocalStore, mark: Marker) -> None:
    """One shard of the new version is on another node: the old version stays here, complete, whichever version has the
    name.
    """
    elsewhere = renumbered(SHARDS[1], next_file_number([store], CHECKPOINT))

    def write(store: LocalStore, save_id: str, shard: str) -> None:
        if shard != elsewhere:
            write_own(store, save_id, shard)

    mark(f"whole {CHECKPOINT}", OLD)
    mark(f"memory {CHECKPOINT}", elsewhere)
    save(store, mark, NEW, before=OLD, write=write)


def aborted_early(store: LocalStore, mark: Marker) -> None:
    """A save is aborted before the decision: it must never be found."""
    mark(f"checkpoint {CHECKPOINT}", OLD)
    service = NodeService(store)
    mark("node", service.node_id)
    service.open_save(Intent(NEW, CHECKPOINT, "session", overwrite=True))
    write_own(store, NEW, SHARDS[0])
    receive_copy(store, NEW, SHARDS[1])
    store.put_small(NEW, ".metadata", metadata_of(NEW))
    service.abort(NEW, "a rank failed")


def aborted_late(store: LocalStore, mark: Marker) -> None:
    """A save is aborted although its decision is on this node: it is found complete, or not at all."""
    mark(f"checkpoint {CHECKPOINT}", None, NEW)
    service = NodeService(store)
    mark("node", service.node_id)
    service.open_save(Intent(NEW, CHECKPOINT, "session", overwrite=False))
    for shard in SHARDS:
        write_own(store, NEW, shard)
    store.put_small(NEW, ".metadata", metadata_of(NEW))
    store.put_small(NEW, ".manifest.json", manifest_of(service.node_id, NEW, CHECKPOINT).encode())
    service.abort(NEW, "the coordinator failed")


def identity(store: LocalStore, mark: Marker) -> None:
    mark("node", store.node_id())


def one_shard_missing(store: LocalStore) -> None:
    committed(store)
    (store.final(CHECKPOINT) / SHARDS[1]).unlink()


def one_shard_short(store: LocalStore) -> None:
    committed(store)
    path = store.final(CHECKPOINT) / SHARDS[1]
    os.truncate(path, path.stat().st_size - 1)


class MemoryShard(VerifiedShard):
    """A peer's copy of a shard."""

    def __init__(self, raw: bytes, expected: Expected) -> None:
        super().__init__("peer", "shard", expected)
        self._raw = raw

    def _fill(self, target: memoryview, offset: int) -> None:
        target[:] = self._raw[offset : offset + len(target)]

    def close(self) -> None:
        """Nothing is open."""


def restored(store: LocalStore, mark: Marker) -> None:
    """A missing copy is pulled into a committed checkpoint."""
    mark(f"checkpoint {CHECKPOINT}", OLD)
    mark(f"missing {CHECKPOINT}", SHARDS[1])
    mark("node", store.node_id())
    raw = shard_file(OLD, SHARDS[1])
    expected = Expected(len(raw), crc32c(raw))
    with open_committed_save(store.root, CHECKPOINT, OLD) as (version, _), version.incoming_file(SHARDS[1]) as path:
        sources = AnySource([Source("peer", expected, lambda _: MemoryShard(raw, expected))], lambda *_: None)
        sink = FileSink.create(path, recycled=RecycledFiles(store.root), shard=SHARDS[1])
        pull_shard(sources, SHARDS[1], sink, at_once)
        version.place(path, SHARDS[1])
    mark(f"missing {CHECKPOINT}")


def manifest_restored(store: LocalStore, mark: Marker) -> None:
    """The manifest of a checkpoint is written again in its place."""
    mark(f"checkpoint {CHECKPOINT}", OLD)
    mark("node", store.node_id())
    raw = (store.final(CHECKPOINT) / MANIFEST_NAME).read_bytes()
    with open_committed_save(store.root, CHECKPOINT, OLD) as (directory, _):
        directory.put_small(MANIFEST_NAME, raw)
    mark(f"checkpoint {CHECKPOINT}", OLD)


def retired(store: LocalStore, mark: Marker) -> None:
    """Retention removes a checkpoint: it is found complete, or not at all."""
    mark("node", store.node_id())
    mark(f"checkpoint {CHECKPOINT}", OLD, None)
    assert retire(store.root, CHECKPOINT, OLD)
    mark(f"checkpoint {CHECKPOINT}", None)


def given_to_the_pool(store: LocalStore, mark: Marker) -> None:
    """As `retired`, but the files stay in the pool for the next save."""
    mark("node", store.node_id())
    mark(f"checkpoint {CHECKPOINT}", OLD, None)
    assert recycle(store.root, CHECKPOINT, OLD)
    mark(f"checkpoint {CHECKPOINT}", None)


def committed_with_optimizer(store: LocalStore) -> None:
    save(store, no_mark, OLD, names=WITH_OPTIMIZER)


def slimmed(store: LocalStore, mark: Marker) -> None:
    """A checkpoint loses its optimizer: it is found full or slim, and complete. Afterwards it is slim."""
    mark("node", store.node_id())
    mark(f"checkpoint {CHECKPOINT}", OLD)
    assert slim(store.root, CHECKPOINT, OLD)
    mark(f"slim {CHECKPOINT}", OLD)


def slimmed_for_the_pool(store: LocalStore, mark: Marker) -> None:
    """As `slimmed`, but the optimizer's files stay in the pool for the next save."""
    mark("node", store.node_id())
    mark(f"checkpoint {CHECKPOINT}", OLD)
    assert slim(store.root, CHECKPOINT, OLD, recycles=True)
    mark(f"slim {CHECKPOINT}", OLD)


def pooled(store: LocalStore) -> None:
    committed(store)
    assert recycle(store.root, CHECKPOINT, OLD)


def one_shard_missing_and_pooled(store: LocalStore) -> None:
    one_shard_missing(store)
    save(store, no_mark, NEW, checkpoint_id="run/older")
    assert recycle(store.root, "run/older", NEW)


def save_over_pool(store: LocalStore, mark: Marker) -> None:
    """A rank's own shard and a received one are written over the files of a removed checkpoint."""
    recycled = RecycledFiles(store.root)
    assert recycled.size_bytes()
    save(store, mark, NEW, write=write_either)
    assert not recycled.size_bytes()


def write_either(store: LocalStore, save_id: str, shard: str) -> None:
    (write_own if shard == SHARDS[0] else receive_copy)(store, save_id, shard)


def save_after_removal(store: LocalStore, mark: Marker) -> None:
    """Records both the removal and the save that reuses its files."""
    given_to_the_pool(store, mark)
    save_over_pool(store, mark)


def committed_before(store: LocalStore) -> None:
    save(store, no_mark, OLD, checkpoint_id=OLDER)


def linked(store: LocalStore, mark: Marker) -> None:
    """A save links the files of an older checkpoint, which is removed afterwards: the newer one keeps the files."""

    def link(store: LocalStore, save_id: str, shard: str) -> None:
        entry = manifest_of(store.node_id(), OLD, OLDER).shards[shard]
        source = CommittedShard(OLDER, OLD, shard, entry.size_bytes, entry.crc32c)
        store.link_staged(save_id, shard, source, lambda _: False)

    mark(f"checkpoint {OLDER}", OLD)
    save(store, mark, ALIKE, write=link)
    mark(f"checkpoint {OLDER}", OLD, None)
    assert recycle(store.root, OLDER, OLD)
    mark(f"checkpoint {OLDER}", None)


def replaced(store: LocalStore) -> None:
    """A newer version replaced this one and was retired: manifest and metadata have the names of a replaced version."""
    committed(store)
    directory = store.final(CHECKPOINT)
    (directory / MANIFEST_NAME).rename(directory / replaced_name(OLD))
    (directory / METADATA_NAME).rename(directory / version_metadata_name(OLD))


def taken_over(store: LocalStore, mark: Marker) -> None:
    """A replaced version gets its name and its shards back."""
    for shard in SHARDS:
        mark(f"durable {shard}", OLD)
    mark(f"checkpoint {CHECKPOINT}", None, OLD)
    mark("node", store.node_id())
    store.begin(Intent(OLD, CHECKPOINT, "repair", overwrite=True), replaces_other_runs=False)
    store.put_small(OLD, ".metadata", metadata_of(OLD))
    store.put_small(OLD, ".manifest.json", manifest_of(store.node_id(), OLD, CHECKPOINT).encode())
    store.commit(OLD)
    mark(f"checkpoint {CHECKPOINT}", OLD)


def peers_of(*ports: int) -> tuple[AgentAddress, ...]:
    return tuple(AgentAddress(f"{port:012x}", "127.0.0.1", port, "token") for port in ports)


def met_peers(store: LocalStore, mark: Marker) -> None:
    """The node learns peers, twice."""
    service = NodeService(store)
    mark("node", service.node_id)
    mark("peers", (), peers_of(1))
    service.learn_peers([peer.to_json() for peer in peers_of(1)])
    mark("peers", peers_of(1), peers_of(1, 2))
    service.learn_peers([peer.to_json() for peer in peers_of(2)])
    mark("peers", peers_of(1, 2))


SCENARIOS: Mapping[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        Scenario("identity", nothing, identity),
        Scenario("first save", nothing, first_save),
        Scenario("buddy's side", nothing, buddy_save),
        Scenario("copies in memory", nothing, memory_save),
        Scenario("overwrite", committed, overwrite),
        Scenario("overwrite without hard links", committed, overwrite, has_hard_links=False),
        Scenario("overwrite in part", committed, overwrite_in_part),
        Scenario("abort before the decision", committed, aborted_early),
        Scenario("abort after the decision", nothing, aborted_late),
        Scenario("restore of a missing copy", one_shard_missing, restored),
        Scenario("restore of a short copy", one_shard_short, restored),
        Scenario("restore over a recycled file", one_shard_missing_and_pooled, restored),
        Scenario("restore of a manifest", committed, manifest_restored),
        Scenario("retirement", committed, retired),
        Scenario("files for the next save", committed, given_to_the_pool),
        Scenario("slimming", committed_with_optimizer, slimmed),
        Scenario("slimming without hard links", committed_with_optimizer, slimmed, has_hard_links=False),
        Scenario("slimming for the next save", committed_with_optimizer, slimmed_for_the_pool),
        Scenario("save over recycled files", pooled, save_over_pool),
        Scenario("removal and save over its files", committed, save_after_removal),
        Scenario("save of links", committed_before, linked),
        Scenario("replaced version gets its name back", replaced, taken_over),
        Scenario("peers", nothing, met_peers),
    )
}


def recorded(scenario: Scenario, base: Path) -> Recorder:
    """Runs a scenario below `base`, an empty directory, and returns its recorder."""
    store = LocalStore(base / STORE)
    with mock.patch.object(os, "link", os.link if scenario.has_hard_links else _cannot_link):
        scenario.prepare(store)
        with Recorder(base) as recorder:
            scenario.run(LocalStore(base / STORE), recorder.mark)
    return recorder


def _cannot_link(*_: object, **__: object) -> None:
    """Simulates a file system without hard links."""
    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
