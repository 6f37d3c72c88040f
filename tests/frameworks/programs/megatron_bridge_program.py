"""The calls that Megatron-Bridge's setup and training loop make on a checkpoint manager, on CPUs, where these do not
run.
"""

import argparse
import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

from tests.frameworks.programs import megatron_without_gpu

megatron_without_gpu.prepare()

from megatron.bridge.models.gpt_provider import GPTModelProvider  # noqa: E402
from megatron.bridge.training import checkpointing as bridge  # noqa: E402
from megatron.bridge.training.config import (  # noqa: E402
    CheckpointConfig,
    ConfigContainer,
    LoggerConfig,
    OptimizerConfig,
    SchedulerConfig,
    TokenizerConfig,
    TrainingConfig,
)
from megatron.bridge.training.setup import _should_load_checkpoint  # noqa: E402
from megatron.bridge.training.state import GlobalState  # noqa: E402
from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.module import MegatronModule  # noqa: E402

import replicated_ckpt.integrations.megatron_bridge  # noqa: E402

MANAGER = f"{replicated_ckpt.integrations.megatron_bridge.__name__}.ReplicatedCheckpointManager"


class Model(MegatronModule):
    """A Megatron module with FSDP2 instead of Megatron-FSDP, which needs CUDA."""

    def __init__(self) -> None:
        super().__init__(TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=1))
        self.layers = nn.Sequential(nn.Linear(16, 67), nn.Dropout(0.3), nn.ReLU(), nn.Linear(67, 1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layers(inputs)
        return outputs


class Optimizer:
    """Like Megatron's optimizer: the sharded state has DTensors under the parameters' names."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.adam = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def sharded_state_dict(self, model_state: Any, is_loading: bool = False, **_: Any) -> dict[str, Any]:
        return dict(get_optimizer_state_dict(self.model, self.adam))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.model, self.adam, state_dict)


def configure(root: Path) -> ConfigContainer:
    """A user's configuration. `custom_manager_class` is the only change."""
    checkpoint = CheckpointConfig(
        save=str(root),
        load=str(root),
        save_interval=2,
        most_recent_k=2,
        ckpt_format="fsdp_dtensor",
        custom_manager_class=MANAGER,
    )
    return ConfigContainer(
        train=TrainingConfig(train_iters=12, global_batch_size=16, micro_batch_size=4),
        model=GPTModelProvider(num_layers=1, hidden_size=16, num_attention_heads=1),
        optimizer=OptimizerConfig(use_distributed_optimizer=True),
        scheduler=SchedulerConfig(),
        dataset=None,
        logger=LoggerConfig(),
        tokenizer=TokenizerConfig(),
        checkpoint=checkpoint,
    )


def train(arguments: argparse.Namespace, out: Path) -> None:
    """Trains to step 12 and saves every second step."""
    state = GlobalState()
    cfg = state.cfg = configure(arguments.root)
    manager = bridge.create_checkpoint_manager(cfg.checkpoint)
    torch.manual_seed(1)
    model, random = Model(), tensor_parallel.get_cuda_rng_tracker()
    random.set_states({"default": torch.zeros(16, dtype=torch.uint8)})
    fully_shard(model)
    optimizer = Optimizer(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer.adam, T_max=20)
    if _should_load_checkpoint(cfg, manager):
        step, _ = manager.load(bridge.CheckpointLoadContext(state, [model], optimizer, schedule))
        assert step == state.train_state.step > 0
    while state.train_state.step < cfg.train.train_iters:
        step = state.train_state.step + 1
        generator = torch.Generator().manual_seed(1000 * state.train_state.consumed_train_samples + dist.get_rank())
        inputs = torch.randn(4, 16, generator=generator)
        loss = nn.functional.mse_loss(model(inputs), inputs.square().sum(dim=1, keepdim=True))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.adam.step()
        schedule.step()
        optimizer.adam.zero_grad()
        state.train_state.step = step
        state.train_state.consumed_train_samples += 16
        state.train_state.floating_point_operations_so_far += 64
        line = {"step": step, "loss": loss.item(), "lr": optimizer.adam.param_groups[0]["lr"]}
        write(out, {**line, "operations": float(state.train_state.floating_point_operations_so_far)})
        if step % cfg.checkpoint.save_interval == 0:
            operations = int(state.train_state.floating_point_operations_so_far)
            manager.save(bridge.CheckpointSaveContext(state, [model], optimizer, schedule, operations), None)
        manager.finalize_async_saves(state, blocking=False)
        if step == arguments.hold_at:
            os.kill(os.getpid(), signal.SIGSTOP)  # until the test kills it
    write(out, {"weights": [p.full_tensor().double().sum().item() for p in model.parameters()]})
    manager.finalize_async_saves(state, blocking=True, terminate=True)


def write(out: Path, line: dict[str, Any]) -> None:
    """Appends one line to this rank's file."""
    with out.open("a") as file:
        file.write(json.dumps(line) + "\n")


def main() -> None:
    """One rank, started by torchrun."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--hold-at", type=int, default=-1)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    init_num_microbatches_calculator(dist.get_rank(), None, 16, 4, dist.get_world_size())
    train(arguments, arguments.out / f"rank-{os.environ['RANK']}.jsonl")
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main()
