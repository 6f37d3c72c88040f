"""Peak memory and speed of a real agent that uploads one large shard and commits it in the bucket."""

import time
from pathlib import Path

from benchmarks.shard_on_disk import written_shard
from replicated_ckpt.core.integrity.checksum import crc32c
from replicated_ckpt.core.manifest import Manifest, NodeEntry, ShardEntry, UploadEntry
from replicated_ckpt.stores.bucket.bucket import Bucket
from replicated_ckpt.stores.bucket_client.opening import open_client
from replicated_ckpt.stores.bucket_client.url import ObjectTarget
from replicated_ckpt.stores.local.directories.intent import Intent
from replicated_ckpt.stores.local.store import LocalStore
from tests.agent.agents import RunningAgent, running_agent, wait_for
from tests.buckets.servers import Server

RSS_BYTES_MAX = 300_000_000
_SAVE_ID, _CHECKPOINT_ID, _SHARD = f"{1:032x}", "step-1", "__0_0.distcp"
_METADATA = b"metadata" * 50
_UPLOAD_TIMEOUT_S = 600.0


def is_within_bounds(server: Server, bucket: str, directory: Path, mib: int) -> bool:
    """An agent uploads a shard of `mib` MiB. Prints its time and memory, and returns whether the memory stayed in
    bounds.
    """
    target = ObjectTarget(f"s3://{bucket}/agent", server.storage_options())
    _saved(LocalStore(directory / "node"), target.url, mib << 20)
    with running_agent(directory / "node") as agent, agent.client() as client:
        before = _status_bytes(agent, "VmRSS")
        start_s = time.monotonic()
        client.call("POST", "/v1/object/target", target.to_json())
        found = wait_for(lambda: Bucket(open_client(target)).save_of(_CHECKPOINT_ID), _UPLOAD_TIMEOUT_S, "the commit")
        seconds = time.monotonic() - start_s
        peak = _status_bytes(agent, "VmHWM")
    assert found.save_id == _SAVE_ID
    print(
        f"agent: {mib} MiB in the bucket and committed after {seconds:.1f} s, {(mib << 20) / seconds / 1e6:.0f} MB/s;"
        f" RSS {before / 1e6:.0f} MB before, {peak / 1e6:.0f} MB at its peak (bound: {RSS_BYTES_MAX / 1e6:.0f} MB)"
    )
    return peak < RSS_BYTES_MAX


def _saved(store: LocalStore, url: str, data_bytes: int) -> None:
    """Commits a checkpoint of one shard in the node's store, for its agent to upload."""
    node_id = store.node_id()
    store.begin(Intent(_SAVE_ID, _CHECKPOINT_ID, "benchmark", overwrite=False))
    table = written_shard(store.path_of_staged(_SAVE_ID, _SHARD), data_bytes)
    manifest = Manifest(
        save_id=_SAVE_ID,
        checkpoint_id=_CHECKPOINT_ID,
        sequence=1,
        created_unix_s=0.0,
        world_size=1,
        copies=1,
        metadata_bytes=len(_METADATA),
        metadata_crc32c=crc32c(_METADATA),
        nodes=(NodeEntry(node_id, "localhost", None, (0,)),),
        shards={_SHARD: ShardEntry(table.file_bytes, table.file_crc(), 0, node_id, (node_id,))},
        upload=UploadEntry(url, False, len(_METADATA), crc32c(_METADATA)),
    )
    store.put_small(_SAVE_ID, ".metadata", _METADATA)
    store.put_small(_SAVE_ID, ".manifest.json", manifest.encode())
    store.commit(_SAVE_ID)


def _status_bytes(agent: RunningAgent, name: str) -> int:
    lines = Path(f"/proc/{agent.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))
