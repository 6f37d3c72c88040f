"""Trainer with our mixin: killed in the middle with a node lost, it ends as an undisturbed run does, bit for bit."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.frameworks.jobs import Job, check_same, preempt, raise_in_a_step, run_both
from tests.frameworks.running import require

pytestmark = [pytest.mark.multiprocess, pytest.mark.long, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("hold_at", "begins"),
    [(9, {"step": 9, "epoch": 1.5}), (13, {"step": 13, "epoch": 2 + 1 / 6})],
    ids=["in an epoch", "at an epoch's end"],
)
def test_trainer_goes_on_in_the_middle(tmp_path: Path, hold_at: int, begins: dict[str, float]) -> None:
    """Schedule, accumulation, dropout, shuffling, best model, callbacks: what is logged and weights have the same bits."""
    require("transformers")
    with run_both("trainer_program.py", tmp_path, hold_at) as (undisturbed, disturbed):
        check_same(undisturbed, disturbed, ("step", "index"), begins)
        assert undisturbed.lines(0)[-2]["of"] == 4
        kept = [job.root(node) / "store" / "checkpoint-4" for job in (undisturbed, disturbed) for node in (0, 1)]
        assert [path.exists() for path in kept] == [True] * 4


@pytest.mark.parametrize("disturb", [raise_in_a_step, preempt])
def test_trainer_goes_on_after_it_ended(tmp_path: Path, disturb: Callable[[Job, int], None]) -> None:
    """One rank raises in its training step, or all get SIGTERM: with the scaler's scale, too, the bits are the same."""
    require("transformers")
    job = run_both("trainer_program.py", tmp_path, 9, ("--scaled",), disturb=disturb, ranks=1)
    with job as (undisturbed, disturbed):
        check_same(undisturbed, disturbed, ("step", "index"), {"step": 9, "index": 0})
        assert len({line["scale"] for line in undisturbed.lines(0) if "scale" in line}) > 2
