"""Saves that are open at the same time get different sequence numbers. Saves that ended leave no gap in the numbers of
another run.
"""

from pathlib import Path

from replicated_ckpt.core.lineage import History
from replicated_ckpt.node.saves.service import NodeService
from replicated_ckpt.stores.local.directories.intent import Intent
from replicated_ckpt.stores.local.store import LocalStore

RUNS = {"a": "a" * 16, "b": "b" * 16}


def opened(path: Path) -> NodeService:
    """A node with two runs, each at its fifth save."""
    store = LocalStore(path)
    store.node_id()
    service = NodeService(store)
    service.sequence_floor.raise_to(dict.fromkeys(RUNS.values(), 5), {}, "peer")
    return service


def begin(service: NodeService, number: int, run: str) -> int:
    """Opens a save. Returns the highest sequence that the agent reports for this run."""
    save_id = f"{number:032x}"
    histories, _ = service.open_save(Intent(save_id, f"run-{run}/step-{number}", f"session {number}", overwrite=False))
    return histories.get(RUNS[run], History(0)).sequence


def place(service: NodeService, number: int, run: str, sequence: int) -> None:
    service.store.note_place(f"{number:032x}", RUNS[run], sequence)


def test_open_saves_get_different_numbers(tmp_path: Path) -> None:
    """The first save has no sequence yet, as its coordinator may be stopped: the next one gets a higher number."""
    service = opened(tmp_path / "node")
    assert [begin(service, number, "a") for number in (1, 2, 3)] == [5, 6, 7]


def test_a_save_with_a_sequence_leaves_no_gap_in_another_run(tmp_path: Path) -> None:
    """The saves of two runs alternate: each run gets consecutive numbers. With gaps, a rule for every second checkpoint
    might match none.
    """
    service = opened(tmp_path / "node")
    for number in range(1, 9):
        run = "ab"[number % 2]
        expected = 5 + (number - 1) // 2
        assert begin(service, number, run) == expected
        place(service, number, run, expected + 1)


def test_an_aborted_save_frees_its_number(tmp_path: Path) -> None:
    """A sequence that was reserved for a failed save is free for the next save."""
    service = opened(tmp_path / "node")
    for number in (1, 2, 3):
        assert begin(service, number, "a") == 5
        service.abort(f"{number:032x}", "it failed")
