"""How scripts of two gloo ranks end, with stock and with ours: their exit codes, and gloo threads left at the end.

`python -m tools.exit_status --runs 50`, best on a busy machine: torch aborts at exit when threads have to wait.
"""

import argparse
import gc
import os
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from replicated_ckpt import CheckpointManager

HELD: list[Any] = []
"""Objects that the script keeps until the interpreter ends."""
VARIANTS = {
    "stock, destroyed": ("stock", "destroy"),
    "stock, not destroyed": ("stock",),
    "stock and a group in a variable, destroyed": ("stock", "group", "destroy"),
    "manager, closed and destroyed": ("manager", "close", "destroy"),
    "manager, destroyed and closed after it": ("manager", "destroy", "close late"),
    "manager, not closed, destroyed": ("manager", "destroy"),
    "manager, closed, not destroyed": ("manager", "close"),
    "manager, closed with a save in flight, destroyed": ("manager", "in flight", "close", "destroy"),
}


def count_threads() -> int:
    """The number of this process's threads that run gloo's collectives."""
    return sum(path.read_text().startswith("pt_gloo") for path in Path("/proc/self/task").glob("*/comm"))


def save(steps: tuple[str, ...], root: Path, run: int) -> None:
    """One asynchronous save with the steps of the variant."""
    state = {f"w{index}": torch.randn(64, 64) for index in range(20)}
    if "stock" in steps:
        path = root / f"stock-{run}"
        saved: Any = dcp.async_save(state, checkpoint_id=path, storage_writer=dcp.FileSystemWriter(path))
        saved.result()
    else:
        manager = CheckpointManager(root, copies=1)
        HELD.append(manager)
        manager.async_save(run, state)
        if "in flight" not in steps:
            manager.wait()
        if "close" in steps:
            manager.close()


def be_rank(rank: int, steps: tuple[str, ...], root: Path, run: int) -> None:
    """The script of one rank. It returns, and the interpreter ends."""
    where = root / f"store-{run}"
    dist.init_process_group("gloo", store=dist.FileStore(str(where), 2), rank=rank, world_size=2)
    if "group" in steps:
        HELD.append(dist.new_group(backend="gloo"))
    save(steps, root, run)
    dist.all_reduce(torch.ones(4))
    if "destroy" in steps:
        dist.barrier()
        dist.destroy_process_group()
    if "close late" in steps:
        HELD[-1].close()
    (root / f"threads-{run}-{rank}").write_text(str(count_threads()))


def fork(script: Callable[[], None], log: Path) -> int | None:
    """Returns the id of a new process that runs `script`. In that process, returns None after the script."""
    pid = os.fork()
    if pid:
        return pid
    output = os.open(log, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    script()
    return None


def try_variant(name: str, runs: int, base: Path) -> bool:
    """Returns False in a rank, which must then end by itself."""
    root = base / name.replace(" ", "-").replace(",", "")
    root.mkdir()
    codes: Counter[int] = Counter()
    for run in range(runs):
        pids = []
        for rank in (0, 1):
            pid = fork(lambda rank=rank, run=run: be_rank(rank, VARIANTS[name], root, run), root / "log")  # type: ignore[misc]
            if pid is None:
                return False
            pids.append(pid)
        codes.update(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids)
    threads = Counter(int(path.read_text()) for path in root.glob("threads-*"))
    print(f"{name}: {runs} runs of 2, threads left {dict(threads)}, exit codes {dict(codes)}", flush=True)
    return True


def main() -> None:
    """Runs every variant equally often."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--only", choices=sorted(VARIANTS), action="append")
    arguments = parser.parse_args()
    os.environ["REPLICATED_CKPT_AGENT_IDLE_S"] = "5"
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # ranks are forks of this process and share its unchanged memory
    base = Path(tempfile.mkdtemp(prefix="exit-status-"))
    print(f"logs in {base}", flush=True)
    for name in arguments.only or VARIANTS:
        if not try_variant(name, arguments.runs, base):
            return


if __name__ == "__main__":
    main()
