"""Another job replaces or removes a checkpoint between the look at the nodes and the word to keep what was found."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from replicated_ckpt import ReplicatedReader, ReplicatedWriter, Retention
from replicated_ckpt.dcp.find import keeping
from replicated_ckpt.dcp.find.survey import Surveyor
from replicated_ckpt.errors import CheckpointNotFound
from replicated_ckpt.stores.local.store import LocalStore
from tests.agent.agents import running_agent, wait_for
from tests.agent.checkpoints import introduced
from tests.marks import long

pytestmark = [
    pytest.mark.fault,
    pytest.mark.timeout(100),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]
MOMENTS = ["looked", "found"]


class Trainer:
    """Saves on its own node, which an agent serves."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def save(self, checkpoint_id: str, number: int, **arguments: Any) -> None:
        writer = ReplicatedWriter(self.root, copies=1, overwrite=True, **arguments)
        dcp.save({"a": torch.full((9,), number)}, checkpoint_id=checkpoint_id, storage_writer=writer, no_dist=True)

    def save_and_retire(self, checkpoint_id: str, number: int, retired: str) -> None:
        self.save(checkpoint_id, number, retention=Retention(keep_last=1))
        wait_for(lambda: not (self.root / retired).exists(), 20.0, f"{retired} is removed")


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    with running_agent(tmp_path / "there") as agent:
        introduced(LocalStore(tmp_path / "here"), [agent.endpoint.local_address()])
        yield Trainer(tmp_path / "there")


@pytest.fixture
def once_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[[], None]], None]:
    """`once_at(moment, act)` acts in the next load: when all nodes have been `looked` at, or the save is `found`."""

    def arrange(moment: str, act: Callable[[], None]) -> None:
        acts = [act]
        look, tell = Surveyor._choose, keeping.tell_load

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
            monkeypatch.setattr(keeping, "tell_load", act_and_tell)

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
    """The version that took its place is loaded, and never silently the checkpoint before."""
    trainer.save("step-1", 1)
    trainer.save("step-2", 2)
    once_at(moment, lambda: trainer.save("step-2", 3))
    assert loaded(tmp_path / "here", checkpoint_id) == 3


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_newest_is_removed_as_there_is_a_newer_one(
    tmp_path: Path, trainer: Trainer, once_at: Callable[..., None], moment: str
) -> None:
    """A load of "latest" has the newer one."""
    trainer.save("step-1", 1)
    once_at(moment, lambda: trainer.save_and_retire("step-2", 2, "step-1"))
    assert loaded(tmp_path / "here", "latest") == 2


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_one_that_was_named_is_removed(
    tmp_path: Path, trainer: Trainer, once_at: Callable[..., None], moment: str
) -> None:
    """It is not there any more, which is what the load says: no shard is lost, and no node is to be brought back."""
    trainer.save("step-1", 1)
    once_at(moment, lambda: trainer.save_and_retire("step-2", 2, "step-1"))
    with pytest.raises(CheckpointNotFound, match="No checkpoint 'step-1' was found"):
        loaded(tmp_path / "here", "step-1")
