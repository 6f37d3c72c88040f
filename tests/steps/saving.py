"""Steps: unusual saves: with cached plans, in subgroups, with odd names, many in a row."""

import gc
import http.client
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader
from torch.distributed.checkpoint.planner import SavePlan

from replicated_ckpt import CachedSavePlanner, CheckpointManager, ReplicatedWriter, Retention
from replicated_ckpt.dcp import named_checkpoints
from replicated_ckpt.dcp.c10d.group_pool import acquire_group, agree_on_all
from replicated_ckpt.dcp.named_checkpoints import NamedCheckpoints
from replicated_ckpt.errors import ConfigInvalid, ReplicatedCkptError
from tests.harness.cluster import Digests
from tests.harness.processes import agent_of
from tests.steps.context import Context
from tests.steps.state import OTHER_SEED, build_all, digests_of, save_fails


def save_with_cached_plans(context: Context, kinds: list[str], checkpoint_ids: list[str]) -> list[Digests]:
    """One planner class that caches its plans, one writer, several saves of changing values."""
    saved = []
    for seed, checkpoint_id in enumerate(checkpoint_ids):
        states = build_all(context, kinds, seed)
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(dict(states), checkpoint_id=checkpoint_id, storage_writer=context.writer(), planner=planner)
        saved.append(digests_of(states))
    return saved


def save_by_many_writers(context: Context, kinds: list[str], checkpoint_ids: list[str]) -> list[Digests]:
    """Each save has its own writer, and begins as soon as it may. All saves but the last are in the background."""
    states = [build_all(context, kinds, seed) for seed in range(len(checkpoint_ids))]
    saved, futures = [digests_of(each) for each in states], []
    for state, name in zip(states[:-1], checkpoint_ids[:-1], strict=True):
        writer = ReplicatedWriter(context.root)
        futures.append(dcp.async_save(dict(state), checkpoint_id=name, storage_writer=writer))
    dcp.save(dict(states[-1]), checkpoint_id=checkpoint_ids[-1], storage_writer=ReplicatedWriter(context.root))
    for future in futures:
        future.result(timeout=60)  # type: ignore[union-attr]
    return saved


def save_keeping(context: Context, kinds: list[str], checkpoint_ids: list[str], keep_last: int) -> list[Digests]:
    """One writer with a retention policy, and several saves of changing values."""
    writer = ReplicatedWriter(context.root, retention=Retention(keep_last=keep_last))
    saved = []
    for seed, checkpoint_id in enumerate(checkpoint_ids):
        states = build_all(context, kinds, seed)
        dcp.save(dict(states), checkpoint_id=checkpoint_id, storage_writer=writer)
        saved.append(digests_of(states))
    return saved


def manage_steps(context: Context, steps: int) -> dict[str, Any]:
    """Saves some steps with a manager. Returns its lists of steps."""
    losses = [0.5, 0.25, 0.75]
    with CheckpointManager(context.root) as manager:
        for step in range(1, steps + 1):
            mine = {"loss": losses[step - 1]} if context.rank == 0 else {"loss": -1.0}
            manager.async_save(step, {"w": torch.full((64,), float(step))}, metrics=mine)
        found = {"w": torch.zeros(64)}
        best = manager.best_step("loss")
        manager.restore(found, best)
        return {
            "latest": manager.latest_step(),
            "all": list(manager.all_steps()),
            "best": best,
            "losses": [manager.notes(step).metrics["loss"] for step in manager.all_steps()],
            "restored": float(found["w"].mean()),
        }


def manage_unlike(context: Context, options: dict[str, Any]) -> list[str]:
    """The last rank creates managers with one different argument each. Returns each rank's error."""
    told = []
    for name, value in options.items():
        given: dict[str, Any] = {}
        if context.rank == context.world_size - 1:
            given[name] = tuple(value) if isinstance(value, list) else value
        with pytest.raises(ConfigInvalid) as raised:
            CheckpointManager(context.root, **given)
        told.append(raised.value.message)
    return told


def delete_steps(context: Context, steps: list[int]) -> list[Any]:
    """Deletes steps with a manager. Returns its results, and the remaining steps."""
    with CheckpointManager(context.root) as manager:
        return [[manager.delete(step) for step in steps], list(manager.all_steps())]


