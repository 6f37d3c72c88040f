"""Unchanged entries are linked from save to save. An entry in which any bit has changed is written."""

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp

from replicated_ckpt import ReplicatedReader, ReplicatedWriter, Retention
from replicated_ckpt.core.parts import Part, part_of_shard
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.local.versions.remove import recycle, retire
from tests.agent.agents import ANSWER_S, wait_for
from tests.agent.checkpoints import findings

LARGE = 1 << 20
"""Elements of a tensor of 4 MiB, which is large enough for a file of its own."""


def frozen_run() -> dict[str, torch.Tensor]:
    """A frozen encoder in several layouts, and a head that trains."""
    torch.manual_seed(3)
    return {
        "model.encoder": torch.rand(LARGE),
        "model.turned": torch.rand(1024, 512).t(),
        "model.some": torch.rand(1024, 1024)[:, ::2],
        "model.half": torch.rand(LARGE).to(torch.bfloat16),
        "model.head": torch.rand(100_000),
        "step": torch.tensor(0),
    }


def train(state: dict[str, torch.Tensor]) -> None:
    state["model.head"] += 1
    state["step"] += 1


class Run:
    """One rank that saves repeatedly. `saved`: the saved states."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.root = root
        self.store = LocalStore(root)
        self.state = frozen_run()
        self.saved: dict[str, dict[str, torch.Tensor]] = {}
        self.writer = ReplicatedWriter(root, copies=1, **options)

    def save(self, name: str = "") -> str:
        """Saves under a new id. Returns the path of the file of unchanged entries, or ""."""
        name = name or f"run/step-{len(self.saved)}"
        dcp.save(self.state, storage_writer=self.writer, checkpoint_id=name)
        self.saved[name] = {fqn: value.clone() for fqn, value in self.state.items()}
        return self.unchanged_of(name)

    def unchanged_of(self, name: str) -> str:
        found = [one for one in self.store.catalog.manifest(name).shards if part_of_shard(one) is Part.UNCHANGED]
        return str(self.root / name / found[0]) if found else ""

    def check(self) -> None:
        """Checks that every remaining checkpoint is complete and loads bit for bit."""
        assert findings(self.store) == []
        for name, expected in self.saved.items():
            if not (self.root / name).exists():
                continue
            loaded = {fqn: torch.zeros_like(value) for fqn, value in expected.items()}
            dcp.load(loaded, storage_reader=ReplicatedReader(self.root), checkpoint_id=name)
            assert all(torch.equal(loaded[fqn], value) for fqn, value in expected.items()), name


@pytest.fixture
def run(root: Path) -> Iterator[Run]:
    made = Run(root)
    yield made
    made.check()


def is_linked(paths: list[str]) -> list[bool]:
    """For each file, whether it is the same file as in the save before."""
    stats = [Path(path).stat() if path else None for path in paths]
    return [
        one is not None and before is not None and os.path.samestat(one, before)
        for before, one in zip([None, *stats], stats, strict=False)
    ]


def repeat(run: Run, times: int) -> list[str]:
    paths = []
    for _ in range(times):
        train(run.state)
        paths.append(run.save())
    return paths


def test_unchanged_entries_are_linked_from_the_fourth_save_on(run: Run) -> None:
    """The third save writes the unchanged entries into a file of their own, and later saves link that file. Only
    changed entries are written then.
    """
    paths = repeat(run, 6)
    assert [bool(path) for path in paths] == [False, False, True, True, True, True]
    assert is_linked(paths) == [False, False, False, True, True, True]
    assert Path(paths[-1]).stat().st_nlink == 4
    report = run.writer.last_save
    assert report is not None
    changed = 100_000 * 4
    assert changed < report.bytes_written < 1.05 * changed
    assert report.bytes_linked == Path(paths[-1]).stat().st_size > 6 * LARGE
    assert "unchanged" in str(report)


def test_a_lora_run_writes_its_adapters(root: Path) -> None:
    """A LoRA run writes about as much as a save of the adapters and their optimizer alone."""
    torch.manual_seed(4)
    base = {f"model.layer{n}.base": torch.rand(LARGE // 4) for n in range(24)}
    adapters = {f"model.layer{n}.lora_{part}": torch.rand(16, 512) for n in range(24) for part in "AB"}
    moments = {f"optim.state.{name}.exp_avg": value.clone() for name, value in adapters.items()}
    run, alone = Run(root / "lora"), Run(root / "alone")
    run.state, alone.state = base | adapters | moments, adapters | moments
    for _ in range(5):
        for state in (run.state, alone.state):
            state.update({name: state[name] + 1 for name in adapters | moments})
        paths = [run.save(), alone.save()]
    run.check()
    assert paths[1] == ""
    assert run.writer.last_save is not None
    assert alone.writer.last_save is not None
    assert run.writer.last_save.bytes_written < 1.01 * alone.writer.last_save.bytes_written
    assert run.writer.last_save.bytes_linked > sum(value.nbytes for value in base.values())
    alone.check()


@pytest.mark.parametrize("entry", ["model.encoder", "model.turned", "model.some", "model.half"])
def test_one_bit_between_the_samples_is_written(run: Run, entry: str) -> None:
    """One flipped bit that sampling misses is found by the hash of all bytes: the entry is written, and no longer
    linked.
    """
    repeat(run, 4)
    value = run.state[entry]
    index = tuple(size * 3 // 7 for size in value.shape)
    raw = value[index].view(torch.int16 if value.itemsize == 2 else torch.int32)
    raw ^= 1
    paths = repeat(run, 3)
    run.check()
    assert is_linked(paths) == [False, False, True]
    names = {index.fqn for index in run.writer._parts.shards.unchanged.chosen}  # type: ignore[union-attr]
    assert entry not in names
    assert len(names) == 3


def test_an_entry_of_another_shape_or_type_is_written(run: Run) -> None:
    """An entry with the same bytes but another shape or dtype is written."""
    repeat(run, 4)
    run.state["model.encoder"] = run.state["model.encoder"].reshape(1024, -1)
    run.state["model.half"] = run.state["model.half"].view(torch.float16)
    assert is_linked(repeat(run, 1)) == [False]


def test_a_run_in_which_all_changes_has_no_file_of_unchanged_entries(run: Run) -> None:
    """No entry is hashed if all entries change."""
    with mock.patch("replicated_ckpt.dcp.save.shard_files.UnchangedEntries.hash_items") as hashed:
        for _ in range(4):
            run.state = {fqn: value + 1 for fqn, value in run.state.items()}
            assert run.save() == ""
    hashed.assert_not_called()


def test_without_the_option_every_save_writes_everything(root: Path) -> None:
    run = Run(root, link_unchanged=False)
    assert repeat(run, 5) == [""] * 5
    run.check()


def test_a_failed_save_in_between_changes_nothing(run: Run) -> None:
    """After a failed save, the next one links the file of the last committed save."""
    paths = repeat(run, 4)
    with (
        mock.patch(
            "replicated_ckpt.stores.local.store.LocalStore.put_small", side_effect=RuntimeError("no"), autospec=True
        ),
        pytest.raises(BaseException, match="no"),
    ):
        run.save("run/failed")
    run.saved.pop("run/failed", None)
    assert is_linked([paths[-1], *repeat(run, 2)]) == [False, True, True]


def test_a_save_over_its_own_name_is_linked(run: Run) -> None:
    """A save under the same id links the file of the version that it replaces."""
    repeat(run, 3)
    for _ in range(3):
        train(run.state)
        path = run.save("run/last")
        run.check()
    assert Path(path).stat().st_nlink == 2
    assert run.writer.last_save is not None
    assert run.writer.last_save.bytes_linked


ORDERS = [(retire, range(9)), (recycle, range(9, 0, -1)), (recycle, [4, 9, 3, 0, 7, 8, 1, 5, 6])]


@pytest.mark.parametrize(("remove", "order"), ORDERS, ids=["oldest", "newest", "mixed"])
def test_any_of_ten_checkpoints_may_be_removed_in_any_order(
    run: Run, remove: Callable[[Path, str, str], bool], order: Sequence[int]
) -> None:
    """Checkpoints are removed in several orders: all others, and new saves between the removals, load bit for bit."""
    repeat(run, 10)
    for count, number in enumerate(order):
        name = f"run/step-{number}"
        assert remove(run.root, name, run.store.catalog.manifest(name).save_id)
        if count % 4 == 3:
            repeat(run, 1)
            run.check()
    run.check()


def test_retention_recycles_no_file_that_is_linked(root: Path) -> None:
    """Retention recycles files of removed checkpoints, but none that is linked: the kept checkpoints stay intact."""
    run = Run(root, retention=Retention(keep_last=3))
    for _ in range(8):
        repeat(run, 1)
        wait_for(lambda: len(list((root / "run").glob("step-*"))) <= 3 or None, ANSWER_S, "retention")
        run.check()


@pytest.mark.parametrize("code", [errno.EPERM, errno.EXDEV])
def test_a_file_system_without_hard_links_gets_all_bytes(run: Run, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without hard links, each save writes all bytes. Once links work again, saves link again."""
    repeat(run, 4)
    real = os.link

    def refuse(path: Any, *args: Any, **more: Any) -> None:
        if more.get("src_dir_fd") is not None:
            raise OSError(code, "no")
        real(path, *args, **more)

    monkeypatch.setattr(os, "link", refuse)
    assert is_linked(repeat(run, 2)) == [False, False]
    monkeypatch.undo()
    assert is_linked(["", *repeat(run, 2)]) == [False, False, True]


def test_a_source_that_was_removed_is_written_again(run: Run) -> None:
    """The checkpoint to link from was removed: the next save writes all bytes, and the one after links them."""
    repeat(run, 4)
    name = "run/step-3"
    assert retire(run.root, name, run.store.catalog.manifest(name).save_id)
    assert is_linked(repeat(run, 2)) == [False, True]


def test_a_new_writer_links_from_its_fourth_save_on(run: Run) -> None:
    """A new writer has no hashes: it links again from its fourth save on."""
    repeat(run, 4)
    run.writer = ReplicatedWriter(run.root, copies=1)
    assert is_linked(repeat(run, 4)) == [False, False, False, True]
