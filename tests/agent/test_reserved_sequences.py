"""Saves that are open at the same time get numbers of their own; those that are over leave no gap in another run's."""

from pathlib import Path

from replicated_ckpt.core.lineage import History
from replicated_ckpt.node.saves.service import NodeService
from replicated_ckpt.stores.local.directories.intent import Intent
from replicated_ckpt.stores.local.store import LocalStore

RUNS = {"a": "a" * 16, "b": "b" * 16}


def opened(path: Path) -> NodeService:
    """A node that has heard of two runs, each at its fifth save."""
    store = LocalStore(path)
    store.node_id()
    service = NodeService(store)
    service.sequence_floor.raise_to(dict.fromkeys(RUNS.values(), 5), {}, "peer")
    return service


def begin(service: NodeService, number: int, run: str) -> int:
    """Opens a save; the largest number that it is told of its run."""
    save_id = f"{number:032x}"
    told, _ = service.open_save(Intent(save_id, f"run-{run}/step-{number}", f"session {number}", overwrite=False))
    return told.get(RUNS[run], History(0)).sequence


def place(service: NodeService, number: int, run: str, sequence: int) -> None:
    service.store.note_place(f"{number:032x}", RUNS[run], sequence)


def test_two_that_are_open_get_two_numbers(tmp_path: Path) -> None:
    """The first has no place yet: its coordinator may be stopped."""
    service = opened(tmp_path / "node")
    assert [begin(service, number, "a") for number in (1, 2, 3)] == [5, 6, 7]


def test_a_save_that_has_its_place_leaves_no_gap_in_another_runs_numbers(tmp_path: Path) -> None:
    """Else a run that keeps or uploads every second checkpoint might meet no even number again."""
    service = opened(tmp_path / "node")
    for number in range(1, 9):
        run = "ab"[number % 2]
        expected = 5 + (number - 1) // 2
        assert begin(service, number, run) == expected
        place(service, number, run, expected + 1)


def test_a_save_that_was_given_up_takes_none(tmp_path: Path) -> None:
    """A sequence that was reserved for a save that failed is free for the next one."""
    service = opened(tmp_path / "node")
    for number in (1, 2, 3):
        assert begin(service, number, "a") == 5
        service.abort(f"{number:032x}", "it failed")
