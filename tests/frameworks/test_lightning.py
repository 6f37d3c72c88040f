"""Lightning with our strategies: after a kill and a node loss, a run ends with the same bits as an undisturbed one."""

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard

from replicated_ckpt.stores.local.store import LocalStore
from tests.agent.checkpoints import findings
from tests.frameworks.jobs import Job, check_same, preempt, raise_in_a_step, run_both
from tests.frameworks.running import require
from tests.harness.processes import end, processes_of

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
def test_lightning_resumes_after_a_node_loss(
    tmp_path: Path, strategy: str, hold_at: int, resume: str, begins: dict[str, int]
) -> None:
    """Schedule, accumulation, dropout, shuffling, validation, callbacks: losses, rates and weights have the same bits."""
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
def test_lightning_resumes_after_an_exception_or_sigterm(
    tmp_path: Path, disturb: Callable[[Job, int], None], options: tuple[str, ...], begins: dict[str, int]
) -> None:
    """One rank raises in its step, or all get SIGTERM and save first: losses, rates and scales have the same bits."""
    require("lightning")
    with run_both("lightning_program.py", tmp_path, 9, options, disturb=disturb, ranks=1) as (undisturbed, disturbed):
        check_same(undisturbed, disturbed, ("step", "index"), begins)
        scales = {line["scale"] for line in undisturbed.lines(0) if "scale" in line}
        assert len(scales) > 2 or disturb is preempt


@pytest.mark.parametrize(
    ("hold_at", "begins"),
    [(11, {"step": 11, "epoch": 1}), (13, {"step": 13, "epoch": 2})],
    ids=["in the second epoch", "at its end"],
)
def test_a_fabric_loop_resumes_after_a_node_loss(tmp_path: Path, hold_at: int, begins: dict[str, int]) -> None:
    """The documented loop with schedule, dropout and shuffled data: batches, losses, rates and weights have the same
    bits.
    """
    require("lightning")
    with run_both("fabric_program.py", tmp_path, hold_at, ranks=1) as (undisturbed, disturbed):
        check_same(undisturbed, disturbed, ("step",), begins)


def test_the_resumed_checkpoint_has_one_path_on_all_nodes(tmp_path: Path) -> None:
    """Lightning decides by path whether to delete a checkpoint: it gets the path of `ckpt_path`, not the node's own."""
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
    """`on_load_checkpoint` gets the saved model, as EMAWeightAveraging needs. What the hook changes is loaded."""
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


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Destroys the process group that Lightning creates in this process."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        monkeypatch.setenv("MASTER_PORT", str(free.getsockname()[1]))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def finetuned(*, is_sharded: bool) -> Any:
    """A model whose backbone BackboneFinetuning freezes at first."""
    import lightning

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)

        def configure_model(self) -> None:
            if is_sharded and not isinstance(self.head, FSDPModule):
                for layer in (self.backbone, self.head):
                    fully_shard(layer, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.head(self.backbone(batch)).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], 1e-2)

    return Model()


def groups(trainer: Any) -> tuple[list[float], list[float]]:
    """The rate of each parameter group, and the moments of the first group's trained parameters."""
    (optimizer,) = trainer.optimizers
    trained = [each for each in optimizer.param_groups[0]["params"] if "exp_avg" in optimizer.state[each]]
    moments = [optimizer.state[each]["exp_avg"].sum().item() for each in trained]
    return [group["lr"] for group in optimizer.param_groups], moments


@pytest.mark.parametrize("is_sharded", [False, True], ids=["ddp", "fsdp2"])
def test_callbacks_have_their_state_when_a_fit_starts(tmp_path: Path, one_process: None, is_sharded: bool) -> None:
    """BackboneFinetuning adds its parameter group again in `on_fit_start`: both groups resume with their rates."""
    require("lightning")
    import lightning
    from lightning.pytorch.callbacks import BackboneFinetuning, ModelCheckpoint
    from lightning.pytorch.plugins.environments import LightningEnvironment

    from replicated_ckpt.integrations.lightning import ReplicatedDDPStrategy, ReplicatedModelParallelStrategy

    class Seen(lightning.Callback):
        at_start: Any = None

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.at_start = groups(trainer) if trainer.global_step else None

    def fit(steps: int) -> tuple[Any, Any]:
        options: dict[str, Any] = {"root": tmp_path / "store", "writer_options": {"copies": 1}}
        if is_sharded:
            strategy: Any = ReplicatedModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=1, **options)
        else:
            strategy = ReplicatedDDPStrategy(find_unused_parameters=True, **options)
        seen = Seen()
        trainer = lightning.Trainer(
            max_steps=steps,
            accelerator="cpu",
            devices=1,
            strategy=strategy,
            plugins=[LightningEnvironment()],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[ModelCheckpoint(tmp_path / "out", every_n_train_steps=2), BackboneFinetuning(1), seen],
        )
        data: Any = torch.ones(8, 4)
        loader: Any = torch.utils.data.DataLoader(data, batch_size=2)
        trainer.fit(finetuned(is_sharded=is_sharded), loader, ckpt_path="latest")
        return seen.at_start, groups(trainer)

    try:
        _, saved = fit(8)  # an epoch has 4 steps; the backbone trains from the second epoch on
        resumed, _ = fit(10)
        assert saved[0] == [1e-2, 1e-3]
        assert len(saved[1]) == 2
        assert resumed == saved
        assert findings(LocalStore(tmp_path / "store")) == []
    finally:
        end(processes_of(str(tmp_path)))
