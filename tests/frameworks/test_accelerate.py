"""Accelerate with our Accelerator: after a kill and a node loss, a run ends with the same bits as an undisturbed one."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from replicated_ckpt.errors import ConfigInvalid, ReplicatedCkptWarning
from tests.frameworks.jobs import Job, check_same, preempt, raise_in_a_step, run_both
from tests.frameworks.running import require

pytestmark = [pytest.mark.multiprocess, pytest.mark.long, pytest.mark.timeout(900)]


class Noisy(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Each sample is its index and a random number of the worker."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor(index), torch.rand(())


def prepared(root: Path, *, is_stateful: bool, data: Dataset[Any] | None = None) -> tuple[Any, Any]:
    from accelerate.utils import DataLoaderConfiguration

    from replicated_ckpt.integrations.accelerate import ReplicatedAccelerator

    torch.manual_seed(4)
    config = DataLoaderConfiguration(use_stateful_dataloader=is_stateful)
    options = {"replicated_root": root, "writer_options": {"copies": 1}, "dataloader_config": config}
    accelerator = ReplicatedAccelerator(cpu=True, **options)
    loader = DataLoader(data or Noisy(), batch_size=2, shuffle=data is None, num_workers=1)
    return accelerator, accelerator.prepare(loader)


def numbers(batch: Any) -> list[list[float]]:
    """The batch, and a random number of this process, as dropout draws it."""
    return [*(each.tolist() for each in batch), [torch.rand(()).item()]]


@pytest.mark.parametrize("is_stateful", [False, True])
@pytest.mark.parametrize("at", [2, 6, 8])
def test_nothing_is_skipped_twice(tmp_path: Path, at: int, is_stateful: bool) -> None:
    """With the usual idiom, a resumed run reads each remaining batch of three epochs once. A wrong number to skip
    raises.

    `use_stateful_dataloader` keeps order and the workers' random numbers, too.
    """
    require("accelerate")
    if is_stateful:
        require("torchdata")
    accelerator, loader = prepared(tmp_path, is_stateful=is_stateful)
    undisturbed = []
    for epoch in range(3):
        loader.set_epoch(epoch)
        for batch in accelerator.skip_first_batches(loader, 0):
            undisturbed.append(numbers(batch))
            if len(undisturbed) == at:
                accelerator.save_state("checkpoint-1")
    accelerator, loader = prepared(tmp_path, is_stateful=is_stateful)
    assert accelerator.load_state() == "checkpoint-1"
    epoch, skipped = divmod(at - 1, 6)
    if at != 6:
        with pytest.raises(ConfigInvalid, match="skip_first_batches asked for"):
            accelerator.skip_first_batches(loader, 5)
    again: list[Any] = []
    for now in range(epoch, 3):
        loader.set_epoch(now)
        left = accelerator.skip_first_batches(loader, skipped + 1 if now == epoch else 0)
        again += [numbers(batch) for batch in left]
    assert again == undisturbed[at:]


@pytest.mark.parametrize("at", [6, 9])
def test_persistent_workers_keep_the_order(tmp_path: Path, at: int) -> None:
    """With `persistent_workers` only the first epoch draws a seed for workers, also in a resumed process."""
    require("accelerate")
    from replicated_ckpt.integrations.accelerate import ReplicatedAccelerator

    def made() -> tuple[Any, Any]:
        torch.manual_seed(4)
        accelerator = ReplicatedAccelerator(cpu=True, replicated_root=tmp_path, writer_options={"copies": 1})
        data: Any = range(12)
        loader: Any = DataLoader(data, batch_size=2, shuffle=True, num_workers=1, persistent_workers=True)
        return accelerator, accelerator.prepare(loader)

    accelerator, loader = made()
    undisturbed = []
    for _ in range(3):
        for batch in loader:
            undisturbed.append(batch.tolist())
            if len(undisturbed) == at:
                accelerator.save_state("one")
    accelerator, loader = made()
    accelerator.load_state()
    again: list[Any] = []
    while len(again) < len(undisturbed) - at:
        again += [batch.tolist() for batch in loader]
    assert again == undisturbed[at:]


@pytest.mark.parametrize("what", ["data loaders", "schedulers", "registered objects"])
def test_another_number_of_parts_is_named(tmp_path: Path, what: str) -> None:
    """The error names the kind of part that the program has more of than the checkpoint."""
    require("accelerate")
    accelerator, _ = prepared(tmp_path, is_stateful=False)
    accelerator.save_state("checkpoint-1")
    accelerator, _ = prepared(tmp_path, is_stateful=False)
    if what == "data loaders":
        accelerator.prepare(DataLoader(Noisy()))
    schedule = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD([torch.ones(1)]))
    if what == "schedulers":
        accelerator.prepare(schedule)
    if what == "registered objects":
        accelerator.register_for_checkpointing(schedule)
    with pytest.raises(ConfigInvalid, match=f"This program has .* {what}, but the program that saved"):
        accelerator.load_state()


class Stream(IterableDataset[torch.Tensor]):
    """A dataset that saves its position."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.at < 12:
            self.at += 1
            yield torch.tensor(self.at)
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.at = state_dict["at"]


