"""Restarts a node after a power loss, and checks that its promises still hold."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest import mock

from replicated_ckpt.core.integrity.checksum import crc32c
from replicated_ckpt.core.layout import is_checkpoint_file, replaced_name, version_metadata_name
from replicated_ckpt.core.manifest import Manifest
from replicated_ckpt.errors import ObjectCorrupt, ObjectMissing
from replicated_ckpt.node.peers.address_book import PeerBook
from replicated_ckpt.node.saves.service import NodeService
from replicated_ckpt.node.saves.settle import settle
from replicated_ckpt.stores import verified
from replicated_ckpt.stores.local.directories.committed import open_committed_save
from replicated_ckpt.stores.local.shard_file import ShardFile
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.verified import Expected
from tests.fault.power_loss.replay import Promises
from tests.fault.power_loss.scenarios import CHECKPOINT, LAST, no_mark, receive_copy, save, shard_data, shard_file

_NAMES_OF_REPLACED = (replaced_name, version_metadata_name)
OTHER_PID = 4_000_000
"""The pid of the process after the power loss, different from that of the lost one."""


def restart(store: LocalStore) -> NodeService:
    """Does what an agent does when it starts, and then settles staged saves as the next load does when no other node
    can be asked.
    """
    with mock.patch("os.getpid", return_value=OTHER_PID):
        service = NodeService(store)
        service.recover()
        store.tidy(is_alone=True)
        settle(service, service.list_stale_saves(), ())
    return service


def problems(root: Path, promises: Promises) -> list[str]:
    """Restarts a node on the store that a power loss left. Returns the broken promises, also those after one more save."""
    with mock.patch("os.fsync", _unneeded), mock.patch.object(verified, "SCRATCH_BYTES", 1 << 14):
        lost = list(_lost_shards(root, promises))
        if lost:
            return lost
        store = LocalStore(root)
        node = restart(store).node_id
        if promises.get("node", (node,)) != (node,):
            return [f"the identity was {promises['node']}, and is now {node}"]
        found = [*_left_behind(root), *_broken_promises(store, promises)]
        if not found:
            save(store, no_mark, LAST, before="any", write=receive_copy)
            promised = {f"checkpoint {CHECKPOINT}": (LAST,)}
            found = [f"after the next save: {problem}" for problem in _broken_promises(LocalStore(root), promised)]
    return found


def _unneeded(fd: int) -> None:
    """Replaces os.fsync, as this state loses no more power."""


def _lost_shards(root: Path, promises: Promises) -> Iterator[str]:
    """Shards that were acknowledged as durable, and are complete neither in the staging area nor in the checkpoint's
    directory.
    """
    in_memory = promises.get(f"memory {CHECKPOINT}", ())
    for subject, acknowledged in promises.items():
        kind, _, shard = subject.partition(" ")
        for save_id in map(str, acknowledged if kind == "durable" and shard not in in_memory else ()):
            places = [
                root / ".staging" / save_id / shard,
                root / CHECKPOINT / shard,
            ]
            expected = shard_file(save_id, shard)
            if not any(path.is_file() and path.read_bytes() == expected for path in places):
                yield f"{shard} of save {save_id} was acknowledged and is lost"


def _left_behind(root: Path) -> Iterator[str]:
    if (root / ".staging").is_dir():
        yield from (f".staging/{path.name} is left" for path in (root / ".staging").iterdir())
    yield from (f"{path.name} is left" for path in root.rglob(".gone.*"))


def _broken_promises(store: LocalStore, promises: Promises) -> Iterator[str]:
    listed = dict(store.catalog.committed())
    for subject, allowed in promises.items():
        kind, _, name = subject.partition(" ")
        if kind == "checkpoint":
            found = listed[name].save_id if name in listed else None
            if found not in allowed:
                yield f"checkpoint {name} is of save {found}, and should be of {allowed}"
        elif kind == "whole":
            yield from (
                problem for save_id in map(str, allowed) for problem in _damage_of_version(store, name, save_id)
            )
        elif kind == "slim":
            if name in listed and listed[name].save_id in allowed and not listed[name].is_slim:
                yield f"checkpoint {name} has its optimizer again"
        elif kind == "peers":
            known = PeerBook(store.root_agent_directory()).read_all()
            if known not in allowed:
                yield f"the peers known are {known}, and should be one of {allowed}"
    for name, manifest in listed.items():
        yield from _damage(store, name, manifest, promises)


def _damage_of_version(store: LocalStore, name: str, save_id: str) -> Iterator[str]:
    """What is missing of a version that must be complete, under its own name or replaced by a newer one."""
    try:
        with open_committed_save(store.root, name, save_id) as (version, manifest):
            version.raw_metadata(manifest)
        lacks = manifest.shards.keys() - store.catalog.sizes_of(name, manifest).keys()
        yield from (f"{name} of save {save_id} has lost {shard}" for shard in lacks)
    except (ObjectCorrupt, ObjectMissing) as exc:
        yield f"{name} of save {save_id}: {exc}"


def _damage(store: LocalStore, name: str, manifest: Manifest, promises: Promises) -> Iterator[str]:
    """What is missing or wrong in a listed checkpoint."""
    directory = store.final(name)
    kept = {of(save_id) for save_id in map(str, promises.get(f"whole {name}", ())) for of in _NAMES_OF_REPLACED}
    names = {path.name for path in directory.iterdir()} - kept
    # While a version is slimmed, its full metadata is under the version's own name, and `.metadata` has the weights.
    own = version_metadata_name(manifest.save_id)
    is_begun = own in names and manifest.weights is not None
    names -= {own} if is_begun else set()
    yield from (f"{found} in {name}" for found in names if not _belongs(found))
    described = {manifest.metadata_crc32c, *([manifest.slimmed().metadata_crc32c] if is_begun else [])}
    if crc32c((directory / ".metadata").read_bytes()) not in described:
        yield f"{name}: .metadata fails its checksum"
    yield from _damage_of_version(store, name, manifest.save_id) if is_begun else ()
    if manifest.is_slim:
        yield from (f"{found} is left in {name}" for found in names - {".metadata", ".manifest.json", *manifest.shards})
    sizes = store.catalog.sizes_of(name, manifest)
    in_memory = promises.get(f"memory {name}", ())
    for shard, entry in manifest.shards.items():
        if sizes.get(shard) != entry.size_bytes:
            if shard not in (*promises.get(f"missing {name}", ()), *in_memory):
                yield f"{name}: {shard} has {sizes.get(shard)} bytes instead of {entry.size_bytes}"
            continue
        try:
            found = _data(store, name, manifest, shard)
        except ObjectCorrupt as exc:
            if shard not in in_memory:
                yield f"{name}: {exc}"
        else:
            if found != shard_data(manifest.save_id, shard):
                yield f"{name}: {shard} has wrong bytes that pass the checks"


def _belongs(name: str) -> bool:
    """Whether the name is a checkpoint's file. A partial copy may stay until the next attempt to copy it."""
    return is_checkpoint_file(name.removesuffix(".part"))


def _data(store: LocalStore, name: str, manifest: Manifest, shard: str) -> bytes:
    entry = manifest.shards[shard]
    open_file = partial(store.open_file, name, manifest.save_id, shard)
    file = ShardFile(open_file, "here", shard, Expected(entry.size_bytes, entry.crc32c)).open()
    try:
        return bytes(file.read(0, file.table.data_bytes))
    finally:
        file.close()
