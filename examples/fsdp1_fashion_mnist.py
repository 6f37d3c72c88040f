"""FSDP1 with CPU offload and mixed precision on FashionMNIST, with full or sharded state dicts. Any node may be lost.

`<-` marks the lines that differ from the program for stock DCP in examples/stock.
"""

import argparse
import functools
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817 - its usual name
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from replicated_ckpt import ReplicatedReader, ReplicatedWriter  # <-

# With cpu_offload, rank 0 alone gets the full state dict, in host memory. Without a GPU, FSDP1 of torch 2.13 frees the
# offloaded tensors. So every rank gets the full state dict there, and `AppState` keeps rank 0's.
FULL = StateDictOptions(full_state_dict=True, cpu_offload=torch.cuda.is_available(), broadcast_from_rank0=True)
SHARDED = StateDictOptions()


class Net(nn.Module):
    """Two convolution stacks and two linear stacks."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.conv2 = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.linear1 = nn.Sequential(nn.Flatten(), nn.Linear(16 * 7 * 7, 128), nn.ReLU())
        self.linear2 = nn.Sequential(nn.Linear(128, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.linear2(self.linear1(self.conv2(self.conv1(images))))
        return logits


class AppState(Stateful):
    """Model, optimizer and scheduler, as DCP's tutorial wraps them."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: StepLR, options: Any) -> None:
        self.model, self.optimizer, self.scheduler, self.options = model, optimizer, scheduler, options

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer, options=self.options)
        if self.options.full_state_dict and dist.get_rank() != 0:
            model, optimizer = {}, {}  # as with cpu_offload
        return {"model": model, "optimizer": optimizer, "scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # Not set_state_dict: with torch 2.13 a rank whose model_state_dict is empty skips the broadcast of the model, and
        # rank 0 waits for it forever. Here all other ranks have an empty one.
        set_model_state_dict(self.model, state_dict["model"], options=self.options)
        set_optimizer_state_dict(self.model, self.optimizer, state_dict["optimizer"], options=self.options)
        self.scheduler.load_state_dict(state_dict["scheduler"])


def build(device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer, StepLR]:
    """The model, sharded by FSDP1, with Adam and StepLR."""
    torch.manual_seed(7)
    model = FSDP(
        Net(),
        auto_wrap_policy=functools.partial(size_based_auto_wrap_policy, min_num_params=20_000),
        cpu_offload=CPUOffload(offload_params=device.type == "cuda"),  # pinned memory needs a GPU
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        device_id=device,
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return model, optimizer, StepLR(optimizer, step_size=4, gamma=0.5)


def train_epoch(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Any], device: Any) -> float:
    """One pass over this rank's share. Returns the loss, averaged over steps and ranks."""
    total = torch.zeros(1, device=device)
    for images, labels in loader:
        loss = nn.functional.cross_entropy(model(images.to(device)).float(), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach()
    dist.all_reduce(total)
    return float(total) / len(loader) / dist.get_world_size()


def train(arguments: argparse.Namespace, device: torch.device) -> None:
    """Trains from the newest checkpoint to `--epochs`, and saves every fifth epoch."""
    dataset = dataset_of(arguments)
    sampler: DistributedSampler[Any] = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=12, sampler=sampler)
    model, optimizer, scheduler = build(device)
    app = AppState(model, optimizer, scheduler, SHARDED if arguments.sharded else FULL)
    state = {"app": app}
    writer, reader = ReplicatedWriter(arguments.root), ReplicatedReader(arguments.root)  # <-

    newest = reader.latest()  # <- was: if os.path.exists(checkpoint_dir), which differs by node
    if newest is not None:
        dcp.load(state, checkpoint_id=newest, storage_reader=reader)  # <-
        say(f"resuming from {newest} at epoch {scheduler.last_epoch}")
    for epoch in range(scheduler.last_epoch, arguments.epochs):
        sampler.set_epoch(epoch)
        loss = train_epoch(model, optimizer, loader, device)
        scheduler.step()
        say(f"epoch {epoch}: loss {loss:.9g}, next rate {scheduler.get_last_lr()[0]:g}")
        if scheduler.last_epoch % 5 == 0:
            dcp.save(state, checkpoint_id=f"epoch-{scheduler.last_epoch}", storage_writer=writer)  # <-
    if arguments.model_file:
        one_file_per_node(model, Path(f"{arguments.root}-model.pth"))


def one_file_per_node(model: nn.Module, path: Path) -> None:
    """Writes the whole model into one file on every node. Then each rank loads its shards back from its node's file."""
    options = StateDictOptions(full_state_dict=True)  # without cpu_offload, so that every rank gets the model
    whole = {name: value.cpu() for name, value in get_model_state_dict(model, options=options).items()}
    if os.environ["LOCAL_RANK"] == "0":
        torch.save(whole, path)
    dist.barrier()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    again = torch.load(path, mmap=True, weights_only=True)
    set_model_state_dict(model, again, options=options)
    after = get_model_state_dict(model, options=options)
    same = all(torch.equal(after[name].cpu(), whole[name]) for name in whole)
    say(f"model.pth: {len(whole)} tensors, {'the same' if same else 'NOT THE SAME'} when loaded back")


def dataset_of(arguments: argparse.Namespace) -> Dataset[Any]:
    """FashionMNIST from `--data`, a folder in torchvision's layout; else random images."""
    if arguments.data is not None:
        from torchvision import datasets, transforms

        return datasets.FashionMNIST(arguments.data, transform=transforms.ToTensor())  # type: ignore[no-any-return]
    generator = torch.Generator().manual_seed(7)
    pixels = torch.rand(192, 1, 28, 28, generator=generator)
    return TensorDataset(pixels, torch.randint(10, (192,), generator=generator))


def say(line: str) -> None:
    """Prints on rank 0 alone."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def main() -> None:
    """One rank, started by torchrun."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="this node's store: a directory on a node-local disk")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--sharded", action="store_true", help="save what each rank holds, instead of all on rank 0")
    parser.add_argument("--model-file", action="store_true", help="at the end write ROOT-model.pth on every node")
    parser.add_argument("--data", type=Path, help="folder with FashionMNIST/raw (default: random images)")
    arguments = parser.parse_args()
    use_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if use_gpu else "cpu")
    if use_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if use_gpu else "gloo")
    try:
        train(arguments, device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
