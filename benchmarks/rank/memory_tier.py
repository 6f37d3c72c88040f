"""Saves at every step into the memory tier, and loads from it, compared with plain copies from the same memory."""

import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.rank.rounds import built, total
from replicated_ckpt import CheckpointManager, SaveReport
from replicated_ckpt.dcp.memory.root import measure_used
from tests.steps.context import Context


def save_every_step(
    context: Context, size_bytes: int, steps: int, step_s: float, disk_every: int, loads: int
) -> dict[str, Any]:
    """Measures how long each save blocks training, and whether the buddy's memory had it when the next save began.

    The second half of the context's roots are the memory tiers.
    """
    memory = context.roots[len(context.roots) // 2 + context.node]
    state = built(context, "fsdp2", size_bytes)
    copies: dict[str, int] = {}
    blocked, behind, most_used = [], 0, 0

    def note(report: SaveReport) -> None:
        copies[report.checkpoint_id] = max(report.copies_made, copies.get(report.checkpoint_id, 0))

    with CheckpointManager(context.root, memory=memory, disk_every=disk_every, on_save=note) as manager:
        manager.async_save(0, state.values)
        manager.wait()
        dist.barrier()
        for step in range(1, steps + 1):
            time.sleep(step_s)
            behind += f"step-{step - 1}" not in copies
            state.train()
            start = time.perf_counter()
            manager.async_save(step, state.values)
            blocked.append(time.perf_counter() - start)
            most_used = max(most_used, measure_used(memory))
        manager.wait()
        copied = sum(copies.get(f"step-{step}", 0) == 2 for step in range(1, steps + 1))
        taken = [_load_and_copy(manager, state.values, memory / f"step-{steps}") for _ in range(loads)]
    return {
        "state_bytes": total(state),
        "blocked": blocked,
        "behind": behind,
        "copied": copied,
        "most_used_bytes": most_used,
        "loads": taken,
    }


def _load_and_copy(manager: CheckpointManager, values: dict[str, Any], there: Path) -> dict[str, float]:
    """Seconds of a load, of its read phase, and of a plain read of this rank's shards into memory in use."""
    shards = {path: memoryview(bytearray(path.stat().st_size)) for path in there.glob(f"__{dist.get_rank()}_*.distcp")}
    dist.barrier()
    start = time.perf_counter()
    for shard, target in shards.items():
        with shard.open("rb", buffering=0) as file:
            done = 0
            while done < len(target):
                done += file.readinto(target[done:]) or 0
    copy_s = time.perf_counter() - start
    dist.barrier()
    start = time.perf_counter()
    manager.restore(values)
    load_s = time.perf_counter() - start
    assert manager.last_load is not None
    return {"copy_s": copy_s, "load_s": load_s, "read_s": manager.last_load.phases["read"]}
