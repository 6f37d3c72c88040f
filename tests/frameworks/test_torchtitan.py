"""torchtitan's checkpoint manager over our storage: after the loss of a node the bits are the undisturbed run's."""

from pathlib import Path

import pytest

from tests.frameworks.jobs import check_same, run_both
from tests.frameworks.running import require

pytestmark = [pytest.mark.multiprocess, pytest.mark.long, pytest.mark.timeout(900)]


@pytest.mark.parametrize("mode", ["disabled", "async", "async_with_pinned_mem"])
def test_torchtitan_goes_on_from_a_lost_node(tmp_path: Path, mode: str) -> None:
    """Model, optimizer, schedule, data, step and each rank's generators come back; two checkpoints are kept everywhere."""
    require("torchtitan")
    with run_both("torchtitan_program.py", tmp_path, 7, ("--async-mode", mode)) as (undisturbed, disturbed):
        check_same(undisturbed, disturbed, ("step",), {"step": 7})
        for job in (undisturbed, disturbed):
            kept = [{path.name for path in job.root(node).glob("step-*")} for node in (0, 1)]
            assert kept == [{"step-10", "step-12"}] * 2
