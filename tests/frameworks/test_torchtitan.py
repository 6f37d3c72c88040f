"""torchtitan's checkpoint manager over our storage: after the loss of a node the bits are the undisturbed run's."""

from functools import partial
from pathlib import Path
from unittest import mock

import pytest
from torch import nn

from replicated_ckpt import ReplicatedReader
from tests.agent.agents import wait_for
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
            for node in (0, 1):  # agents, which outlive the ranks, remove the others
                root = job.root(node)
                wait_for(partial(keeps, root, {"step-10", "step-12"}), 45, f"two are kept in {root}")


def keeps(root: Path, names: set[str]) -> bool:
    return {path.name for path in root.glob("step-*")} == names


@pytest.mark.parametrize("has_folder", [False, True])
def test_ranks_look_as_often_with_and_without_a_folder(tmp_path: Path, has_folder: bool) -> None:
    """A fresh start is agreed on once by all ranks: torchtitan's own folder, which some nodes may lack, changes nothing."""
    require("torchtitan")
    from replicated_ckpt.integrations.torchtitan import ReplicatedCheckpointManager

    if has_folder:
        (tmp_path / "dump" / "checkpoint").mkdir(parents=True)
    manager = ReplicatedCheckpointManager.Config(enable=True, root=str(tmp_path / "root")).build(
        dataloader=None,
        model_parts=[nn.Linear(2, 2)],
        optimizers=None,
        lr_schedulers=None,
        states={},
        sd_adapter=None,
        base_folder=str(tmp_path / "dump"),
    )
    with mock.patch.object(ReplicatedReader, "latest", return_value=None) as look:
        assert not manager.load()
    manager.close()
    assert look.call_count == 1
