"""Trainer with our mixin: after a kill and a node loss, a run ends with the same bits as an undisturbed one."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from replicated_ckpt.dcp.rank_state import rank_state
from replicated_ckpt.errors import ObjectUnsafe, ReplicatedCkptWarning
from replicated_ckpt.stores.local.store import LocalStore
from tests.agent.agents import wait_for
from tests.agent.checkpoints import findings
from tests.frameworks.jobs import Job, check_same, preempt, raise_in_a_step, run_both
from tests.frameworks.running import require
from tests.harness.processes import end, processes_of

pytestmark = [pytest.mark.multiprocess, pytest.mark.long, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("hold_at", "begins"),
    [(9, {"step": 9, "epoch": 1.5}), (13, {"step": 13, "epoch": 2 + 1 / 6})],
    ids=["in an epoch", "at an epoch's end"],
)
def test_trainer_resumes_after_a_node_loss(tmp_path: Path, hold_at: int, begins: dict[str, float]) -> None:
    """Schedule, accumulation, dropout, shuffling, best model, callbacks: logs and weights have the same bits."""
    require("transformers")
    with run_both("trainer_program.py", tmp_path, hold_at) as (undisturbed, disturbed):
        check_same(undisturbed, disturbed, ("step", "index"), begins)
        assert undisturbed.lines(0)[-2]["of"] == 4
        kept = [job.root(node) / "store" / "checkpoint-4" for job in (undisturbed, disturbed) for node in (0, 1)]
        assert [path.exists() for path in kept] == [True] * 4


@pytest.mark.parametrize("disturb", [raise_in_a_step, preempt])
def test_trainer_resumes_after_an_exception_or_sigterm(tmp_path: Path, disturb: Callable[[Job, int], None]) -> None:
    """One rank raises in its step, or all get SIGTERM: logs, weights and the scaler's scale have the same bits."""
    require("transformers")
    job = run_both("trainer_program.py", tmp_path, 9, ("--scaled",), disturb=disturb, ranks=1)
    with job as (undisturbed, disturbed):
        check_same(undisturbed, disturbed, ("step", "index"), {"step": 9, "index": 0})
        assert len({line["scale"] for line in undisturbed.lines(0) if "scale" in line}) > 2