def count_threads_of_gloo(context: Context, closes_late: bool) -> dict[str, int]:
    """Numbers of gloo threads: before process groups are destroyed, afterwards, and after managers were closed while
    they are still referenced.

    Managers are closed before `destroy_process_group`, or after it.
    """

    def name_of(thread: Path) -> str:
        try:
            return thread.read_text()
        except (FileNotFoundError, ProcessLookupError):  # It has ended since it was listed.
            return ""

    def count() -> int:
        return sum(name_of(path).startswith("pt_gloo") for path in Path("/proc/self/task").glob("*/comm"))

    def close_all() -> None:
        for manager in managers:
            manager.close()

    managers: list[CheckpointManager | NamedCheckpoints] = []
    for step in range(2):
        manager = CheckpointManager(context.root)
        manager.async_save(step, {"w": torch.ones(64)})
        assert manager.latest_step() == step
        managers.append(manager)
    named = NamedCheckpoints(context.root)
    named.save_later("named", {"w": torch.ones(64)}).result()
    managers.append(named)
    found = {"before": count()}
    if not closes_late:
        close_all()
    dist.barrier()
    dist.destroy_process_group()
    found["destroyed"] = count()
    if closes_late:
        close_all()
    found["after"] = count()
    managers.clear()
    return found


def destroy_groups_behind_a_save(context: Context, ends_before: bool) -> str:
    """The error of a manager's `close` if the program has destroyed all groups, during the save of step 2 or after it."""
    reached, goes_on = threading.Event(), threading.Event()

    class Waiting(CachedSavePlanner):
        def create_local_plan(self) -> SavePlan:
            reached.set()
            assert goes_on.wait(60)
            return super().create_local_plan()

    with mock.patch.object(named_checkpoints, "CachedSavePlanner", Waiting):
        manager = CheckpointManager(context.root, preempt_on=())
    goes_on.set()
    manager.save(1, {"w": torch.ones(64)})
    if not ends_before:
        goes_on.clear()
    reached.clear()
    manager.async_save(2, {"w": torch.ones(64)})
    assert reached.wait(60)
    if ends_before:
        assert manager._in_flight is not None
        manager._in_flight[1].result(60)
    dist.barrier()
    dist.destroy_process_group()
    goes_on.set()
    try:
        manager.close()
    except ConfigInvalid as exc:
        return str(exc)
    return ""


def agree_where_one_breaks(context: Context) -> str:
    """All ranks run a step in which rank 1 fails with an error that is not the package's. Returns each rank's error."""
    pooled = acquire_group()
    assert pooled is not None

    def act() -> None:
        if context.rank == 1:
            raise OSError("it breaks on purpose")

    try:
        agree_on_all(pooled.group, act)
    except (OSError, ReplicatedCkptError) as exc:
        return f"{type(exc).__name__}: {exc}"
    finally:
        pooled.close()
    return "nothing"


def save_under_own_id(context: Context, kinds: list[str]) -> dict[str, Any]:
    """Every rank passes a different id, as if made from its own clock."""
    return save_fails(context, kinds, f"step-10-{context.rank}")


def save_with_other_ack(context: Context, kinds: list[str], checkpoint_id: str, acks: list[str]) -> dict[str, Any]:
    """Every rank passes its own `ack`."""
    return save_fails(context, kinds, checkpoint_id, ack=acks[context.rank])


def save_under_path(context: Context, kinds: list[str], checkpoint_id: str) -> Digests:
    """The id is the absolute path of the checkpoint under this node's root, as a `Path`."""
    states = build_all(context, kinds, 0)
    dcp.save(dict(states), checkpoint_id=context.root / checkpoint_id, storage_writer=context.writer())
    return digests_of(states)


def save_in_subgroup(
    context: Context, kinds: list[str], checkpoint_id: str, ranks: Sequence[int]
) -> dict[str, Any] | None:
    """Saves and loads within a group of some ranks. The others do nothing meanwhile."""
    group = dist.new_group(list(ranks))
    result = None
    if isinstance(group, dist.ProcessGroup) and context.rank in ranks:  # Torch returns no group to the others.
        states = build_all(context, kinds, 0)
        writer = ReplicatedWriter(context.root, process_group=group)
        dcp.save(dict(states), checkpoint_id=checkpoint_id, storage_writer=writer, process_group=group)
        loaded = build_all(context, kinds, OTHER_SEED)
        reader = context.reader(process_group=group)
        dcp.load(dict(loaded), checkpoint_id=checkpoint_id, storage_reader=reader, process_group=group)
        result = {"saved": digests_of(states), "loaded": digests_of(loaded)}
    dist.barrier()
    return result


