"""One rank of a launched world: runs the calls of a spec file, and writes their results."""

import faulthandler
import json
import os
import signal
import sys
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from replicated_ckpt.errors import ReplicatedCkptWarning
from tests.gloo import GLOO_SETTLE_S, end_group
from tests.harness.launch import COLLECTIVE_TIMEOUT_ENV, step_of
from tests.steps.context import Context

COLLECTIVE_TIMEOUT_S = 60.0


def run(call: dict[str, Any], context: Context) -> tuple[Any, list[str]]:
    step = step_of(call)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        value = step(context, **call["arguments"])
    ours = [str(entry.message) for entry in caught if issubclass(entry.category, ReplicatedCkptWarning)]
    return value, ours


def exit_quickly(*, is_failed: bool) -> NoReturn:
    """Ends this process at once. Without a failure, rank 0 first waits until no other rank uses the store that it
    serves.
    """
    if dist.is_initialized() and not is_failed:
        dist.barrier()
    os._exit(int(is_failed))


def join_group() -> None:
    """Joins the group. First the ranks meet at the store, for as long as a busy machine takes, because the group's own
    time-out may be only seconds.
    """
    store, rank, world_size = next(rendezvous("env://", timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S)))
    store.set(f"here/{rank}", "")
    store.wait([f"here/{other}" for other in range(world_size)])
    timeout = timedelta(seconds=float(os.environ.get(COLLECTIVE_TIMEOUT_ENV, COLLECTIVE_TIMEOUT_S)))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)


def main(spec_path: Path) -> int:
    spec = json.loads(spec_path.read_text())
    rank, folder = int(os.environ.get("RANK", "0")), spec_path.parent
    (folder / f"rank{rank}.pid").write_text(str(os.getpid()))
    stacks = (folder / f"rank{rank}.stacks").open("w")
    faulthandler.enable(file=stacks)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    if "RANK" in os.environ:
        join_group()
    node = int(os.environ["REPLICATED_CKPT_TEST_NODE"])
    context = Context(rank, int(os.environ.get("WORLD_SIZE", "1")), node, [Path(root) for root in spec["roots"]])
    report: dict[str, Any] = {"values": [], "warnings": [], "failure": None}
    try:
        for call in spec["calls"]:
            value, ours = run(call, context)
            report["values"].append(value)
            report["warnings"].append(ours)
    except BaseException:  # CheckpointException is not a subclass of Exception.
        report["failure"] = f"step {len(report['values'])} ({call['function']}):\n{traceback.format_exc()}"
        raise
    finally:
        written = folder / f"rank{rank}.json.part"  # A rank that is killed meanwhile has written nothing.
        written.write_text(json.dumps(report, indent=1))
        written.rename(folder / f"rank{rank}.json")
        if spec["quick_exit"]:
            exit_quickly(is_failed=report["failure"] is not None)
    if dist.is_initialized() and not context.leaves_work_behind:
        end_group()
        time.sleep(GLOO_SETTLE_S)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
