"""The programs of `ckpt-chaos bench` with our class instead of the framework's: `CHAOS_TARGET=hf_trainer`, ...

Model, data, loop and kills are ckpt-chaos' own. Each rank is a node with its own directory. Each framework is imported
where it is used, because a process runs one program and needs only that program's framework.
"""

import os
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

RANK = os.environ.get("RANK", "0")


def _root() -> Path:
    """The directory of this rank's node, below the value of `--out`."""
    return Path(sys.argv[sys.argv.index("--out") + 1]) / f"node-{RANK}"


def _writer_options() -> dict[str, Any]:
    return {"domain": f"node-{RANK}"}


def hf_trainer() -> None:
    """transformers: ReplicatedTrainer replaces Trainer."""
    from ckpt_chaos.targets import hf_trainer as target

    from replicated_ckpt.integrations.transformers import ReplicatedTrainer

    target.Trainer = partial(ReplicatedTrainer, replicated_root=_root(), writer_options=_writer_options())
    target.main()


def lightning_trainer() -> None:
    """Lightning: ReplicatedDDPStrategy replaces the strategy, and `ckpt_path="latest"` replaces "last"."""
    import lightning.pytorch as pl
    from ckpt_chaos.targets import lightning_trainer as target

    from replicated_ckpt.integrations.lightning import ReplicatedDDPStrategy

    def make(**arguments: Any) -> Any:
        strategy = ReplicatedDDPStrategy(root=_root(), writer_options=_writer_options())
        trainer = pl.Trainer(**{**arguments, "strategy": strategy})
        fit = trainer.fit
        trainer.fit = lambda *given, ckpt_path=None: fit(*given, ckpt_path=ckpt_path and "latest")
        return trainer

    target.pl = SimpleNamespace(Trainer=make, seed_everything=pl.seed_everything)
    target.main()


def accelerate_loop() -> None:
    """Accelerate: ReplicatedAccelerator replaces Accelerator, and `load_state()` the folder with the highest number."""
    from ckpt_chaos.targets import accelerate_loop as target

    from replicated_ckpt.integrations.accelerate import ReplicatedAccelerator

    made: list[ReplicatedAccelerator] = []

    def make(**arguments: Any) -> ReplicatedAccelerator:
        made.append(ReplicatedAccelerator(**arguments, replicated_root=_root(), writer_options=_writer_options()))
        return made[0]

    target.Accelerator = make
    target.latest_checkpoint = lambda out: made[0].load_state()  # the program loads this name again
    target.main()


def dcp_ddp() -> None:
    """DCP: adds `storage_writer` and `storage_reader`, and loads the newest complete checkpoint as "latest"."""
    import torch.distributed.checkpoint as dcp
    from ckpt_chaos.targets import dcp_ddp as target

    from replicated_ckpt import ReplicatedReader, ReplicatedWriter

    @cache
    def writer() -> ReplicatedWriter:
        return ReplicatedWriter(_root(), **_writer_options())

    def save(state: dict[str, Any], checkpoint_id: str) -> None:
        dcp.save(state, checkpoint_id=Path(checkpoint_id).name, storage_writer=writer())

    def load(state: dict[str, Any], checkpoint_id: str) -> None:
        dcp.load(state, checkpoint_id=checkpoint_id, storage_reader=ReplicatedReader(_root()))

    target.dcp = SimpleNamespace(save=save, load=load)
    target.latest_checkpoint = lambda out: "latest"
    target.main()


def loop_ddp() -> None:
    """A plain loop: CheckpointManager replaces `torch.save`."""
    from ckpt_chaos.targets import loop_ddp as target
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    from replicated_ckpt import CheckpointManager

    @cache
    def manager() -> CheckpointManager:
        return CheckpointManager(_root(), every=target.SAVE_EVERY, **_writer_options())

    def state_of(model: Any, optimizer: Any) -> dict[str, Any]:
        return dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))

    def save(out: str, step: int, model: Any, optimizer: Any) -> None:
        manager().save(step, state_of(model, optimizer))

    def load(checkpoint: None, model: Any, optimizer: Any) -> int:
        state = state_of(model, optimizer)
        step = manager().restore(state)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        return step or 0

    target.save_checkpoint, target.load_checkpoint = save, load
    target.latest_checkpoint = lambda out: None
    target.main()
    manager().close()


TARGETS: dict[str, Callable[[], None]] = {
    each.__name__: each for each in (hf_trainer, lightning_trainer, accelerate_loop, dcp_ddp, loop_ddp)
}


def main() -> None:
    TARGETS[os.environ["CHAOS_TARGET"]]()
