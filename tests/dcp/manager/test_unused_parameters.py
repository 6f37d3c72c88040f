"""Parameters without optimizer state in the checkpoint, as they had no gradient before the save."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from replicated_ckpt import CheckpointManager
from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.cli.main import main
from replicated_ckpt.dcp.named_checkpoints import NamedCheckpoints
from replicated_ckpt.errors import ReplicatedCkptWarning
from replicated_ckpt.integrations.model_state import get_saved_state, get_wanted_state, set_loaded_state
from tests.steps.states import digests
from tests.steps.unused import Trained

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def opened(root: Path, **options: Any) -> CheckpointManager:
    return CheckpointManager(root, copies=1, **options)


def trained() -> Trained:
    """A job whose head `used` has made three steps."""
    made = Trained("alone", seed=1)
    for _ in range(3):
        made.train("used")
    return made


def train_on(one: Trained) -> None:
    """Trains the unused head, too, and later the frozen one."""
    one.train("used", "unused")
    one.model.requires_grad_()
    for _ in range(2):
        one.train("used", "unused", "frozen")


def test_training_continues_as_without_a_restart(root: Path) -> None:
    """After a restore, an unused and a frozen head that get gradients are updated bit for bit as in an uninterrupted
    run.
    """
    saved, loaded = trained(), Trained("alone", seed=2)
    with opened(root) as manager:
        manager.save(1, {"app": saved})
        assert manager.restore({"app": loaded}) == 1
        assert not any(loaded.optimizer.state[p] for n, p in loaded.model.named_parameters() if "heads.used" not in n)
        for each in (saved, loaded):
            train_on(each)
        assert loaded.digests() == saved.digests()
        manager.save(2, {"app": saved})  # now with the state of all heads
        again = Trained("alone", seed=3)
        again.model.requires_grad_()
        assert manager.restore({"app": again}) == 2
        assert again.digests() == saved.digests()
    assert main(["verify", "--root", str(root)]) == ExitCode.OK


def test_one_state_dict_loads_checkpoints_without_and_with_that_state(root: Path) -> None:
    """A plain state dict loads a checkpoint without a parameter's state, then one with that state."""
    later = trained()
    train_on(later)
    state, expected = Trained("alone", seed=2), digests(later.state_dict())
    train_on(state)  # so that its state dict has all keys
    plain = {"app": state.state_dict()}
    with opened(root) as manager:
        manager.save(1, {"app": trained().state_dict()})
        manager.save(2, {"app": later.state_dict()})
        manager.restore(plain, 1)
        assert not plain["app"]["optimizer"]["state"]["heads.unused.bias"]
        manager.restore(plain, 2)
    assert digests(plain["app"]) == expected


