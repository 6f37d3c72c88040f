"""Train a small network on FashionMNIST under torchrun, and go on after any node was lost. See examples/README.md."""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from replicated_ckpt import ReplicatedReader, ReplicatedWriter
from replicated_ckpt.drill.dataset import fashion_mnist
from replicated_ckpt.drill.workload import Images, build, train_step

SEED = 7
WIDTH = 32


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    """What a checkpoint holds: sharded model and optimizer, and how far we are."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optim": optimizer_state, "step": step}


def resume(model: nn.Module, optimizer: torch.optim.Optimizer, reader: ReplicatedReader) -> int:
    """Load the newest checkpoint that survived, whatever the world looked like that saved it. Returns its step."""
    newest = reader.latest()  # the same on every rank
    if newest is None:
        return 0
    state = state_of(model, optimizer, 0)
    dcp.load(state, checkpoint_id=newest, storage_reader=reader)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    step: int = state["step"]
    return step


def train(arguments: argparse.Namespace, images: Images, device: torch.device) -> None:
    """From wherever we are to `--steps`, with a checkpoint every `--save-every` steps."""
    model, optimizer = build(WIDTH, seed=SEED, device=device)
    # overwrite: after a loss beyond repair we may pass a step again that was saved before.
    writer = ReplicatedWriter(arguments.root, copies=arguments.copies, overwrite=True)
    step = resume(model, optimizer, ReplicatedReader(arguments.root))
    say(f"starting at step {step} on {dist.get_world_size()} ranks with {images.source}")
    while step < arguments.steps:
        batch, labels = images.batch(step, global_batch=arguments.batch * dist.get_world_size(), seed=SEED)
        loss = train_step(model, optimizer, batch, labels)
        step += 1
        if step % arguments.save_every == 0:
            dcp.save(state_of(model, optimizer, step), checkpoint_id=f"step-{step}", storage_writer=writer)
            say(f"step {step}: loss {loss:.4f}, saved")


def images_in_turn(data: Path | None) -> Images:
    """The data set, a node's first rank first: if it must be downloaded, one rank does."""
    local_rank = int(os.environ["LOCAL_RANK"])
    if local_rank == 0:
        images = fashion_mnist(data)
    dist.barrier()
    if local_rank != 0:
        images = fashion_mnist(data)
    return images


def say(line: str) -> None:
    """Print once, not once per rank."""
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
    parser.add_argument("--data", type=Path, help="folder with FashionMNIST (default: Debian's package, else download)")
    arguments = parser.parse_args()
    use_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if use_gpu else "cpu")
    dist.init_process_group("cpu:gloo,cuda:nccl" if use_gpu else "gloo")
    try:
        train(arguments, images_in_turn(arguments.data), device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
