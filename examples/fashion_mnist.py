"""Train a small network on FashionMNIST under torchrun, and resume after the loss of a node. See examples/README.md."""

import argparse
import gzip
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from replicated_ckpt import ReplicatedReader, ReplicatedWriter

SEED = 7
DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # package dataset-fashion-mnist


class Net(nn.Module):
    """Two convolutions and two linear layers."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.hidden = nn.Linear(2 * width * 49, 16 * width)
        self.output = nn.Linear(16 * width, 10)

    def forward(self, images: Tensor) -> Tensor:
        maps = functional.max_pool2d(functional.relu(self.conv1(images)), 2)
        maps = functional.max_pool2d(functional.relu(self.conv2(maps)), 2)
        logits: Tensor = self.output(functional.relu(self.hidden(maps.flatten(1))))
        return logits


def build(device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Network and AdamW, sharded with FSDP2 over all ranks; the same weights on any number of ranks."""
    torch.manual_seed(SEED)
    model = Net().to(device)
    fully_shard(model.hidden)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    """The content of a checkpoint: sharded model and optimizer, and the step."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optim": optimizer_state, "step": step}


def resume(model: nn.Module, optimizer: torch.optim.Optimizer, reader: ReplicatedReader) -> int:
    """Loads the newest checkpoint that survived, whatever number of ranks saved it. Returns its step."""
    newest = reader.latest()  # the same on every rank
    if newest is None:
        return 0
    state = state_of(model, optimizer, 0)
    dcp.load(state, checkpoint_id=newest, storage_reader=reader)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    step: int = state["step"]
    return step


def train(arguments: argparse.Namespace, device: torch.device) -> None:
    """Trains from the newest checkpoint to `--steps`, and saves every `--save-every` steps."""
    pixels, labels, source = load_images(arguments.data)
    model, optimizer = build(device)
    writer = ReplicatedWriter(arguments.root, copies=arguments.copies)
    step = resume(model, optimizer, ReplicatedReader(arguments.root))
    say(f"starting at step {step} on {dist.get_world_size()} ranks with {source}")
    while step < arguments.steps:
        mine = share_of_batch(step, arguments.batch * dist.get_world_size(), len(labels))
        loss = train_step(model, optimizer, pixels[mine].to(device), labels[mine].to(device))
        step += 1
        if step % arguments.save_every == 0:
            dcp.save(state_of(model, optimizer, step), checkpoint_id=f"step-{step}", storage_writer=writer)
            say(f"step {step}: loss {loss:.4f}, saved")


def share_of_batch(step: int, global_batch: int, count: int) -> Tensor:
    """Indices of this rank's images in a step. The whole batch depends only on the step and its size."""
    generator = torch.Generator().manual_seed(SEED * 1_000_003 + step)
    chosen = torch.randint(count, (global_batch,), generator=generator)
    return chosen.chunk(dist.get_world_size())[dist.get_rank()]


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, pixels: Tensor, labels: Tensor) -> float:
    """One optimizer step on this rank's share. Returns the loss averaged over all ranks."""
    loss = functional.cross_entropy(model(pixels.unsqueeze(1).float() / 255), labels)
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return float(mean) / dist.get_world_size()


def load_images(data: Path | None) -> tuple[Tensor, Tensor, str]:
    """Pixels [n, 28, 28], labels [n], and their source: `--data`, else Debian's package, else random images."""
    for folder in (DEBIAN,) if data is None else (data / "FashionMNIST" / "raw", data / "raw", data):
        if any(folder.glob("train-images-idx3-ubyte*")) and any(folder.glob("train-labels-idx1-ubyte*")):
            pixels = read_idx(folder, "train-images-idx3-ubyte", 16).view(-1, 28, 28)
            return pixels, read_idx(folder, "train-labels-idx1-ubyte", 8).long(), f"FashionMNIST from {folder}"
    if data is not None:
        raise SystemExit(f"There is no FashionMNIST in {data}.")
    generator = torch.Generator().manual_seed(SEED)
    pixels = torch.randint(256, (2048, 28, 28), dtype=torch.uint8, generator=generator)
    return pixels, torch.randint(10, (2048,), generator=generator), "random images (no FashionMNIST here)"


def read_idx(folder: Path, name: str, head_bytes: int) -> Tensor:
    """The bytes after the header in a file of the data set, gzipped or not."""
    plain = folder / name
    raw = plain.read_bytes() if plain.exists() else gzip.decompress((folder / f"{name}.gz").read_bytes())
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8, offset=head_bytes)


def say(line: str) -> None:
    """Prints on rank 0 alone."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def main() -> None:
    """One rank, started by torchrun."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="this node's store: a directory on a node-local disk")
    parser.add_argument("--copies", type=int, default=2, help="copies of every shard, the local one included")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--batch", type=int, default=12, help="images per rank and step")
    parser.add_argument(
        "--data", type=Path, help="folder with FashionMNIST (default: Debian's package, else random images)"
    )
    arguments = parser.parse_args()
    use_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if use_gpu else "cpu")
    dist.init_process_group("cpu:gloo,cuda:nccl" if use_gpu else "gloo")
    try:
        train(arguments, device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