def scored(root: Path, scores: tuple[int, ...], *, loads_best: bool) -> Any:
    """A trainer in one process that saves each step, keeps one checkpoint, and evaluates to `scores`."""
    from transformers import TrainingArguments

    from replicated_ckpt.integrations.transformers import ReplicatedTrainer

    class Model(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return {"loss": super().forward(x).square().mean()}

    class Scored(ReplicatedTrainer):
        def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
            metrics: dict[str, float] = {"eval_accuracy": scores[self.state.global_step - 1]}
            self.log(metrics)
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
            return metrics

    every: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    best: dict[str, Any] = {"metric_for_best_model": "accuracy", "load_best_model_at_end": loads_best}
    out: dict[str, Any] = {"output_dir": str(root / "out"), "report_to": [], "use_cpu": True, "disable_tqdm": True}
    return Scored(
        model=Model(2, 2),
        args=TrainingArguments(max_steps=len(scores), save_total_limit=1, **every, **best, **out),
        train_dataset=[{"x": torch.ones(2)}] * 4,
        eval_dataset=[{"x": torch.ones(2)}],
        replicated_root=root / "store",
        writer_options={"copies": 1},
    )


@pytest.mark.parametrize(
    ("before", "scores", "loads_best"),
    [((), (5, 5, 5), True), ((), (9, 5, 5), False), ((1, 1, 9), (5, 4, 4), True)],
    ids=["equals", "only named", "an earlier run was better"],
)
def test_retention_keeps_trainers_best_checkpoint(
    tmp_path: Path, before: tuple[int, ...], scores: tuple[int, ...], loads_best: bool
) -> None:
    """The first of equal scores is kept, also if Trainer only names a metric and loads no best model at the end."""
    require("transformers")
    try:
        for now in filter(None, (before, scores)):
            trainer = scored(tmp_path, now, loads_best=loads_best)
            trainer.train()
        assert trainer.state.best_global_step == 1
        wait_for(lambda: not (tmp_path / "store" / "checkpoint-2").exists(), 30, "retention")
        kept = (tmp_path / "store").glob("checkpoint-*")
        assert sorted(path.name for path in kept) == ["checkpoint-1", "checkpoint-3"]
    finally:
        end(processes_of(str(tmp_path)))


def test_counters_unknown_to_this_trainer_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Newer versions of Trainer have more counters. An older one saves without them, and both resume."""
    require("transformers")
    from replicated_ckpt.integrations import transformers

    counters, totals = transformers._COUNTERS, []
    try:
        for step, known in enumerate([(*counters, "_of_a_newer_version"), counters], start=1):
            monkeypatch.setattr(transformers, "_COUNTERS", known)
            trainer = scored(tmp_path, (5,) * step, loads_best=False)
            trainer.train(resume_from_checkpoint=True)
            assert trainer.state.global_step == step
            totals.append(trainer._total_loss_scalar)
        assert 0 < totals[0] < totals[1]
        assert findings(LocalStore(tmp_path / "store")) == []
    finally:
        end(processes_of(str(tmp_path)))


def test_trainer_reads_no_foreign_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user who can write the checkpoint adds weights, or a schedule that runs code: Trainer reads neither."""
    require("transformers")
    from replicated_ckpt.integrations.directory_files import collect_files

    trainer = scored(tmp_path, (5,), loads_best=False)
    more = {"model.safetensors": b"", "optimizer.pt": b"", "rng_state_0/x.pth": b""}
    collects = "replicated_ckpt.integrations.transformers.collect_files"
    monkeypatch.setattr(collects, lambda directory: {**collect_files(directory), **more})
    try:
        trainer.train()
        trainer._restore_files("checkpoint-1", tmp_path / "a")
        written = {"scheduler.pt", "trainer_state.json", "rng_state.pth"}
        assert {path.name for path in (tmp_path / "a").iterdir()} == written
        more["scheduler.pt"] = b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R."
        trainer.train()
        with pytest.raises(ObjectUnsafe, match="scheduler"):
            trainer._restore_files("checkpoint-1", tmp_path / "b")
        assert not (tmp_path / "b").exists()
        trainer._close()
    finally:
        end(processes_of(str(tmp_path)))


def test_generators_stay_with_another_number_of_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0's generators stay too, as the warning says. Trainer gets no path of a best checkpoint that it could not
    find.
    """
    require("transformers")
    trainer = scored(tmp_path, (5,), loads_best=True)
    try:
        trainer.train()
        for world, more in ((1, {"rng_state.pth"}), (2, set())):
            monkeypatch.setattr(rank_state, "rank_and_world", lambda world=world: (0, world))
            directory = tmp_path / str(world)
            directory.mkdir()
            with pytest.warns(ReplicatedCkptWarning) if world == 2 else contextlib.nullcontext():
                trainer._restore_files("checkpoint-1", directory)
            assert {each.name for each in directory.iterdir()} == {"scheduler.pt", "trainer_state.json", *more}
            state = json.loads((directory / "trainer_state.json").read_text())
            assert (state.get("best_model_checkpoint"), Path(trainer._best_path).name) == (None, "checkpoint-1")
        trainer._close()
    finally:
        end(processes_of(str(tmp_path)))


@pytest.mark.parametrize(("restores", "ends_at"), [(True, 4), (False, 5)])
def test_early_stopping_resumes_its_count_with_trainers_option(tmp_path: Path, restores: bool, ends_at: int) -> None:
    """Patience of 3 and a best first step: with `restore_callback_states_from_checkpoint` the count resumes at 1."""
    require("transformers")
    from transformers import EarlyStoppingCallback

    try:
        for scores in ((9, 5), (9, 5, 5, 5, 5, 5, 5)):
            trainer = scored(tmp_path, scores, loads_best=True)
            trainer.args.restore_callback_states_from_checkpoint = restores
            trainer.add_callback(EarlyStoppingCallback(3))
            trainer.train(resume_from_checkpoint=True)
        assert trainer.state.global_step == ends_at
        assert findings(LocalStore(tmp_path / "store")) == []
    finally:
        end(processes_of(str(tmp_path)))


def tuned(root: Path, steps: int) -> Any:
    """trl's SFTTrainer of a small model, which logs every third step and saves every second."""
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
    from trl import SFTConfig, SFTTrainer

    from replicated_ckpt.integrations.transformers import ReplicatedTrainerMixin

    class ReplicatedSFTTrainer(ReplicatedTrainerMixin, SFTTrainer):
        """As on the documentation page."""

    words = Tokenizer(WordLevel({"<pad>": 0, "</s>": 1}, unk_token="<pad>"))
    size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    set_seed(1)
    out: dict[str, Any] = {"output_dir": str(root / "out"), "report_to": [], "use_cpu": True, "disable_tqdm": True}
    return ReplicatedSFTTrainer(
        model=LlamaForCausalLM(LlamaConfig(vocab_size=50, **size)),
        args=SFTConfig(
            max_steps=steps,
            per_device_train_batch_size=2,
            logging_steps=3,
            save_steps=2,
            lr_scheduler_type="constant",
            bf16=False,
            **out,
        ),
        train_dataset=Dataset.from_dict({"input_ids": [list(range(2, 5 + index)) for index in range(24)]}),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>"),
        replicated_root=root / "store",
        writer_options={"copies": 1},
    )


def test_trls_log_counters_resume(tmp_path: Path) -> None:
    """A run resumed between two logs reports the same tokens seen and averages as an undisturbed run."""
    require("trl")
    logged = []
    try:
        for root, parts in ((tmp_path / "undisturbed", (6,)), (tmp_path / "resumed", (4, 6))):
            for steps in parts:
                trainer = tuned(root, steps)
                trainer.train(resume_from_checkpoint=True)
            (last,) = (each for each in trainer.state.log_history if each["step"] == 6 and "loss" in each)
            logged.append({name: value for name, value in last.items() if not name.endswith("time")})
        assert logged[0].keys() >= {"num_tokens", "mean_token_accuracy", "entropy"}
        assert logged[1] == logged[0]
        assert findings(LocalStore(tmp_path / "resumed" / "store")) == []
    finally:
        end(processes_of(str(tmp_path)))
