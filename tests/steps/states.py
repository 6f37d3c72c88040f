"""States to save: one builder for each kind of state that DCP takes, and a digest of every value.

A digest covers whole values, so it does not depend on the world. Two states with equal digests are equal bit for bit.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.harness.cluster import Digests

StateDict = dict[str, Any]


@dataclass(frozen=True)
class Schedule:
    """An object that DCP can only pickle."""

    warmup_steps: int
    rates: tuple[float, ...]


torch.serialization.add_safe_globals([Schedule])  # A load refuses all classes that were not allowed.


def digest(value: Any) -> str:
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if not isinstance(value, torch.Tensor):
        return f"{type(value).__name__} {value!r}"
    raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{value.dtype} {list(value.shape)} {hashlib.sha256(raw).hexdigest()}"


def digests(state: Any, prefix: str = "") -> Digests:
    """The digest of every leaf, by its dotted name."""
    if isinstance(state, Mapping):
        children = [(str(key), value) for key, value in state.items()]
    elif isinstance(state, list | tuple):
        children = [(str(index), value) for index, value in enumerate(cast("Sequence[Any]", state))]
    else:
        return {prefix.rstrip("."): digest(state)}
    found: Digests = {}
    for key, value in children:
        found |= digests(value, f"{prefix}{key}.")
    return found


class Model:
    """A small model and its AdamW, wrapped for some parallelism, through DCP's `Stateful`."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module], seed: int) -> None:
        torch.manual_seed(seed)
        layers = nn.Sequential(nn.Linear(17, 33), nn.ReLU(), nn.Linear(33, 29, bias=False), nn.Linear(29, 3))
        self.model = wrap(layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01 + seed / 1000)
        self.train_step(seed)

    def train_step(self, seed: int) -> None:
        inputs = torch.randn(8, 17, generator=torch.Generator().manual_seed(seed))
        self.model(inputs).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state_dict(self) -> StateDict:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: StateDict) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def digests(self) -> Digests:
        options = StateDictOptions(full_state_dict=True)
        model, optimizer = get_state_dict(self.model, self.optimizer, options=options)
        return digests({"model": model, "optimizer": optimizer})


class Values:
    """A state dict that DCP takes unchanged."""

    def __init__(self, values: StateDict) -> None:
        self.values = values

    def state_dict(self) -> StateDict:
        return self.values

    def load_state_dict(self, state: StateDict) -> None:
        self.values = state

    def digests(self) -> Digests:
        return digests(self.values)


def fsdp2(seed: int, rank: int, world_size: int) -> Model:
    def wrap(layers: nn.Module) -> nn.Module:
        mesh = init_device_mesh("cpu", (world_size,))
        for layer in layers.children():
            fully_shard(layer, mesh=mesh)
        return cast("nn.Module", fully_shard(layers, mesh=mesh))

    return Model(wrap, seed)


def hsdp(seed: int, rank: int, world_size: int) -> Model:
    """FSDP2 on a two-dimensional mesh: shards along rows, replicas along columns."""

    def wrap(layers: nn.Module) -> nn.Module:
        return cast("nn.Module", fully_shard(layers, mesh=grid_of(world_size)))

    return Model(wrap, seed)