def save_without_group(context: Context, kinds: list[str], checkpoint_id: str) -> Digests:
    """`no_dist=True` on one process."""
    states = build_all(context, kinds, 0)
    dcp.save(dict(states), checkpoint_id=checkpoint_id, storage_writer=context.writer(), no_dist=True)
    return digests_of(states)


def load_alone(context: Context, kinds: list[str], checkpoint_id: str, ranks: Sequence[int]) -> Digests | None:
    """`no_dist=True` on some ranks of a world, while the others do something else."""
    if context.rank not in ranks:
        return None
    states = build_all(context, kinds, OTHER_SEED)
    dcp.load(dict(states), checkpoint_id=checkpoint_id, storage_reader=context.reader(no_dist=True), no_dist=True)
    return digests_of(states)


def load_with_stock_torch(context: Context, kinds: list[str], checkpoint_id: str) -> Digests:
    """This node's directory, through torch's own reader."""
    states = build_all(context, kinds, OTHER_SEED)
    reader = FileSystemReader(context.root / checkpoint_id)
    dcp.load(dict(states), storage_reader=reader, no_dist=not dist.is_initialized())
    return digests_of(states)


def save_many(context: Context, count: int, measure_after: list[int]) -> list[dict[str, dict[str, int]]]:
    """`count` saves in a row with one writer. Returns the footprint of this rank and its agent after some of them."""
    footprints = []
    for index in range(count):
        state = {"weights": torch.full((50_000,), float(index)), "own": {f"rank{context.rank}": torch.tensor([index])}}
        dcp.save(state, checkpoint_id=f"step-{index}", storage_writer=context.writer())
        if index + 1 in measure_after:
            gc.collect()
            agent = agent_of(context.root)
            footprints.append({"rank": footprint(os.getpid()), "agent": resting_footprint(agent)})
    return footprints


def load_values(context: Context, checkpoint_ids: list[str]) -> list[float]:
    """The one value that fills the tensors of each checkpoint of `save_many`."""
    found = []
    for checkpoint_id in checkpoint_ids:
        state = {"weights": torch.zeros(50_000)}
        dcp.load(state, checkpoint_id=checkpoint_id, storage_reader=context.reader())
        assert state["weights"].min() == state["weights"].max()
        found.append(float(state["weights"][0]))
    return found


def resting_footprint(pid: int) -> dict[str, int]:
    """The smallest of several measurements: an agent's background work comes and goes, and leaks stay."""
    looks = []
    for _ in range(5):
        time.sleep(0.2)
        looks.append(footprint(pid))
    return {name: min(look[name] for look in looks) for name in looks[0]}


def footprint(pid: int) -> dict[str, int]:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return {
        "threads": int(status["Threads"]),
        "python_threads": threading.active_count() if pid == os.getpid() else 0,
        "fds": len(list(Path(f"/proc/{pid}/fd").iterdir())),
        "rss_kib": int(status["VmRSS"].split()[0]),
        "children": len(children),
    }


def count_messages(
    context: Context, /, kinds: list[str], checkpoint_id: str, times: int, **writer_options: Any
) -> dict[str, int]:
    """Saves repeatedly, with the number in place of `{}` in the id. Returns this rank's requests to agents in the last
    save.
    """
    counted: Counter[str] = Counter()
    ask = http.client.HTTPConnection.putrequest

    def count(connection: http.client.HTTPConnection, method: str, url: str, *args: Any, **how: Any) -> None:
        counted[f"{method} {re.sub('[0-9a-f]{32}', 'SAVE', url)}"] += 1
        ask(connection, method, url, *args, **how)

    with mock.patch.object(http.client.HTTPConnection, "putrequest", count):
        writer = context.writer(overwrite=True, **writer_options)
        for seed in range(times):
            counted.clear()
            dcp.save(
                dict(build_all(context, kinds, seed)), checkpoint_id=checkpoint_id.format(seed), storage_writer=writer
            )
    return dict(counted)
