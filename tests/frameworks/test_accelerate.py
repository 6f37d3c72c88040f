"""Accelerate with our Accelerator: killed in the middle with a node lost, it ends as an undisturbed run, bit for bit."""

from pathlib import Path

import pytest

from tests.frameworks.jobs import Job, check_same
from tests.frameworks.running import require

pytestmark = [pytest.mark.multiprocess, pytest.mark.long, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("options", "hold_at", "begins"),
    [((), 11, {"step": 9}), (("--sharded",), 7, {"step": 5})],
    ids=["ddp, second epoch", "fsdp2, first epoch"],
)
def test_accelerate_goes_on_in_the_middle(
    tmp_path: Path, options: tuple[str, ...], hold_at: int, begins: dict[str, int]
) -> None:
    """Schedule, accumulation, dropout, shuffled data, a registered object: losses, rates and weights have the same bits."""
    require("accelerate")
    disturbed = Job("accelerate_program.py", tmp_path / "disturbed", arguments=options)
    undisturbed = Job("accelerate_program.py", tmp_path / "undisturbed", arguments=options)
    try:
        disturbed.start("--hold-at", str(hold_at))
        disturbed.lose_a_node()
        disturbed.start()
        disturbed.finish()
        undisturbed.start()
        undisturbed.finish()
    finally:
        disturbed.clean_up()
        undisturbed.clean_up()
    check_same(undisturbed, disturbed, ("step",), begins)
    assert not (disturbed.root(1) / "checkpoint-4").exists()  # total_limit
