"""Ray Train: workers save to their own node's disk. After the loss of a worker, the run resumes from the newest checkpoint.

Restored: model and optimizer. The data depends only on the step. Random generators are not restored.
"""

import argparse
import os
from pathlib import Path

import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig, get_context
from ray.train.torch import TorchTrainer
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard

from replicated_ckpt.integrations.ray import RayCheckpointManager, reported_step


class AppState(Stateful):
    """Model and optimizer, for DCP."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state_dict):
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state_dict["model"], optim_state_dict=state_dict["optim"]
        )


def loop(config: dict) -> None:
    """The loop of one worker. Ray makes the process group first, and calls this on all workers again after a loss."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = {"app": AppState(model, optimizer)}
    rank, world = get_context().get_world_rank(), get_context().get_world_size()
    root = os.path.expandvars(config["root"])  # with this node's environment
    with RayCheckpointManager(root, every=config["save_every"]) as manager:
        step = begin = manager.restore(state) or 0
        if rank == 0:
            print(f"starting at step {step} on {world} ranks", flush=True)
        while step < config["steps"]:
            if step == config["die_at"] and begin == 0 and rank == world - 1:
                print(f"rank {rank} dies after step {step}", flush=True)
                os._exit(1)  # the run must survive this
            generator = torch.Generator().manual_seed(step * world + rank)
            inputs = torch.randn(8, 16, generator=generator)
            loss = nn.functional.mse_loss(model(inputs), inputs.square().sum(dim=1, keepdim=True))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if manager.should_save(step):
                manager.save(step, state, metrics={"loss": loss.item()})
                if rank == 0:
                    print(f"step {step}: loss {loss.item():.4f}, saved", flush=True)


def main() -> None:
    """Starts the workers from the driver."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--root", required=True, help="each node's store: absolute, node-local; $VARIABLES are the node's"
    )
    parser.add_argument(
        "--storage", type=Path, required=True, help="Ray's bookkeeping: a directory that all nodes share"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--die-at", type=int, default=-1, help="the last worker dies after this step, once")
    arguments = parser.parse_args()
    trainer = TorchTrainer(
        loop,
        train_loop_config={
            "root": arguments.root,
            "steps": arguments.steps,
            "save_every": arguments.save_every,
            "die_at": arguments.die_at,
        },
        scaling_config=ScalingConfig(num_workers=arguments.workers, use_gpu=torch.cuda.is_available()),
        run_config=RunConfig(
            storage_path=str(arguments.storage.resolve()), failure_config=FailureConfig(max_failures=3)
        ),
    )
    result = trainer.fit()
    print(f"Ray knows of step {reported_step(result.checkpoint)}, loss {result.metrics['loss']:.4f}", flush=True)


if __name__ == "__main__":
    main()
