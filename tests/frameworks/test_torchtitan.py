"""torchtitan's checkpoint manager over our storage: after a node loss, a run ends as an undisturbed one."""

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from replicated_ckpt import ReplicatedReader
from replicated_ckpt.dcp.rank_state import rank_state
from tests.agent.agents import stop_agent, wait_for
from tests.frameworks.jobs import check_same, run_both
from tests.frameworks.running import require
from tests.steps.states import digests

pytestmark = [pytest.mark.multiprocess, pytest.mark.long, pytest.mark.timeout(900)]


@pytest.mark.parametrize("mode", ["disabled", "async", "async_with_pinned_mem"])
def test_torchtitan_resumes_after_a_node_loss(tmp_path: Path, mode: str) -> None:
    """Model, optimizer, schedule, data, step and each rank's generators are restored. Every node keeps two checkpoints."""
    require("torchtitan")
    with run_both("torchtitan_program.py", tmp_path, 7, ("--async-mode", mode)) as (undisturbed, disturbed):
        check_same(undisturbed, disturbed, ("step",), {"step": 7})
        for job in (undisturbed, disturbed):
            for node in (0, 1):  # agents, which outlive the ranks, remove the others
                root = job.root(node)
                wait_for(partial(keeps, root, {"step-10", "step-12"}), 45, f"two are kept in {root}")


def keeps(root: Path, names: set[str]) -> bool:
    return {path.name for path in root.glob("step-*")} == names


class Part:
    """A part of a job with a number as its state. torchtitan saves the state of a data loader for each rank."""

    def __init__(self, key: str) -> None:
        self.key, self.value = key, 0

    def state_dict(self) -> dict[str, Any]:
        return {self.key: torch.tensor(self.value)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = int(state_dict[self.key])


def built(directory: Path, trained: Part, model: nn.Module, rank: int = 0, **options: Any) -> Any:
    from replicated_ckpt.integrations.torchtitan import ReplicatedCheckpointManager

    config = ReplicatedCheckpointManager.Config(
        enable=True, root=str(directory / "root"), interval=1, copies=1, exclude_from_loading=["dataloader"]
    )
    parts = {"optimizers": Part("optimizer"), "lr_schedulers": Part("schedule"), **options}
    return config.build(
        dataloader=Part(f"dp_rank_{rank}"),
        model_parts=[model],
        states={"train_state": trained},
        sd_adapter=None,
        base_folder=str(directory / "dump"),
        **parts,
    )


def test_another_number_of_ranks_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank loads what two saved, with `exclude_from_loading=["dataloader"]`. Its random generators stay unchanged."""
    require("torchtitan")
    saved, loaded = Part("step"), Part("step")
    saved.value = 3
    with monkeypatch.context() as patch:
        patch.setattr(rank_state, "rank_and_world", lambda: (0, 2))
        manager = built(tmp_path, saved, nn.Linear(2, 2))
        manager.save(3, last_step=False)
        manager.close()
    manager = built(tmp_path, loaded, nn.Linear(2, 2))
    before = torch.get_rng_state()
    assert manager.load()
    manager.close()
    assert loaded.value == 3
    assert torch.equal(before, torch.get_rng_state())
    stop_agent(tmp_path / "root")


def test_a_parameter_without_a_gradient_stays_without_state(tmp_path: Path) -> None:
    """With torchtitan's optimizers, an unused head has no state after the load and is trained as without a restart."""
    require("torchtitan")
    from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

    options = {"lr": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.1}
    groups = [ParamGroupConfig(pattern=it, optimizer_name="AdamW", optimizer_kwargs=options) for it in ("bias", ".*")]
    jobs = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        heads = nn.ModuleDict({"used": nn.Linear(2, 2), "unused": nn.Linear(2, 2)})
        config = OptimizersContainer.Config(param_groups=groups, implementation="for-loop")
        jobs.append((heads, config.build(model_parts=[heads])))

    def train(heads: nn.ModuleDict, optimizers: Any, *names: str) -> None:
        for name in names:
            heads[name](torch.ones(2)).square().sum().backward()
        optimizers.step()
        optimizers.zero_grad()

    train(*jobs[0], "used")
    for (heads, optimizers), begins in zip(jobs, (False, True), strict=True):
        manager = built(tmp_path, Part("step"), heads, optimizers=optimizers)
        assert manager.load() == begins
        manager.save(1, last_step=False)
        manager.close()
    stop_agent(tmp_path / "root")
    for job in jobs:
        train(*job, "used", "unused")
    states = [(heads.state_dict(), optimizers.state_dict()) for heads, optimizers in jobs]
    assert digests(states[1]) == digests(states[0])


@pytest.mark.parametrize("has_folder", [False, True])
def test_a_fresh_start_looks_once_with_and_without_a_folder(tmp_path: Path, has_folder: bool) -> None:
    """All ranks agree on a fresh start once, whether or not torchtitan's own folder exists on a node."""
    require("torchtitan")
    from replicated_ckpt.integrations.torchtitan import ReplicatedCheckpointManager

    if has_folder:
        (tmp_path / "dump" / "checkpoint").mkdir(parents=True)
    manager = ReplicatedCheckpointManager.Config(enable=True, root=str(tmp_path / "root")).build(
        dataloader=None,
        model_parts=[nn.Linear(2, 2)],
        optimizers=None,
        lr_schedulers=None,
        states={},
        sd_adapter=None,
        base_folder=str(tmp_path / "dump"),
    )
    with mock.patch.object(ReplicatedReader, "find", return_value=None) as look:
        assert not manager.load()
    manager.close()
    assert look.call_count == 1
