"""States whose values follow from name and position, so that any rank of any world can verify its part."""

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

_PATTERN_WORDS = 1_048_573  # a prime, so that misplaced rows or tensors have wrong values
_BLOCKS, _BLOCKS_OF_LITTLE = 8, 2
_LITTLE_BYTES = 16 << 20
_SMALL_WORDS = 1024  # 4 KB
_BLOCK_BYTES_PER_WIDTH2 = 12 * 4 * 3  # 12 h^2 parameters in a block with two moments, 4 bytes each


@dataclass(frozen=True)
class Part:
    """This rank's part of one tensor as 32-bit words, and the position in the pattern of its expected values."""

    name: str
    words: torch.Tensor
    start: int
    """Where the part's pattern begins. Each training step moves it by one word."""
    is_frozen: bool = False

    def pieces(self, pattern: torch.Tensor, steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pieces of the part with their expected values after `steps` steps. The pieces share memory with both."""
        done, size = 0, self.words.numel()
        start = self.start if self.is_frozen else self.start + steps
        while done < size:
            at = (start + done) % _PATTERN_WORDS
            count = min(size - done, _PATTERN_WORDS - at)
            yield self.words[done : done + count], pattern[at : at + count]
            done += count


class State:
    """`values` is the state dict for DCP. Loads write into its tensors in place."""

    def __init__(self, values: dict[str, Any], rank: int, world_size: int) -> None:
        self.values = values
        self.parts = [_part(name, tensor, rank, world_size) for name, tensor in _tensors(values)]
        random = torch.Generator().manual_seed(1)
        pattern = torch.randint(-(2**31), 2**31 - 1, (_PATTERN_WORDS,), dtype=torch.int32, generator=random)
        self._steps = 0
        self._patterns = {part.words.device: pattern.to(part.words.device) for part in self.parts}
        self.fill()

    @property
    def device(self) -> torch.device:
        """The device of the largest tensor. An optimizer's step counts are always on the CPU."""
        return max((part.words for part in self.parts), key=torch.numel).device

    @property
    def size_bytes(self) -> int:
        return sum(part.words.nbytes for part in self.parts)

    def buffers(self) -> Iterator[memoryview]:
        """The bytes of this rank's tensors, without a copy."""
        for part in self.parts:
            yield part.words.numpy().view("uint8").data

    def local_tensors(self) -> dict[str, torch.Tensor]:
        """This rank's parts as plain tensors, for tools without support for DTensor."""
        return {part.name: part.words for part in self.parts}

    def train(self) -> None:
        """One step: every value changes, as with an optimizer. Otherwise a save would link the previous save's files."""
        self._steps += 1
        self.fill()

    def freeze(self, share: float) -> "State":
        """From now on about this share of the bytes does not change. Returns itself."""
        left = share * self.size_bytes
        for number, part in enumerate(self.parts):
            if part.words.nbytes <= left:
                left -= part.words.nbytes
                self.parts[number] = replace(part, is_frozen=True)
        return self

    def fill(self) -> None:
        for part in self.parts:
            for piece, wanted in part.pieces(self._patterns[part.words.device], self._steps):
                piece.copy_(wanted)

    def spoil(self) -> None:
        """Overwrites all saved values in memory."""
        for part in self.parts:
            part.words.zero_()

    def wrong(self) -> list[str]:
        """Names of the tensors with wrong values."""
        return [
            part.name
            for part in self.parts
            if not all(
                torch.equal(piece, wanted)
                for piece, wanted in part.pieces(self._patterns[part.words.device], self._steps)
            )
        ]


def _tensors(values: Any, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(values, torch.Tensor):
        yield prefix, values
    elif isinstance(values, dict):
        for key, value in values.items():
            yield from _tensors(value, f"{prefix}.{key}" if prefix else str(key))


def _part(name: str, tensor: torch.Tensor, rank: int, world_size: int) -> Part:
    """This rank's part. A DTensor must be sharded by rows over the last dimension of its mesh, as with FSDP2."""
    start = zlib.crc32(name.encode())
    if isinstance(tensor, DTensor):
        rows, mesh = tensor.shape[0], tensor.device_mesh
        rank, world_size = mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1)
        first = min(rank * -(-rows // world_size), rows)
        start += first * (tensor.numel() // rows)
        tensor = tensor.to_local()
    return Part(name, tensor.detach().reshape(-1).view(torch.int32), start)


def fsdp2(size_bytes: int, rank: int, world_size: int, device: str = "cpu") -> State:
    """A transformer's layers under `fully_shard` with AdamW's moments: about `size_bytes` over all ranks."""
    return _sharded(size_bytes, init_device_mesh(device, (world_size,)), rank, world_size, device)


def frozen(size_bytes: int, rank: int, world_size: int) -> State:
    """As `fsdp2`, but 95 % of the bytes do not change, as in a model with adapters."""
    return fsdp2(size_bytes, rank, world_size).freeze(0.95)


def hsdp(size_bytes: int, rank: int, world_size: int) -> State:
    """As `fsdp2`, but sharded over pairs of ranks and replicated in each pair. `size_bytes` does not count the
    replicas.
    """
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("replicate", "shard"))
    return _sharded(size_bytes, mesh, rank, world_size, "cpu")


def ddp(size_bytes: int, rank: int, world_size: int) -> State:
    """As `fsdp2`, but whole on every rank, as in DDP."""
    model = _layers(size_bytes).to_empty(device="cpu")
    optimizer = torch.optim.AdamW(model.parameters())
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return State({"model": model_state, "optimizer": optimizer_state}, rank, world_size)


def _layers(size_bytes: int) -> nn.Sequential:
    blocks = _BLOCKS if size_bytes >= _LITTLE_BYTES else _BLOCKS_OF_LITTLE
    width = max(8, round((size_bytes / blocks / _BLOCK_BYTES_PER_WIDTH2) ** 0.5) // 8 * 8)
    with torch.device("meta"):
        return nn.Sequential(*(_block(width) for _ in range(blocks)))


def _sharded(size_bytes: int, mesh: DeviceMesh, rank: int, world_size: int, device: str) -> State:
    model = _layers(size_bytes)
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device=device)
    optimizer = torch.optim.AdamW(model.parameters())
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return State({"model": model_state, "optimizer": optimizer_state}, rank, world_size)


def _block(width: int) -> nn.Module:
    return nn.Sequential(
        nn.LayerNorm(width),
        nn.Linear(width, 3 * width),
        nn.Linear(width, width),
        nn.LayerNorm(width),
        nn.Linear(width, 4 * width),
        nn.Linear(4 * width, width),
    )


def small(size_bytes: int, rank: int, world_size: int) -> State:
    """Tensors of 4 KB, each on one rank, with `size_bytes` over all ranks."""
    count = size_bytes // (4 * _SMALL_WORDS)
    own = range(rank, count, world_size)
    return State({f"tensor{index}": torch.empty(_SMALL_WORDS) for index in own}, rank, world_size)


def small_adamw(size_bytes: int, rank: int, world_size: int) -> State:
    """As `small`, with a third of the tensors in the model and two thirds in its optimizer."""
    count = size_bytes // (4 * _SMALL_WORDS)
    own: dict[str, dict[str, torch.Tensor]] = {"model": {}, "optimizer": {}}
    for index in range(rank, count, world_size):
        part = "optimizer" if index // world_size % 3 else "model"
        own[part][f"tensor{index}"] = torch.empty(_SMALL_WORDS)
    return State(own, rank, world_size)


def plain(size_bytes: int, rank: int, world_size: int) -> State:
    """Sixteen tensors of each rank's own, for tools without support for DTensor."""
    words = size_bytes // world_size // 16 // 4
    return State({f"rank{rank}.tensor{index}": torch.empty(words) for index in range(16)}, rank, world_size)


BUILDERS: dict[str, Callable[[int, int, int], State]] = {
    "fsdp2": fsdp2,
    "frozen": frozen,
    "fsdp2 on cuda": partial(fsdp2, device="cuda"),
    "small": small,
    "small adamw": small_adamw,
    "plain": plain,
    "ddp": ddp,
    "hsdp": hsdp,
}