def test_a_stateful_dataset_resumes_from_its_state(tmp_path: Path) -> None:
    """With `use_stateful_dataloader` no sample is read twice, and the process draws the same random numbers."""
    require("accelerate")
    require("torchdata")

    accelerator, loader = prepared(tmp_path, is_stateful=True, data=Stream())
    undisturbed = []
    for batch in loader:
        undisturbed.append(numbers([batch]))
        if len(undisturbed) == 3:
            accelerator.save_state("one")
    accelerator, loader = prepared(tmp_path, is_stateful=True, data=Stream())
    assert accelerator.load_state() == "one"
    assert [numbers([batch]) for batch in loader] == undisturbed[3:]


def test_with_another_number_of_ranks_all_load_rank_0s_counters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks use rank 0's step, so that they accumulate gradients in the same steps.

    Stateful loaders keep their own state, as the warning says.
    """
    require("accelerate")
    require("torchdata")
    from replicated_ckpt.dcp.rank_state import rank_state
    from replicated_ckpt.integrations.accelerate import ReplicatedAccelerator

    accelerator, loader = prepared(tmp_path, is_stateful=True, data=Stream())
    next(iter(loader))
    accelerator.step = 6
    accelerator.save_state("one")
    accelerator, loader = prepared(tmp_path, is_stateful=True, data=Stream())
    monkeypatch.setattr(rank_state, "rank_and_world", lambda: (1, 2))
    monkeypatch.setattr(ReplicatedAccelerator, "process_index", 1)
    with pytest.warns(ReplicatedCkptWarning, match="Another number of ranks"):
        accelerator.load_state()
    assert accelerator.step == 6
    assert next(iter(loader)).tolist() == [1, 2]


@pytest.mark.parametrize(
    ("options", "hold_at", "begins"),
    [((), 11, {"step": 9}), (("--sharded",), 7, {"step": 5})],
    ids=["ddp, second epoch", "fsdp2, first epoch"],
)
def test_accelerate_resumes_after_a_node_loss(
    tmp_path: Path, options: tuple[str, ...], hold_at: int, begins: dict[str, int]
) -> None:
    """Schedule, accumulation, dropout, shuffled data, a registered object: losses, rates and weights have the same
    bits.
    """
    require("accelerate")
    with run_both("accelerate_program.py", tmp_path, hold_at, options) as (undisturbed, disturbed):
        check_same(undisturbed, disturbed, ("step",), begins)
        assert not (disturbed.root(1) / "checkpoint-4").exists()  # removed, because of total_limit


@pytest.mark.parametrize("disturb", [raise_in_a_step, preempt])
def test_accelerate_resumes_after_an_exception_or_sigterm(tmp_path: Path, disturb: Callable[[Job, int], None]) -> None:
    """One rank raises in its step, or all get SIGTERM: losses, rates, weights and the scaler's scale have the same
    bits.
    """
    require("accelerate")
    job = run_both("accelerate_program.py", tmp_path, 7, ("--scaled",), disturb=disturb, ranks=1)
    with job as (undisturbed, disturbed):
        check_same(undisturbed, disturbed, ("step",), {"step": 5})
        assert len({line["scale"] for line in undisturbed.lines(0) if "scale" in line}) > 2


def test_hooks_that_save_models_themselves(tmp_path: Path) -> None:
    """Hooks as those of diffusers write files and remove the weights from the state: both return."""
    require("accelerate")
    from replicated_ckpt.integrations.accelerate import ReplicatedAccelerator

    accelerator = ReplicatedAccelerator(cpu=True, replicated_root=tmp_path, writer_options={"copies": 1})
    model = accelerator.prepare(torch.nn.Linear(3, 3))
    wanted, seen = model.weight.detach().clone(), []

    def save(models: list[Any], weights: list[Any], directory: str) -> None:
        for name in ("unet", "scheduler"):
            (Path(directory) / name).mkdir()
        (Path(directory) / "scheduler" / "scheduler_config.json").write_text("{}")
        torch.save(models[0].state_dict(), Path(directory) / "unet" / "weights.pt")
        weights.pop()

    def load(models: list[Any], directory: str) -> None:
        models.pop()
        seen.append(torch.load(Path(directory) / "unet" / "weights.pt")["weight"])

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    accelerator.save_state("one")
    with torch.no_grad():
        model.weight.zero_()
    assert accelerator.load_state("one") == "one"
    assert torch.equal(model.weight, wanted)
    assert torch.equal(seen[0], wanted)
