"""Lightning over our strategies: killed in the middle with a node lost, it ends as an undisturbed run does, bit for bit."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.frameworks.jobs import Job, check_same, preempt, raise_in_a_step, run_both
from tests.frameworks.running import require

pytestmark = [pytest.mark.multiprocess, pytest.mark.long, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("strategy", "hold_at", "resume", "begins"),
    [
        ("fsdp2", 9, "latest", {"step": 8, "index": 4}),
        ("ddp", 9, "last", {"step": 8, "index": 4}),
        ("fsdp2", 7, "latest", {"step": 6, "index": 0}),
    ],
    ids=["fsdp2 in an epoch", "ddp by ckpt_path last", "fsdp2 at an epoch's end"],
)
def test_lightning_goes_on_in_the_middle(
    tmp_path: Path, strategy: str, hold_at: int, resume: str, begins: dict[str, int]
) -> None:
    """Schedule, accumulation, dropout, shuffled data, validation, callbacks: losses, rates, weights are the same bits."""
    require("lightning")
    options = ("--strategy", strategy, "--resume", resume)
    with run_both("lightning_program.py", tmp_path, hold_at, options) as (undisturbed, disturbed):
        check_same(undisturbed, disturbed, ("step", "index"), begins)


@pytest.mark.parametrize(
    ("disturb", "options", "begins"),
    [
        (raise_in_a_step, ("--strategy", "ddp"), {"step": 8, "index": 4}),
        (preempt, ("--strategy", "fsdp2", "--save-on-exception"), {"step": 9, "index": 6}),
    ],
    ids=["exception, fp16 scaler", "sigterm, saved on exception"],
)
def test_lightning_goes_on_after_it_ended(
    tmp_path: Path, disturb: Callable[[Job, int], None], options: tuple[str, ...], begins: dict[str, int]
) -> None:
    """One rank raises in its training step; or all get SIGTERM, and save first. Losses, rates, scales: the same bits."""
    require("lightning")
    with run_both("lightning_program.py", tmp_path, 9, options, disturb=disturb, ranks=1) as (undisturbed, disturbed):
        check_same(undisturbed, disturbed, ("step", "index"), begins)
        scales = {line["scale"] for line in undisturbed.lines(0) if "scale" in line}
        assert len(scales) > 2 or disturb is preempt


def test_what_was_resumed_from_has_one_path_on_all_nodes(tmp_path: Path) -> None:
    """Lightning asks by path whether a checkpoint may be removed: it is the one that was found, not a node's own."""
    require("lightning")
    from replicated_ckpt.integrations.lightning import ReplicatedDDPStrategy

    found, resumed = tmp_path / "checkpoints" / "last.ckpt", []
    found.parent.mkdir()
    found.write_text("last\n")
    connector: Any = SimpleNamespace(_ckpt_path=None)
    strategy: Any = ReplicatedDDPStrategy(root=tmp_path / "root")
    strategy._lightning_module = SimpleNamespace(trainer=SimpleNamespace(_checkpoint_connector=connector))
    strategy._resume_alike(lambda path, weights_only: resumed.append(path), found)
    assert [path.parent for path in resumed] == [tmp_path / "root"]
    assert connector._ckpt_path == str(found)


def test_a_hook_gets_the_model_and_may_change_it(tmp_path: Path) -> None:
    """`on_load_checkpoint` finds what the checkpoint has, as EMAWeightAveraging asks for it; what it leaves is loaded."""
    require("lightning")
    from lightning.pytorch.plugins.environments import LightningEnvironment
    from lightning.pytorch.trainer.states import TrainerFn

    from replicated_ckpt.integrations.lightning import ReplicatedDDPStrategy

    strategy: Any = ReplicatedDDPStrategy(
        root=tmp_path, writer_options={"copies": 1}, cluster_environment=LightningEnvironment()
    )
    trainer = SimpleNamespace(state=SimpleNamespace(fn=TrainerFn.VALIDATING))
    strategy._lightning_module = SimpleNamespace(trainer=trainer, strict_loading=True)
    strategy.model = torch.nn.Linear(3, 3)
    saved = {name: value.clone() for name, value in strategy.model.state_dict().items()}
    strategy.save_checkpoint({"state_dict": saved, "epoch": 4}, tmp_path / "one.ckpt")
    loaded = strategy.load_checkpoint(tmp_path / "one.ckpt")
    assert loaded["epoch"] == 4
    assert torch.equal(loaded["state_dict"]["weight"], saved["weight"])
    loaded["state_dict"]["bias"] = torch.full((3,), 7.0)
    strategy.load_model_state_dict(loaded)
    assert strategy.model.bias.tolist() == [7.0] * 3
