"""Steps whose state lies on a device that all ranks share. It is saved in each way, overwritten once allowed, and
loaded.
"""

import os
import signal
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tests.harness.cluster import Digests
from tests.steps.async_saves import spoil
from tests.steps.context import Context
from tests.steps.states import digest

_ROWS, _COLUMNS = 8_192, 257
_BUSY_CYCLES = 500_000_000
"""Of a GPU, some 0.3 s: a copy that nothing waits for is not made by then."""
_TIMEOUT_S = 60.0


def build(context: Context, seed: int, device: str) -> dict[str, Any]:
    """A state with shards of this rank, and with values that all ranks have: views of one storage, several dtypes, some
    on the host.
    """
    own = torch.Generator().manual_seed(seed * 100 + context.rank + 1)
    alike = torch.Generator().manual_seed(seed)
    mesh = init_device_mesh(device, (context.world_size,))
    rows = torch.randn(_ROWS, _COLUMNS, generator=own).to(device)
    table = torch.randn(64, 33, generator=alike).to(device)
    return {
        "sharded": DTensor.from_local(rows, mesh, [Shard(0)], run_check=False),
        "table": table,
        "turned": table.t(),
        "part": table[3:9, ::2],
        "short": table.bfloat16(),
        "truth": table > 0,
        "scalar": torch.tensor(float(seed), device=device),
        "empty": torch.empty(0, 3, device=device),
        "on_host": torch.randn(9, generator=alike),
        "step": seed,
    }


def save(context: Context, ways: list[str], device: str) -> list[Digests]:
    """Saves once in each way, as step-0 and so on, while the device is busy. Returns the digests at each call."""
    saved = []
    for seed, way in enumerate(ways):
        state = build(context, seed, device)
        saved.append(_local_digests(state))
        writer = context.writer(overlap=way == "overlapped")
        if device == "cuda":
            torch.cuda._sleep(_BUSY_CYCLES)  # type: ignore[no-untyped-call]
        if way == "sync":
            dcp.save(state, checkpoint_id=f"step-{seed}", storage_writer=writer)
            continue
        future = dcp.async_save(state, checkpoint_id=f"step-{seed}", storage_writer=writer)
        assert isinstance(future, Future)
        if way == "overlapped":
            if device == "cuda":
                assert not torch.cuda.current_stream().query(), "async_save has waited for the device"
            writer.hold_until_copied()
        spoil(state)
        future.result(_TIMEOUT_S)
    return saved


def save_and_die(context: Context, device: str) -> None:
    """Every trainer is killed once an overlapped save is acknowledged."""
    writer = context.writer(overlap=True)
    future = dcp.async_save(build(context, 0, device), checkpoint_id="step-0", storage_writer=writer)
    assert isinstance(future, Future)
    future.result(_TIMEOUT_S)
    os.kill(os.getpid(), signal.SIGKILL)


def load(context: Context, seed: int, device: str) -> Digests:
    """Loads step-SEED into other values on the device. Returns the digests of the loaded values."""
    state = build(context, seed + 50, device)
    dcp.load(state, checkpoint_id=f"step-{seed}", storage_reader=context.reader())
    return _local_digests(state)


def wanted(context: Context, seed: int, device: str) -> Digests:
    """The digests that `load` of that step must return."""
    return _local_digests(build(context, seed, device))


def _local_digests(state: dict[str, Any]) -> Digests:
    return {name: digest(value.to_local() if isinstance(value, DTensor) else value) for name, value in state.items()}
