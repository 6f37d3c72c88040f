"""RankState and ReplayedLoader: a rank's own state is restored bit for bit, or `on_other_world` decides."""

import random
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

from replicated_ckpt import (
    CheckpointManager,
    ConfigInvalid,
    RankState,
    RankStatePlanner,
    ReplayedLoader,
    ReplicatedCkptWarning,
    ReplicatedReader,
    ReplicatedWriter,
    WorldSizeChanged,
)
from replicated_ckpt.dcp.rank_state import rank_state


def draw() -> tuple[float, float, float]:
    """A number from each generator."""
    return random.random(), float(np.random.rand()), float(torch.rand(1))


class Counter:
    """A position in the data, whose state contains a numpy integer."""

    def __init__(self, at: int) -> None:
        self.at = at

    def state_dict(self) -> dict[str, Any]:
        return {"at": np.int64(self.at), "nested": {"x": [torch.arange(3), (1, "a")]}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.at = int(state_dict["at"])
        assert state_dict["nested"]["x"][1] == (1, "a")


def test_a_manager_restores_generators_and_parts(tmp_path: Path) -> None:
    """After `restore`, the generators of Python, numpy and torch draw the same numbers as after `save`. A part has its
    saved position.
    """
    with CheckpointManager(tmp_path, copies=1) as manager:
        manager.save(1, {"rank": RankState(data=Counter(7))})
        drawn = draw()
        counter = Counter(0)
        assert manager.restore({"rank": RankState(data=counter)}) == 1
        assert draw() == drawn
    assert counter.at == 7


def test_plain_dcp_restores_generators(tmp_path: Path) -> None:
    """`dcp.save` and `dcp.load` restore the generators without a special planner, if the world size is the same."""
    dcp.save({"rank": RankState()}, checkpoint_id="a", storage_writer=ReplicatedWriter(tmp_path, copies=1))
    drawn = draw()
    dcp.load({"rank": RankState()}, checkpoint_id="a", storage_reader=ReplicatedReader(tmp_path))
    assert draw() == drawn


@pytest.fixture
def saved_by_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint with the item that rank 0 of two ranks saves."""
    with monkeypatch.context() as patch, CheckpointManager(tmp_path, copies=1) as manager:
        patch.setattr(rank_state, "rank_and_world", lambda: (0, 2))
        manager.save(1, {"rank": RankState(), "x": torch.ones(2)})
    return tmp_path


def test_another_world_is_refused_with_both_numbers(saved_by_two: Path) -> None:
    """One rank loads what two saved: WorldSizeChanged contains both world sizes, and the rest is loaded."""
    state: dict[str, Any] = {"rank": RankState(), "x": torch.zeros(2)}
    with (
        CheckpointManager(saved_by_two, copies=1) as manager,
        pytest.raises(WorldSizeChanged, match="a RankState of each of 2 ranks, and 1 rank loads it") as caught,
    ):
        manager.restore(state)
    assert (caught.value.saved, caught.value.now) == ((2,), 1)
    assert state["x"].tolist() == [1, 1]


def test_another_world_keeps_its_own_with_one_warning(saved_by_two: Path) -> None:
    """With "keep" the generators keep their state, with one warning."""
    torch.manual_seed(3)
    drawn = draw()[2]
    torch.manual_seed(3)
    with CheckpointManager(saved_by_two, copies=1) as manager, pytest.warns(ReplicatedCkptWarning) as warned:
        manager.restore({"rank": RankState(on_other_world="keep"), "x": torch.zeros(2)})
    assert draw()[2] == drawn
    ours = [str(each.message) for each in warned if each.category is ReplicatedCkptWarning]
    assert len(ours) == 1
    assert "stay as they are" in ours[0]


def test_plain_dcp_names_the_item_of_another_world(saved_by_two: Path) -> None:
    """DCP's planner names the missing item. RankStatePlanner raises WorldSizeChanged."""
    reader = ReplicatedReader(saved_by_two)
    with pytest.raises(CheckpointException, match="rank-0-of-1"):
        dcp.load({"rank": RankState()}, checkpoint_id="step-1", storage_reader=reader)
    with pytest.raises(WorldSizeChanged), pytest.warns(ReplicatedCkptWarning, match="'x' \\(1\\)"):
        dcp.load({"rank": RankState()}, checkpoint_id="step-1", storage_reader=reader, planner=RankStatePlanner())


def test_a_missing_entry_that_is_no_rank_item_is_still_an_error(saved_by_two: Path) -> None:
    with CheckpointManager(saved_by_two, copies=1) as manager, pytest.raises(CheckpointException, match="other"):
        manager.restore({"other": torch.zeros(2), "x": torch.zeros(2)})


def test_other_parts_are_refused(tmp_path: Path) -> None:
    """A saved part that no RankState takes, a plain DataLoader, and an unknown `on_other_world` raise ConfigInvalid."""
    with CheckpointManager(tmp_path, copies=1) as manager:
        manager.save(1, {"rank": RankState(data=Counter(7))})
        with pytest.raises(ConfigInvalid, match="has data of this rank"):
            manager.restore({"rank": RankState()})
    with pytest.raises(ConfigInvalid, match="ReplayedLoader"):
        RankState(data=DataLoader([1]))  # type: ignore[arg-type]
    with pytest.raises(ConfigInvalid, match="on_other_world"):
        RankState(on_other_world="drop")  # type: ignore[arg-type]


class Noisy(Dataset[float]):
    """A data set whose samples contain random numbers, as augmentations do."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> float:
        return index + sum(draw()) / 100


class Stream(IterableDataset[int]):
    """A data set without a length."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(12).tolist())


class SetsEpoch:
    """A loader as Lightning's Fabric wraps it: each iteration sets the sampler's epoch to the wrapper's own count."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        vars(self).update(vars(loader))
        self._dataloader: Any = loader
        self._num_iter_calls = 0

    def __len__(self) -> int:
        return len(self._dataloader)

    def __iter__(self) -> Iterator[Any]:
        if hasattr(self._dataloader.sampler, "set_epoch"):
            self._dataloader.sampler.set_epoch(self._num_iter_calls)
        self._num_iter_calls += 1
        yield from self._dataloader


def loaders(kind: str) -> Any:
    own = torch.Generator().manual_seed(5)
    persistent = {"dataset": range(12), "shuffle": True, "num_workers": 1, "persistent_workers": True}
    made: dict[str, Any] = {
        "shuffled": {"dataset": Noisy(), "shuffle": True},
        "own generator": {"dataset": Noisy(), "shuffle": True, "generator": own},
        "workers": {"dataset": Noisy(), "shuffle": True, "num_workers": 1},
        "persistent": persistent,
        "own persistent": {**persistent, "generator": own},
        "fabric persistent": persistent,
        "no length": {"dataset": Stream()},
        "distributed": {"dataset": Noisy(), "sampler": DistributedSampler(Noisy(), 2, 1)},
        "fabric": {"dataset": Noisy(), "sampler": DistributedSampler(Noisy(), 1, 0)},
    }
    loader: DataLoader[Any] = DataLoader(batch_size=2, **made[kind])
    return SetsEpoch(loader) if kind.startswith("fabric") else loader


KINDS = ["shuffled", "own generator", "workers", "no length", "distributed", "fabric"]
KINDS += ["persistent", "own persistent", "fabric persistent"]


def read(loader: Any, count: int) -> Iterator[Any]:
    """Yields `count` batches, over several epochs if needed, each with random draws such as dropout makes."""
    while True:
        for batch in loader:
            yield batch.tolist(), draw()
            count -= 1
            if count == 0:
                return


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at", [2, 6, 7])
def test_a_loader_goes_on_in_the_middle(tmp_path: Path, kind: str, at: int) -> None:
    """After a restore within an epoch, at its end, or in the second one, batches and draws equal those of an
    uninterrupted run.
    """
    if kind == "distributed" and at > 3:
        at = 2  # each rank has three batches
    total = at + (1 if kind == "distributed" else 4)
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    loader = ReplayedLoader(loaders(kind))
    with CheckpointManager(tmp_path, copies=1) as manager:
        undisturbed = []
        for step in read(loader, total):
            undisturbed.append(step)
            if len(undisturbed) == at:
                manager.save(at, {"rank": RankState(data=loader)})
        again = ReplayedLoader(loaders(kind))
        torch.manual_seed(9)
        manager.restore({"rank": RankState(data=again)})
        assert list(read(again, total - at)) == undisturbed[at:]


def test_a_loader_goes_on_before_its_first_batch(tmp_path: Path) -> None:
    """A save between `iter` and the first batch: after a restore the loader yields that batch first."""
    loader, again = ReplayedLoader(loaders("shuffled")), ReplayedLoader(loaders("shuffled"))
    with CheckpointManager(tmp_path, copies=1) as manager:
        reading = iter(loader)
        manager.save(1, {"rank": RankState(data=loader)})
        undisturbed = [batch.tolist() for batch in reading]
        manager.restore({"rank": RankState(data=again)})
        assert [batch.tolist() for batch in again] == undisturbed


class OwnState:
    """A loader with its own `state_dict`, as torchdata's. With `yields_next` a loader resumed at an epoch's end yields
    the next epoch, otherwise an empty one.
    """

    def __init__(self, *, yields_next: bool) -> None:
        self.at, self.is_resumed, self.yields_next = 0, False, yields_next

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[int]:
        if not self.is_resumed or (self.yields_next and self.at == len(self)):
            self.at = 0
        self.is_resumed = False
        while self.at < len(self):
            self.at += 1
            yield self.at

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.at, self.is_resumed = state_dict["at"], True


@pytest.mark.parametrize("yields_next", [False, True])
@pytest.mark.parametrize(("at", "left"), [(0, [1, 2, 3]), (2, [3]), (3, [1, 2, 3])])
def test_a_loader_with_a_state_of_its_own_goes_on(at: int, left: list[int], *, yields_next: bool) -> None:
    """A loader with its own state continues from there. At an epoch's end the next iteration is a full epoch, never an
    empty one.
    """
    loader = ReplayedLoader(OwnState(yields_next=yields_next))
    list(zip(range(at), loader, strict=False))
    again = ReplayedLoader(OwnState(yields_next=yields_next))
    again.load_state_dict(loader.state_dict())
    assert [list(again), list(again)] == [left, [1, 2, 3]]


@pytest.mark.parametrize("at", [4, 6])
def test_a_program_that_counts_epochs_goes_on_in_the_right_one(tmp_path: Path, at: int) -> None:
    """A program saves after an epoch's last batch and counts epochs itself: `is_epoch_over` makes it resume in the next
    epoch.
    """

    def run(root: Path, until: int) -> list[list[int]]:
        data = TensorDataset(torch.arange(12))
        sampler: DistributedSampler[Any] = DistributedSampler(data, 2, 0, seed=7)
        loader = ReplayedLoader(DataLoader(data, batch_size=2, sampler=sampler))
        state: dict[str, Any] = {"epoch": 0, "rank": RankState(data=loader)}
        seen: list[list[int]] = []
        with CheckpointManager(root, copies=1, preempt_on=()) as manager:
            step = manager.restore(state) or 0
            for epoch in count(state["epoch"] + loader.is_epoch_over()):
                state["epoch"] = epoch
                sampler.set_epoch(epoch)
                for (batch,) in loader:
                    step += 1
                    seen.append(batch.tolist())
                    if step == until:
                        manager.save(step, state)
                        return seen
        raise AssertionError("count() never ends")

    whole = run(tmp_path / "undisturbed", 9)
    assert run(tmp_path / "other", at) + run(tmp_path / "other", 9) == whole


def test_another_epoch_than_the_saved_one_is_warned_of() -> None:
    """The sampler has another epoch than when the loader was saved: one warning names both epochs."""

    def loader() -> Any:
        return ReplayedLoader(DataLoader(range(12), sampler=DistributedSampler(range(12), 1, 0)))  # type: ignore[arg-type]

    one, again, right = loader(), loader(), loader()
    for each in (one, right):
        each.sampler.set_epoch(3)
    next(iter(one))
    again.load_state_dict(one.state_dict())
    with pytest.warns(ReplicatedCkptWarning, match=r"at epoch \[0\], but was saved at epoch \[3\]"):
        next(iter(again))
    right.load_state_dict(one.state_dict())
    assert len(list(right)) == 11
