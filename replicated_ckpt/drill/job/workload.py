"""The drill's network and its FashionMNIST batches. torch only, no checkpointing."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

CLASSES = 10
SIDE = 28
LEARNING_RATE = 1e-3


class ConvNet(nn.Module):
    """Two convolutions and two linear layers: [batch, 1, 28, 28] float images to [batch, 10] logits."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.hidden = nn.Linear(2 * width * (SIDE // 4) ** 2, 16 * width)
        self.output = nn.Linear(16 * width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of a batch."""
        maps = functional.max_pool2d(functional.relu(self.conv1(images)), 2)
        maps = functional.max_pool2d(functional.relu(self.conv2(maps)), 2)
        logits: Tensor = self.output(functional.relu(self.hidden(maps.flatten(1))))
        return logits


def build(width: int, *, seed: int, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Network and AdamW, sharded with FSDP2 over all ranks. A seed gives the same weights on any number of ranks."""
    torch.manual_seed(seed)
    model = ConvNet(width).to(device)
    fully_shard(model.hidden)
    fully_shard(model)
    # fused: one operation for all parameters. Each operation on a DTensor costs time, which would dominate here.
    return model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)


@dataclass(frozen=True, slots=True)
class Images:
    """Training data: `pixels` [n, 28, 28] uint8, `labels` [n] int64, and their source in one line."""

    pixels: Tensor
    labels: Tensor
    source: str

    def save(self, path: Path) -> None:
        """Writes a file for `load`."""
        torch.save({"pixels": self.pixels, "labels": self.labels, "source": self.source}, path)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Maps a file of `save` into memory, so that only used pages are read."""
        return cls(**torch.load(path, mmap=True, weights_only=True))

    def batch(self, step: int, *, global_batch: int, seed: int) -> tuple[Tensor, Tensor]:
        """This rank's share of a step's batch: float images and labels.

        The whole batch depends only on seed, step and size, so any number of ranks trains on the same data.
        `global_batch` must be a multiple of the world size.
        """
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        chosen = torch.randint(len(self.labels), (global_batch,), generator=generator)
        mine = chosen.chunk(dist.get_world_size())[dist.get_rank()]
        return self.pixels[mine].unsqueeze(1).float() / 255, self.labels[mine]


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor) -> float:
    """One optimizer step on this rank's share. Returns the loss averaged over all ranks, the same on each."""
    device = next(model.parameters()).device
    loss = functional.cross_entropy(model(images.to(device)), labels.to(device))
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return float(mean) / dist.get_world_size()
