"""Asynchronous saves every few steps: trains without saves and with them, and prints the times of the steps."""

import argparse
import os
import time
from pathlib import Path
from statistics import median, quantiles

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

from replicated_ckpt import CheckpointManager, Retention

SEED = 7


def make_training(width: int, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer, sharded over all ranks."""
    torch.manual_seed(SEED)
    layers = [nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)]
    model = fully_shard(nn.Sequential(*layers).to(device))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    images, labels = torch.randn(64, 64, device=device), torch.randint(10, (64,), device=device)
    loss = nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if device.type == "cuda":
        torch.cuda.synchronize()


def train(arguments: argparse.Namespace, device: torch.device, manager: CheckpointManager | None) -> list[float]:
    """Trains `--steps` steps, with a save every `--save-every` steps if there is a manager. Returns the seconds of each."""
    model, optimizer = make_training(arguments.width, device)
    train_step(model, optimizer, device)  # the first step makes the optimizer's state
    seconds = []
    for step in range(1, arguments.steps + 1):
        began = time.perf_counter()
        train_step(model, optimizer, device)
        if manager is not None and manager.should_save(step):
            model_state, optimizer_state = get_state_dict(model, optimizer)
            manager.async_save(step, {"model": model_state, "optimizer": optimizer_state})
        seconds.append(time.perf_counter() - began)  # in a step with a save, includes the copy of the state
    return seconds


def report(how: str, seconds: list[float], save_every: int = 0) -> None:
    """Prints the times of steps with a save, and of the other steps, during which a save may run."""
    saving = [spent for step, spent in enumerate(seconds, 1) if save_every and step % save_every == 0]
    others = [spent for step, spent in enumerate(seconds, 1) if not save_every or step % save_every]
    slowest = quantiles(others, n=100, method="inclusive")[98]
    said = f"{how}: {1e3 * median(others):.1f} ms a step (median), {1e3 * slowest:.1f} ms (99 of 100)"
    if saving:
        said += f"; {1e3 * median(saving):.1f} ms a step that saves"
    if dist.get_rank() == 0:
        print(f"{said}; {sum(seconds):.2f} s in all", flush=True)


def run(arguments: argparse.Namespace, device: torch.device) -> None:
    """Trains without saves, then with saves."""
    report("without saves", train(arguments, device, None))
    how = {"every": arguments.save_every, "ack": arguments.ack, "retention": Retention(keep_last=2)}
    with CheckpointManager(arguments.root, **how) as manager:
        report(f'with ack="{arguments.ack}"', train(arguments, device, manager), arguments.save_every)
        manager.wait()
        newest = manager.latest_step()
    if dist.get_rank() == 0:
        print(f"newest checkpoint: step {newest}", flush=True)


def main() -> None:
    """One rank, started by torchrun."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="this node's store: a directory on a node-local disk")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--width", type=int, default=1024, help="of the hidden layers (1024: checkpoints of 14 MB)")
    parser.add_argument("--ack", default="peer", choices=["local", "peer-memory", "peer"])
    arguments = parser.parse_args()
    use_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if use_gpu else "cpu")
    if use_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if use_gpu else "gloo")
    try:
        run(arguments, device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
