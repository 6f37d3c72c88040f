"""SIGTERM may end this job at any time. It resumes bit for bit: model, optimizer, data position, random numbers."""

import argparse
import os
import pickle
import random
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, TensorDataset

from replicated_ckpt import CheckpointManager, Retention

SEED = 7
IMAGES = 480
BATCH = 12


class Training(Stateful):
    """Model and optimizer, sharded over all ranks."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )


class OfThisRank(Stateful):
    """State that differs by rank, under this rank's own key: under a shared key, DCP would save one rank's for all ranks.

    It is one pickled object, because a data loader's state has other entries before its first batch than after it.
    """

    def __init__(self, part: Any) -> None:
        self.part, self.key = part, f"rank-{dist.get_rank()}"

    def state_dict(self) -> dict[str, Any]:
        return {self.key: pickle.dumps(self.part.state_dict())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.part.load_state_dict(pickle.loads(state_dict[self.key]))


class RandomNumbers:
    """All generators that this program draws from."""

    def state_dict(self) -> dict[str, Any]:
        gpu = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
        return {"torch": torch.get_rng_state(), "gpu": gpu, "numpy": np.random.get_state(), "python": random.getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["torch"])
        if state["gpu"] is not None:
            torch.cuda.set_rng_state(state["gpu"])
        np.random.set_state(state["numpy"])
        random.setstate(state["python"])


class CountingLoader:
    """Replaces torchdata's StatefulDataLoader if that is not installed. Its state is the number of yielded batches."""

    def __init__(self, dataset: Dataset[Any], sampler: DistributedSampler[Any]) -> None:
        self.dataset, self.sampler, self.given = dataset, sampler, 0

    def __iter__(self) -> Iterator[Any]:
        left = list(self.sampler)[self.given * BATCH :]
        for batch in DataLoader(Subset(self.dataset, left), batch_size=BATCH, generator=torch.Generator()):
            self.given += 1
            yield batch
        self.given = 0

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


def loader_of(dataset: Dataset[Any], sampler: DistributedSampler[Any]) -> Any:
    """This rank's batches, from the position in the checkpoint on.

    The loader has its own generator: otherwise each new iterator draws from torch's, and a resumed job makes one more.
    """
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError:
        return CountingLoader(dataset, sampler)
    return StatefulDataLoader(dataset, batch_size=BATCH, sampler=sampler, generator=torch.Generator())


def train_step(training: Training, images: torch.Tensor, labels: torch.Tensor, device: torch.device) -> float:
    """Trains one step, which draws from every generator. Returns the loss, averaged over the ranks."""
    images = images + torch.from_numpy(np.random.normal(0, 0.1, images.shape)).float()
    if random.random() < 0.5:
        images = images.flip(-1)
    loss = nn.functional.cross_entropy(training.model(images.to(device)), labels.to(device))
    training.optimizer.zero_grad()
    loss.backward()
    training.optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return float(mean) / dist.get_world_size()


def train(arguments: argparse.Namespace, device: torch.device) -> None:
    """Trains from the newest checkpoint to `--steps`, or to the step after a rank gets SIGTERM."""
    torch.manual_seed(SEED)
    dataset = TensorDataset(torch.randn(IMAGES, 28, 28), torch.randint(10, (IMAGES,)))
    layers = [nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10)]
    model = fully_shard(nn.Sequential(*layers).to(device))
    training = Training(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(SEED + dist.get_rank())
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, seed=SEED)
    loader = loader_of(dataset, sampler)
    state = {"training": training, "loader": OfThisRank(loader), "random": OfThisRank(RandomNumbers()), "epoch": 0}

    with CheckpointManager(arguments.root, every=arguments.save_every, retention=Retention(keep_last=2)) as manager:
        step = manager.restore(state) or 0
        say(f"starting at step {step} with {type(loader).__name__}")
        for epoch in count(state["epoch"]):
            state["epoch"] = epoch
            sampler.set_epoch(epoch)
            for images, labels in loader:
                step += 1
                say(f"step {step}: loss {train_step(training, images, labels, device):.9g}")
                if manager.should_save(step):
                    manager.async_save(step, state)
                if manager.preempted or step >= arguments.steps:
                    say(f"leaving after step {step}")
                    return


def say(line: str) -> None:
    """Prints on rank 0 alone."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def main() -> None:
    """One rank, started by torchrun."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="this node's store: a directory on a node-local disk")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=10)
    arguments = parser.parse_args()
    use_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if use_gpu else "cpu")
    if use_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if use_gpu else "gloo")
    try:
        train(arguments, device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
