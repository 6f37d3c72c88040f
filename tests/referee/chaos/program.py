"""A user's training program, which ckpt-chaos kills and resumes: `--save stock`, `manager` or `manager-async`.

Each rank is a node with its own directory. Stock DCP needs one directory that all ranks reach.
"""

import argparse
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from replicated_ckpt import CheckpointManager

STEPS, EVERY = 10, 5
RANK = int(os.environ["RANK"])


class Job:
    """A model under DDP with its optimizer. Each step's batch depends only on the step and rank, so a resumed job
    repeats it.
    """

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.ddp = nn.parallel.DistributedDataParallel(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def train(self, step: int) -> None:
        batch = torch.randn(16, 8, generator=torch.Generator().manual_seed(1000 * step + RANK))
        self.optimizer.zero_grad()
        loss: torch.Tensor = nn.functional.mse_loss(self.ddp(batch), batch.sum(1, keepdim=True))
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        for parameter in self.model.parameters():  # AdamW makes its state in the first step
            if parameter not in self.optimizer.state:
                zeros = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                self.optimizer.state[parameter] = {"step": torch.tensor(0.0), **zeros}
        return {"model": self.model.state_dict(), "optim": self.optimizer.state_dict()}

    def take(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optim"])


def train_with_stock(out: Path) -> Job:
    """Writes one directory per save. Loads the highest number, as most programs do."""
    job, step = Job(), 0
    found = [int(path.name.removeprefix("step-")) for path in out.glob("step-*")]
    dist.barrier()
    if found:
        step = max(found)
        state = job.state()
        dcp.load(state, checkpoint_id=out / f"step-{step}")
        job.take(state)
    print(f"resumed from step {step}", flush=True)
    while step < STEPS:
        step += 1
        job.train(step)
        if step % EVERY == 0:
            dcp.save(job.state(), checkpoint_id=out / f"step-{step}")
    return job


def train_with_manager(out: Path, *, is_async: bool) -> Job:
    job = Job()
    with CheckpointManager(out / f"node-{RANK}", every=EVERY, domain=f"node-{RANK}") as manager:
        state = job.state()
        step = manager.restore(state) or 0
        job.take(state)
        print(f"resumed from step {step}", flush=True)
        while step < STEPS:
            step += 1
            job.train(step)
            if manager.should_save(step):
                (manager.async_save if is_async else manager.save)(step, job.state())
    return job


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", choices=["stock", "manager", "manager-async"], required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    if arguments.save == "stock":
        job = train_with_stock(arguments.out)
    else:
        job = train_with_manager(arguments.out, is_async=arguments.save == "manager-async")
    torch.save(job.model.state_dict(), arguments.out / f"final-{RANK}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
