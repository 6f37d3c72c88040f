"""Steps: saves with one planner that caches plans, with changes, loads and failures in between."""

import hashlib
import http.client
import os
import pickle
import sys
import time
import warnings
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, SavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlan, WriteItem

from replicated_ckpt import CachedSavePlanner, RankStatePlanner
from replicated_ckpt.agent.state.endpoint import read_endpoint
from replicated_ckpt.dcp.c10d.watched_group import WatchedGroup
from replicated_ckpt.stores.peer.client import AgentClient
from tests.harness.cluster import Digests
from tests.steps.context import Context
from tests.steps.state import build_all, digests_of, failure, load


class BreakingPlanner(CachedSavePlanner):
    """Raises while the shard is written, if told to."""

    breaks = False

    def resolve_data(self, write_item: WriteItem) -> Any:
        if self.breaks:
            raise RuntimeError("this rank breaks while it writes")
        return super().resolve_data(write_item)


def save_again_and_again(context: Context, saves: list[list[str]], breaks_at: int, forgets_at: int) -> dict[str, Any]:
    """Saves the kinds of each of `saves` as step-<n>, with loads in between. Rank 1 fails in the save `breaks_at`.

    Before `forgets_at`, rank 0 gets a new planner without a cache, and that save is repeated. Returns the digests of
    everything saved, by id, and the errors.
    """
    own = BreakingPlanner()
    planner: SavePlanner = own
    writer = context.writer()
    digests: dict[str, Digests] = {}
    raised: list[dict[str, Any]] = []
    for index, kinds in enumerate(saves):
        states = build_all(context, kinds, seed=index)
        own.breaks = index == breaks_at and context.rank == 1
        if index == forgets_at and context.rank == 0:
            planner = own = BreakingPlanner()
        for _ in range(2):
            try:
                dcp.save(dict(states), checkpoint_id=f"step-{index}", storage_writer=writer, planner=planner)
            except CheckpointException as error:
                raised.append({"save": index, **failure(error)})
                own.breaks = False
            else:
                break
        digests[f"step-{index}"] = digests_of(states)
        load(context, kinds, f"step-{index}")
    return {"digests": digests, "raised": raised}


def count_exchanged(context: Context, times: int, items: int) -> dict[str, Any]:
    """Saves `items` tensors of each rank repeatedly. Returns the collectives of each save, and those after planning.

    Also digests of the metadata that `dcp.save` returns, and of the expected metadata.
    """
    state = {f"{context.rank}.{n}": torch.zeros(4) for n in range(items)}
    writer, planner = context.writer(), CachedSavePlanner()
    saves, returned = [], []
    for number in range(times):
        calls: list[tuple[str, int]] = []
        with mock.patch.multiple(WatchedGroup, **{name: _counted(name, calls) for name in _COLLECTIVES}):
            found = dcp.save(state, checkpoint_id=f"step-{number}", storage_writer=writer, planner=planner)
        names = [name for name, _ in calls]
        sent = sum(size for _, size in calls[names.index("scatter_object") + 1 :])
        saves.append({"calls": names, "sent": sent})
        assert found.storage_meta is not None
        assert found.storage_meta.checkpoint_id == f"step-{number}"
        returned.append(_digest_of(found))
    stock = dcp.FileSystemReader(context.root / "step-0").read_metadata()
    return {"saves": saves, "returned": returned, "wanted": _digest_of(stock)}


class LookingPlanner(DefaultLoadPlanner):
    """A planner that reads all ranks' requests, like one that makes ranks read in turns."""

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        self.looked_at = [len(list(plan.items)) for plan in global_plan]
        return global_plan


_LOAD_PLANNERS = {"stock": DefaultLoadPlanner, "ours": RankStatePlanner, "looks": LookingPlanner}


def save_numbered(context: Context, checkpoint_id: str, items: int) -> None:
    """Rank 0 saves `items` tensors, each filled with its number."""
    state = {f"tensor.{number}": torch.full((4,), number) for number in range(items)}
    dcp.save(state, checkpoint_id=checkpoint_id, storage_writer=context.writer())


