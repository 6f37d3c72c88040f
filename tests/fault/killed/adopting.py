"""One node's part of an adoption, in a process of its own that a failpoint may kill: forked for each line of stdin."""

import json
import os
import sys
from pathlib import Path

from replicated_ckpt import failpoints
from replicated_ckpt.agent.saves.service import NodeService
from replicated_ckpt.core.integrity.checksum import BlockTable
from replicated_ckpt.core.manifest import Manifest, ShardEntry
from replicated_ckpt.core.unmanaged.metadata_places import item_ranges, needed_bytes
from replicated_ckpt.core.unmanaged.survey import UnmanagedSave, manifest_of, rank_of, unmanaged_checkpoints
from replicated_ckpt.stores.local.directories.intent import Intent
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.unmanaged.directory import UnmanagedDirectory


def found(store: LocalStore, checkpoint_id: str) -> tuple[UnmanagedSave, bytes]:
    """What this store alone holds of a checkpoint of stock torch, and its `.metadata`."""
    raw = (store.root / checkpoint_id / ".metadata").read_bytes()
    (checkpoint,) = unmanaged_checkpoints(UnmanagedDirectory(store.root).holdings(store.node_id(), checkpoint_id))
    return checkpoint.save(needed_bytes(item_ranges(raw))), raw


def manifest(save: UnmanagedSave, save_id: str, tables: dict[str, BlockTable], node_id: str) -> Manifest:
    shards = {
        name: ShardEntry(table.file_bytes, table.file_crc(), rank_of(name), node_id, (node_id,))
        for name, table in tables.items()
    }
    return manifest_of(save, save_id, shards, 1)


def adopt(root: str, checkpoint_id: str, save_id: str) -> None:
    service = NodeService(LocalStore(Path(root)))
    save, raw = found(service.store, checkpoint_id)
    service.begin(Intent(save_id, checkpoint_id, "adoption", overwrite=True, adopts=True))
    service.store.put_small(save_id, ".metadata", raw)
    tables = service.adopt(save_id, list(save.holders))
    decision = manifest(save, save_id, dict(tables), service.node_id)
    service.store.put_small(save_id, ".manifest.json", decision.encode())
    service.commit(save_id)


def main() -> None:
    """Answers each line (root, id, save id, failpoint, as JSON) with the exit code of the process that did it."""
    for line in sys.stdin:
        *arguments, failpoint = json.loads(line)
        pid = os.fork()
        if pid == 0:
            failpoints.arm_from_environment(failpoint)
            adopt(*arguments)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
