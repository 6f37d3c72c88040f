"""A checkpoint changes between its look-up and its read: another job replaces or removes it, or another agent has taken
over the node's address.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from replicated_ckpt import ReplicatedReader, ReplicatedWriter, Retention
from replicated_ckpt.dcp.find import keeping
from replicated_ckpt.dcp.find.survey import Surveyor
from replicated_ckpt.dcp.load.load_attempt import LoadAttempt
from replicated_ckpt.errors import CheckpointNotFound, ShardLost
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.local.versions.readers import is_read
from tests.agent.agents import RunningAgent, running_agent, wait_for
from tests.agent.checkpoints import introduced
from tests.marks import long

pytestmark = [
    pytest.mark.fault,
    pytest.mark.timeout(100),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]
MOMENTS = ["looked", "found"]


class Trainer:
    """A job that saves on the agent's node."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def save(self, checkpoint_id: str, number: int, **arguments: Any) -> None:
        writer = ReplicatedWriter(self.root, copies=1, overwrite=True, **arguments)
        dcp.save({"a": torch.full((9,), number)}, checkpoint_id=checkpoint_id, storage_writer=writer, no_dist=True)

    def save_and_retire(self, checkpoint_id: str, number: int, retired: str) -> None:
        self.save(checkpoint_id, number, retention=Retention(keep_last=1))
        wait_for(lambda: not (self.root / retired).exists(), 20.0, f"{retired} is removed")


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[RunningAgent]:
    with running_agent(tmp_path / "there") as agent:
        introduced(LocalStore(tmp_path / "here"), [agent.endpoint.local_address()])
        yield agent


@pytest.fixture
def trainer(agent: RunningAgent) -> Trainer:
    return Trainer(agent.root)


@pytest.fixture
def once_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[[], None]], None]:
    """`once_at(moment, act)` calls `act` once in the next load: "looked" is after the survey of the nodes, "found" is
    after the choice of the save.
    """

    def arrange(moment: str, act: Callable[[], None]) -> None:
        acts = [act]
        look, tell = Surveyor._choose, keeping.announce_load

        def act_and_choose(*arguments: Any) -> Any:
            if acts:
                acts.pop()()
            return look(*arguments)

        def act_and_tell(*arguments: Any) -> Any:
            if acts:
                acts.pop()()
            return tell(*arguments)

        if moment == "looked":
            monkeypatch.setattr(Surveyor, "_choose", act_and_choose)
        else:
            monkeypatch.setattr(keeping, "announce_load", act_and_tell)

    return arrange


def loaded(root: Path, checkpoint_id: str) -> int:
    state = {"a": torch.zeros(9, dtype=torch.int64)}
    dcp.load(state, checkpoint_id=checkpoint_id, storage_reader=ReplicatedReader(root), no_dist=True)
    assert len(set(state["a"].tolist())) == 1
    return int(state["a"][0])


@pytest.mark.parametrize("checkpoint_id", ["latest", long("step-2")])
@pytest.mark.parametrize("moment", MOMENTS)
def test_the_newest_is_overwritten(
    tmp_path: Path, trainer: Trainer, once_at: Callable[..., None], moment: str, checkpoint_id: str
) -> None:
    """The load returns the new version, and never silently falls back to the previous checkpoint."""
    trainer.save("step-1", 1)
    trainer.save("step-2", 2)
    once_at(moment, lambda: trainer.save("step-2", 3))
    assert loaded(tmp_path / "here", checkpoint_id) == 3


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_newest_is_removed_after_a_newer_save(
    tmp_path: Path, trainer: Trainer, once_at: Callable[..., None], moment: str
) -> None:
    """A load of "latest" returns the newer checkpoint."""
    trainer.save("step-1", 1)
    once_at(moment, lambda: trainer.save_and_retire("step-2", 2, "step-1"))
    assert loaded(tmp_path / "here", "latest") == 2


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_named_checkpoint_is_removed(
    tmp_path: Path, trainer: Trainer, once_at: Callable[..., None], moment: str
) -> None:
    """The load raises CheckpointNotFound. It does not report a lost shard, nor ask for a node to be brought back."""
    trainer.save("step-1", 1)
    once_at(moment, lambda: trainer.save_and_retire("step-2", 2, "step-1"))
    with pytest.raises(CheckpointNotFound, match="No checkpoint 'step-1' was found"):
        loaded(tmp_path / "here", "step-1")


@pytest.mark.parametrize("step", ["read_metadata", "read_items"])
def test_another_agent_has_the_address(
    tmp_path: Path, agent: RunningAgent, trainer: Trainer, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """A container restarts at the same address with another root: the error names the node that is missing."""
    trainer.save("step-1", 1)
    port, goes_on = str(agent.endpoint.port), getattr(LoadAttempt, step)
    with ExitStack() as stack:

        def replace_agent(attempt: LoadAttempt, *arguments: Any, **named: Any) -> Any:
            agent.process.kill()
            agent.process.wait(10)
            stack.enter_context(running_agent(tmp_path / "other", "--port", port))
            return goes_on(attempt, *arguments, **named)

        monkeypatch.setattr(LoadAttempt, step, replace_agent)
        with pytest.raises(CheckpointException) as raised:
            loaded(tmp_path / "here", "step-1")
    ((error, _),) = raised.value.failures.values()
    assert isinstance(error, ShardLost)
    assert f"node {agent.endpoint.node_id}" in error.hint
    assert error.hint.startswith("Bring back node ")
    assert "no valid token" in str(error)


@pytest.mark.parametrize("step", ["read_metadata", "plan", "read_items"])
def test_a_store_without_an_agent_is_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """No agent runs: the version that the load has found stays until it is read, although another process overwrites
    it.
    """
    trainer, goes_on = Trainer(tmp_path / "here"), getattr(LoadAttempt, step)
    trainer.save("step-1", 1)
    acts = [lambda: trainer.save("step-1", 2)]

    def overwrite(attempt: LoadAttempt, *arguments: Any, **named: Any) -> Any:
        while acts:
            acts.pop()()
        return goes_on(attempt, *arguments, **named)

    monkeypatch.setattr(LoadAttempt, step, overwrite)
    assert loaded(trainer.root, "step-1") == 1
    assert loaded(trainer.root, "step-1") == 2
    assert not is_read(trainer.root / "step-1" / ".manifest.json")