def count_loaded(context: Context, checkpoint_id: str, parts: list[list[int]], planners: list[str]) -> dict[str, Any]:
    """Loads on each rank the numbered tensors of its part. Returns the bytes sent until all had planned, and the
    warnings.
    """
    state = {f"tensor.{number}": torch.full((4,), -1) for number in range(*parts[context.rank])}
    planner = _LOAD_PLANNERS[planners[context.rank]]()
    calls: list[tuple[str, int]] = []
    with (
        mock.patch.multiple(WatchedGroup, **{name: _counted(name, calls) for name in _COLLECTIVES}),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        try:
            dcp.load(state, checkpoint_id=checkpoint_id, storage_reader=context.reader(), planner=planner)
        except CheckpointException as error:
            return failure(error)
    assert all(torch.equal(tensor, torch.full((4,), int(name[7:]))) for name, tensor in state.items())
    planning = calls[: [name for name, _ in calls].index("scatter_object") + 1]
    warned = [str(one.message) for one in caught if "saved entries" in str(one.message)]
    return {"sent": planning, "warned": warned, "looked_at": getattr(planner, "looked_at", [])}


_COLLECTIVES = ("gather_object", "scatter_object", "broadcast_object")


def _counted(name: str, calls: list[tuple[str, int]]) -> Any:
    function = getattr(WatchedGroup, name)

    def counted(group: WatchedGroup, sent: Any) -> Any:
        calls.append((name, len(pickle.dumps(sent))))
        return function(group, sent)

    return counted


def _digest_of(metadata: Any) -> str:
    parts = [sorted((repr(key), repr(value)) for key, value in part.items()) for part in _parts(metadata)]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _parts(metadata: Any) -> list[dict[Any, Any]]:
    """The metadata without strides, which `.metadata` leaves out if they are redundant."""
    entries = metadata.state_dict_metadata.items()
    described = {name: (entry.size, entry.chunks, entry.properties.dtype) for name, entry in entries}
    return [described, metadata.storage_data, metadata.planner_data]


def save_with_metadata_damaged(context: Context, kinds: list[str]) -> dict[str, list[int]]:
    """Saves after the last `.metadata` of node 1 was damaged, and after it was repaired. Returns how often it was
    fetched and sent each time.
    """
    writer, found = context.writer(), {}
    last = "step-0"
    dcp.save(dict(build_all(context, kinds, 0)), checkpoint_id=last, storage_writer=writer)
    for seed, how in enumerate(["damaged", "intact"]):
        dist.barrier()
        if context.rank == 1 and how == "damaged":
            _await_rest(context)
            path = context.root / last / ".metadata"
            path.write_bytes(path.read_bytes()[:-1] + b"x")
        dist.barrier()
        asked: list[str] = []
        last = f"step-{how}"
        with mock.patch.object(http.client.HTTPConnection, "putrequest", _noting(asked)):
            dcp.save(dict(build_all(context, kinds, seed)), checkpoint_id=last, storage_writer=writer)
        found[how] = [sum(end in one for one in asked) for end in ("/pull", "/.metadata")]
    return found


def _await_rest(context: Context) -> None:
    """Waits until this node's agent is idle after a save: a busy one would repair the damage."""
    endpoint = read_endpoint(context.root / ".agent")
    assert endpoint is not None
    with AgentClient(endpoint.local_address()) as agent:
        while agent.call("GET", "/v1/status")["restoring"]:
            time.sleep(0.05)


def _noting(asked: list[str]) -> Any:
    ask = http.client.HTTPConnection.putrequest

    def note(connection: http.client.HTTPConnection, method: str, url: str, *args: Any, **kwargs: Any) -> None:
        asked.append(f"{method} {url}")
        ask(connection, method, url, *args, **kwargs)

    return note


def count_metadata_opened(context: Context, kinds: list[str], checkpoint_ids: list[str]) -> list[int]:
    """How often this rank opens a `.metadata` in a load of each checkpoint."""
    opened: list[str] = []

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).rpartition(os.sep)[2] == ".metadata":
            opened.append(str(arguments[0]))

    sys.addaudithook(hook)
    found = []
    for checkpoint_id in checkpoint_ids:
        opened.clear()
        load(context, kinds, checkpoint_id)
        found.append(len(opened))
    return found