class Late(torch.optim.SGD):
    """From its third step on it has more state: a tensor like the parameter, its mean, a number, and a larger tensor."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for parameter in (
            parameter for group in self.param_groups for parameter in group["params"] if parameter.requires_grad
        ):
            state = self.state[parameter]
            state["calls"] = state.get("calls", torch.zeros(())) + 1
            if state["calls"] == 3:
                state |= {"slow": parameter.detach().clone(), "mean": parameter.detach().mean(), "number": 3}
                state["large"] = torch.ones(100)
        return loss


def test_state_that_an_optimizer_makes_later_is_loaded(root: Path) -> None:
    """State that a new optimizer does not have yet is loaded. A tensor larger than its parameter is not loaded, with a
    warning.
    """
    jobs = [Trained("alone", seed=seed) for seed in (1, 2)]
    for job in jobs:
        job.optimizer = Late(job.model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        jobs[0].train("used", "unused")
    with opened(root) as manager:
        manager.save(1, {"app": jobs[0]})
        with pytest.warns(ReplicatedCkptWarning, match="does not load 4 of"):
            manager.restore({"app": jobs[1]})
    for state in jobs[0].optimizer.state.values():
        del state["large"]
    assert jobs[1].digests() == jobs[0].digests()


def test_a_save_makes_no_step(root: Path) -> None:
    """Saving and loading an optimizer that has made no step leaves its state empty."""
    jobs = [Trained("alone", seed=seed) for seed in (1, 2)]
    checkpoints = NamedCheckpoints(root, {"copies": 1})
    checkpoints.save("a", {"optimizer": get_saved_state(jobs[0].model, jobs[0].optimizer)})
    state = {"optimizer": get_wanted_state(jobs[1].model, jobs[1].optimizer)}
    checkpoints.load("a", state)
    set_loaded_state(jobs[1].model, jobs[1].optimizer, state["optimizer"])
    checkpoints.close()
    assert [dict(job.optimizer.state) for job in jobs] == [{}, {}]
    assert jobs[1].optimizer.param_groups[1]["lr"] == 1.01


def lacks_a_part(optimizer: dict[str, Any]) -> None:
    """The state to load has a key that the checkpoint lacks."""
    for state in optimizer["state"].values():
        state["gained"] = torch.zeros(1)


def has_another_optimizer(optimizer: dict[str, Any]) -> None:
    for name, state in optimizer["state"].items():
        optimizer["state"][name] = {"momentum_buffer": next(iter(state.values()))}


def has_another_parameter(optimizer: dict[str, Any]) -> None:
    optimizer["state"]["added"] = {"step": torch.zeros(())}
    optimizer["param_groups"][1]["params"].append("added")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lacks_a_part, r"Missing key .*heads\.used\.(weight|bias)\.gained"),
        (has_another_optimizer, r"Missing key .*heads\.used\.(weight|bias)\.momentum_buffer"),
        (has_another_parameter, "optimizer in the checkpoint has no parameter added"),
    ],
)
def test_a_missing_part_of_a_state_is_an_error(root: Path, change: Any, message: str) -> None:
    """A missing key, another optimizer's state, or an unknown parameter fails the load. Only a parameter's whole state
    may be absent.
    """
    state = Trained("alone", seed=2).state_dict()
    change(state["optimizer"])
    with opened(root) as manager:
        manager.save(1, {"app": trained()})
        with pytest.raises(CheckpointException, match=message):
            manager.restore({"app": state})


@pytest.mark.parametrize("key", ["model", "optimizer", "state"])
def test_other_missing_entries_are_errors(root: Path, key: str) -> None:
    """An added weight, an optimizer that was not saved, and a dictionary that is no optimizer's state fail the load."""
    saved, state = trained().state_dict(), Trained("alone", seed=2).state_dict()
    if key == "model":
        state["model"]["added"] = torch.zeros(1)
    if key == "optimizer":
        del saved["optimizer"]
    if key == "state":
        state["optimizer"] = {"state": state["optimizer"]["state"]}
    with opened(root, expect_partial=True) as manager:
        manager.save(1, {"app": saved})
        with pytest.raises(CheckpointException, match=f"Missing key .*{ {'model': 'added'}.get(key, 'optimizer') }"):
            manager.restore({"app": state})


def test_a_group_that_only_the_checkpoint_has_is_an_error(root: Path) -> None:
    """The checkpoint has a parameter group that the program lacks: the load fails. After the program adds the group,
    its learning rate is restored.
    """
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    one, two = (torch.optim.AdamW(model[0].parameters(), lr=rate) for rate in (0.1, 0.2))
    two.add_param_group({"params": model[1].parameters(), "lr": 0.3})
    with opened(root) as manager:
        manager.save(1, {"optimizer": get_saved_state(model, two)})
        with pytest.raises(CheckpointException, match="has 1 parameter group, but the one in the checkpoint has 2"):
            manager.restore({"optimizer": get_wanted_state(model, one)})
        one.add_param_group({"params": model[1].parameters()})
        state = {"optimizer": get_wanted_state(model, one)}
        manager.restore(state)
        set_loaded_state(model, one, state["optimizer"])
    assert [group["lr"] for group in one.param_groups] == [0.2, 0.3]
    assert main(["verify", "--root", str(root)]) == ExitCode.OK