def hsdp1(seed: int, rank: int, world_size: int) -> Model:
    """The same with FSDP1."""

    def wrap(layers: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(
            layers,
            device_id=torch.device("cpu"),
            use_orig_params=True,
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            device_mesh=grid_of(world_size),
        )

    return Model(wrap, seed)


def tensor_parallel(seed: int, rank: int, world_size: int) -> Model:
    """Two linear layers, divided over ranks by rows, then by columns."""
    return Model(lambda _: halved(init_device_mesh("cpu", (world_size,))), seed)


def two_dimensional(seed: int, rank: int, world_size: int) -> Model:
    """Tensor parallelism in one dimension of the mesh, and FSDP2 in the other. Both divide the same tensors."""

    def wrap(_: nn.Module) -> nn.Module:
        grid = grid_of(world_size)
        return cast("nn.Module", fully_shard(halved(grid["shard"]), mesh=grid["replicate"]))

    return Model(wrap, seed)


def halved(mesh: DeviceMesh) -> nn.Module:
    """Two layers in tensor parallelism, which needs sizes that the mesh divides."""
    layers = nn.Sequential(nn.Linear(17, 32), nn.ReLU(), nn.Linear(32, 16))
    return parallelize_module(layers, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def grid_of(world_size: int) -> DeviceMesh:
    """A mesh of two rows, or of one row if the world has an odd number of ranks, or two."""
    rows = 2 if world_size % 2 == 0 and world_size > 2 else 1
    return init_device_mesh("cpu", (rows, world_size // rows), mesh_dim_names=("replicate", "shard"))


def fsdp1(seed: int, rank: int, world_size: int) -> Model:
    device = torch.device("cpu")
    return Model(lambda layers: FullyShardedDataParallel(layers, device_id=device, use_orig_params=True), seed)


def ddp(seed: int, rank: int, world_size: int) -> Model:
    return Model(DistributedDataParallel, seed)


def unwrapped(seed: int, rank: int, world_size: int) -> Model:
    """The model of one process without a process group."""
    return Model(lambda layers: layers, seed)


def plain(seed: int, rank: int, world_size: int) -> Values:
    """Every dtype, shape and nesting that ever mattered, and values that are not tensors."""
    random = torch.Generator().manual_seed(seed)
    noise = torch.randn(31, 9, generator=random)
    tensors: StateDict = {
        str(dtype).removeprefix("torch."): (noise * 20).to(dtype)
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.bool)
    }
    tensors |= {
        "complex": torch.complex(noise, noise + 1),
        "transposed": noise.t(),
        "sliced": noise[::3, 1:8:2],
        "scalar": noise[0, 0].clone(),
        "empty": torch.empty(0, 5),
        "nan": torch.full((3,), float("nan")),
    }
    return Values(
        {
            "tensors": tensors,
            "nested": {
                "list": [noise + 2, {"deep": {"deeper": noise + 3}}],
                "step": 1000 + seed,
                "lr": 0.1,
                "none": None,
            },
            "objects": {"raw": bytes(range(256)) + bytes([seed % 256]), "schedule": Schedule(seed, (0.1, 0.2))},
        }
    )


def large(seed: int, rank: int, world_size: int) -> Values:
    """Tensors larger than any block, buffer or chunk, and not a multiple of any."""
    random = torch.Generator().manual_seed(seed)
    return Values({f"tensor{index}": torch.randn(1_700_003, generator=random) for index in range(3)})


def meshes(seed: int, rank: int, world_size: int) -> Values:
    """DTensors on one- and two-dimensional meshes, with sizes that no world divides."""
    random = torch.Generator().manual_seed(seed)
    flat = init_device_mesh("cpu", (world_size,))
    rows = 2 if world_size % 2 == 0 else 1
    grid = init_device_mesh("cpu", (rows, world_size // rows), mesh_dim_names=("replicate", "shard"))
    whole = [torch.randn(13, 7, generator=random) for _ in range(4)]
    return Values(
        {
            "rows": distribute_tensor(whole[0], flat, [Shard(0)]),
            "columns": distribute_tensor(whole[1], flat, [Shard(1)]),
            "hybrid": distribute_tensor(whole[2], grid, [Replicate(), Shard(0)]),
            "both": distribute_tensor(whole[3], grid, [Shard(0), Shard(1)]),
        }
    )


def own(seed: int, rank: int, world_size: int) -> Values:
    """Values that only this rank has."""
    return Values({f"rank{rank}": torch.arange(1000) * (seed + rank + 1)})


State = Model | Values
BUILDERS: dict[str, Callable[[int, int, int], State]] = {
    "fsdp2": fsdp2,
    "fsdp1": fsdp1,
    "hsdp": hsdp,
    "hsdp1": hsdp1,
    "tensor_parallel": tensor_parallel,
    "two_dimensional": two_dimensional,
    "ddp": ddp,
    "unwrapped": unwrapped,
    "plain": plain,
    "large": large,
    "meshes": meshes,
    "own": own,
}


def build(kind: str, seed: int, rank: int, world_size: int) -> State:
    return BUILDERS[kind](seed, rank, world_size)
