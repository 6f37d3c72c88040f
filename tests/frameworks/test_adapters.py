"""Models with PEFT's adapters: a checkpoint has the adapter alone, or the base too. Training resumes from both."""

import os
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard

from replicated_ckpt.stores.local.store import LocalStore
from tests.agent.checkpoints import findings
from tests.frameworks.jobs import check_same, run_both
from tests.frameworks.running import require
from tests.harness.processes import end, processes_of

pytestmark = [pytest.mark.multiprocess, pytest.mark.long, pytest.mark.timeout(900)]

LENGTH = 8
STEPS, SAVED_AT = 6, 4
Fit = Callable[..., dict[str, torch.Tensor]]


def adapted(seed: int = 0, base: int = 1) -> Any:
    """GPT-2 of 17 MB with dropout and tied embeddings, from the seed `base`, and LoRA from `seed`."""
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    size = {"vocab_size": 4000, "n_positions": LENGTH, "n_embd": 256, "n_layer": 4, "n_head": 2}
    torch.manual_seed(base)
    model = GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0))
    torch.manual_seed(seed)
    config = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.1, bias="lora_only")
    tuned = get_peft_model(model, config)
    with torch.no_grad():
        for parameter in tuned.parameters():
            if parameter.requires_grad:  # PEFT's lora_B and GPT-2's biases begin at zero
                parameter.add_(torch.randn_like(parameter), alpha=0.01)
    return tuned


def samples() -> Any:
    tokens = [(torch.arange(LENGTH) + 7 * index) % 4000 for index in range(24)]
    return [{"input_ids": each, "labels": each} for each in tokens]


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    """The weights by their names in PEFT's model, also if that is a part of `model`."""
    state: dict[str, Any] = get_model_state_dict(model)
    full = {name: each.full_tensor() if hasattr(each, "full_tensor") else each for name, each in state.items()}
    return {name[name.index("base_model.") :]: each.detach().clone() for name, each in full.items()}


def fit_with_trainer(root: Path, model: Any, steps: int, rate: float = 1e-2, **options: Any) -> dict[str, torch.Tensor]:
    """Resumes from the newest checkpoint, trains to step `steps`, and saves at its usual steps."""
    from transformers import TrainingArguments

    from replicated_ckpt.integrations.transformers import ReplicatedTrainer

    arguments = TrainingArguments(
        output_dir=str(root / "out"),
        max_steps=steps,
        save_strategy="steps",
        save_steps=SAVED_AT,
        per_device_train_batch_size=2,
        learning_rate=rate,
        lr_scheduler_type="constant",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = ReplicatedTrainer(
        model=model,
        args=arguments,
        train_dataset=samples(),
        replicated_root=root / "store",
        writer_options={"copies": 1},
        **options,
    )
    trainer.train(resume_from_checkpoint=True)
    return weights_of(model)


def fit_with_accelerate(
    root: Path, model: Any, steps: int, rate: float = 1e-2, **options: Any
) -> dict[str, torch.Tensor]:
    """As `fit_with_trainer`."""
    from replicated_ckpt.integrations.accelerate import ReplicatedAccelerator

    torch.manual_seed(3)
    given: dict[str, Any] = {"replicated_root": root / "store", "writer_options": {"copies": 1}, **options}
    accelerator = ReplicatedAccelerator(cpu=True, **given)
    loader: Any = torch.utils.data.DataLoader(samples(), batch_size=2, shuffle=True)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], rate)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    loaded = accelerator.load_state()
    for step, batch in enumerate(loader, start=1 if loaded is None else 1 + int(loaded.rpartition("-")[2])):
        if step > steps:
            break
        accelerator.backward(prepared(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
        if step == SAVED_AT:
            accelerator.save_state(f"checkpoint-{step}")
    accelerator.end_training()
    return weights_of(model)


def fit_with_lightning(
    root: Path, model: Any, steps: int, rate: float = 1e-2, *, shards: bool = False, **options: Any
) -> dict[str, torch.Tensor]:
    """As `fit_with_trainer`, under FSDP2 or DDP. PEFT's model is a part of the module."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.plugins.environments import LightningEnvironment

    from replicated_ckpt.integrations.lightning import ReplicatedDDPStrategy, ReplicatedModelParallelStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def configure_model(self) -> None:
            if shards and not isinstance(self.net, FSDPModule):
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], rate)

    given: dict[str, Any] = {"root": root / "store", "writer_options": {"copies": 1}, **options}
    if shards:
        strategy: Any = ReplicatedModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=1, **given)
    else:
        strategy = ReplicatedDDPStrategy(find_unused_parameters=True, **given)
    trainer = lightning.Trainer(
        max_steps=steps,
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        plugins=[LightningEnvironment()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(root / "store", "checkpoint-{step}", every_n_train_steps=SAVED_AT)],
    )
    torch.manual_seed(3)
    loader: Any = torch.utils.data.DataLoader(samples(), batch_size=2, shuffle=True)
    module = Module()
    trainer.fit(module, loader, ckpt_path="latest")
    return weights_of(module)


@pytest.fixture(params=["transformers", "accelerate", "lightning", "lightning, fsdp2"])
def fit(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Fit]:
    """A training program of each framework. At the end its checkpoints must be whole, and its agent is stopped."""
    for module in ("peft", "transformers", request.param.partition(",")[0]):
        require(module)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    fits: dict[str, Fit] = {
        "transformers": fit_with_trainer,
        "accelerate": fit_with_accelerate,
        "lightning": fit_with_lightning,
        "lightning, fsdp2": partial(fit_with_lightning, shards=True),
    }
    try:
        with patch.dict(
            os.environ, MASTER_ADDR="127.0.0.1", MASTER_PORT=port
        ):  # undoes Lightning's changes to the environment, too
            yield fits[request.param]
        stores = list(tmp_path.rglob("store"))
        assert stores
        assert [findings(LocalStore(store)) for store in stores] == [[]] * len(stores)
    finally:
        end(processes_of(str(tmp_path)))
        if dist.is_initialized():
            dist.destroy_process_group()


def bytes_in(root: Path) -> int:
    (checkpoint,) = (path.parent for path in (root / "store").glob("checkpoint-*4*/.metadata"))
    return sum(path.stat().st_size for path in checkpoint.iterdir() if path.is_file())


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], kind: str = "") -> bool:
    """Whether the weights with `kind` in their name have the same bits."""
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one if kind in name)


@pytest.mark.parametrize(("options", "share"), [({}, (0, 0.03)), ({"adapter_only": False}, (1, 1.03))])
def test_training_resumes_from_the_adapter_or_from_all(
    tmp_path: Path, fit: Fit, options: dict[str, Any], share: tuple[float, float]
) -> None:
    """By default a checkpoint has at most 3 % of the model's bytes. The resumed run ends as the undisturbed one."""
    begun = weights_of(adapted())
    size = sum(each.nbytes for each in begun.values())
    undisturbed = fit(tmp_path / "undisturbed", adapted(), STEPS, **options)
    fit(tmp_path / "resumed", adapted(), SAVED_AT, **options)
    # PEFT initialises another adapter. The base is the same.
    resumed = fit(tmp_path / "resumed", adapted(seed=5), STEPS, **options)
    assert not same(begun, undisturbed, "lora_B")
    assert same(undisturbed, resumed)
    assert share[0] <= bytes_in(tmp_path / "resumed") / size <= share[1]


@pytest.mark.parametrize(
    ("program", "options", "by", "begins"),
    [
        ("trainer_program.py", (), ("step", "index"), {"step": 9, "epoch": 1.5}),
        ("accelerate_program.py", ("--sharded",), ("step",), {"step": 9}),
    ],
    ids=["trainer, ddp", "accelerate, fsdp2"],
)
def test_an_adapter_outlives_a_node(
    tmp_path: Path, program: str, options: tuple[str, ...], by: tuple[str, ...], begins: dict[str, float]
) -> None:
    """Four ranks on two nodes are killed and a node is lost: the run resumes bit for bit from an adapter's checkpoint."""
    for module in ("peft", "transformers", "accelerate"):
        require(module)
    with run_both(program, tmp_path, 10, (*options, "--lora")) as (undisturbed, disturbed):
        check_same(undisturbed, disturbed, by, begins)
        for root in (disturbed.root(0), disturbed.root(1)):
            (metadata, *_) = root.rglob("checkpoint-12/.metadata")
            saved = FileSystemReader(metadata.parent).read_metadata().state_dict_metadata
            weights = {name for name in saved if name.startswith("model")}
            assert weights
            assert {name for name in weights if "lora_" not in name} == set()
            assert findings(LocalStore(metadata.parent.parent)) == []


@pytest.mark.parametrize("saved_whole", [False, True])
def test_a_load_takes_what_the_checkpoint_has(tmp_path: Path, fit: Fit, saved_whole: bool) -> None:
    """The load uses the other value of `adapter_only`: it loads the base if the checkpoint has it, and else leaves it."""
    # The rate is 0, because Trainer takes one more step even after the last one.
    saved = fit(tmp_path, adapted(), SAVED_AT, rate=0, adapter_only=not saved_whole)
    other = adapted(seed=5, base=2)
    before = weights_of(other)
    loaded = fit(tmp_path, other, SAVED_AT, rate=0, adapter_only=saved_whole)
    assert not same(before, saved, "wte")
    assert same(loaded, saved, "lora_")
    assert same(loaded, saved if saved_whole else before, "wte")
    assert same(loaded, saved, "c_attn.base_layer.bias")  # trained, because of bias="lora_only"


def test_trained_and_adapter_weights_are_not_in_the_base() -> None:
    """A frozen second adapter, copies, trained base weights, buffers and parts outside of PEFT's model are saved."""
    require("peft")
    from peft import LoraConfig, get_peft_model

    from replicated_ckpt.integrations.model_state import find_base

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.head = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> Any:
            return self.head(self.norm(self.first(x)))

    tuned: Any = get_peft_model(Net(), LoraConfig(target_modules=["first"], modules_to_save=["head"]))
    tuned.add_adapter("reference", LoraConfig(target_modules=["first"]))
    tuned.base_model.model.norm.bias.requires_grad_(True)
    tower = nn.Linear(3, 3).requires_grad_(False)
    whole: Any = nn.ModuleDict({"default": tuned, "tower": tower})
    whole.peft_config = {"r": 8}  # an attribute of the user
    prefix = "default.base_model.model."
    frozen = {"first.base_layer.weight", "first.base_layer.bias", "norm.weight"}
    frozen |= {"head.original_module.weight", "head.original_module.bias"}
    assert find_base(whole) == {prefix + name for name in frozen}
    assert find_base(whole) < get_model_state_dict(whole).keys()
    compiled: Any = torch.compile(whole)
    assert find_base(compiled) == find_base(whole)
    assert find_base(tower) == set()


def test_a_base_of_transformers_own_adapters_is_found() -> None:
    """After `model.add_adapter` there is no PeftModel. Both names of tied embeddings are in the base."""
    require("peft")
    require("transformers")
    from peft import LoraConfig, inject_adapter_in_model
    from transformers import GPT2Config, GPT2LMHeadModel

    from replicated_ckpt.integrations.model_state import drop_base

    model = GPT2LMHeadModel(GPT2Config(vocab_size=10, n_positions=4, n_embd=4, n_layer=1, n_head=1))
    # add_adapter calls this function, but that of transformers 5.24 needs an unreleased PEFT.
    inject_adapter_in_model(LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True), model)
    prefix = "transformer.h.0.attn.c_attn.lora_"
    kept = drop_base(model, get_model_state_dict(model))
    assert kept.keys() == {f"{prefix}A.default.weight", f"{prefix}B.default.weight"}


@pytest.mark.parametrize("adapter_only", [True, False])
def test_a_base_of_four_bits_stays_as_it_is(tmp_path: Path, adapter_only: bool) -> None:
    """QLoRA: bitsandbytes adds constants to the state dict that torch cannot set. Adapters load with and without them."""
    require("accelerate")
    require("peft")
    require("bitsandbytes")
    from bitsandbytes.nn import Linear4bit
    from peft import LoraConfig, get_peft_model

    from replicated_ckpt.integrations.accelerate import ReplicatedAccelerator

    options: dict[str, Any] = {"replicated_root": tmp_path, "writer_options": {"copies": 1}}
    accelerator = ReplicatedAccelerator(cpu=True, adapter_only=adapter_only, **options)
    quantized = nn.Sequential(Linear4bit(64, 64)).to("cpu")
    model: Any = accelerator.prepare(get_peft_model(quantized, LoraConfig(target_modules=["0"])))
    saved = weights_of(model)
    assert any(name.endswith(".absmax") for name in saved)
    try:
        accelerator.save_state("one")
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.fill_(7)
        assert accelerator.load_state() == "one"
        assert same(weights_of(model), saved)
        names = FileSystemReader(tmp_path / "one").read_metadata().state_dict_metadata
        assert any(name.endswith(".absmax") for name in names) is not adapter_only
        assert findings(LocalStore(tmp_path)) == []
        accelerator.end_training()
    finally:
        end(processes_of(str(tmp_path)))


def test_a_model_without_values_needs_its_base() -> None:
    """A base on the meta device would stay without values: an adapter's checkpoint raises, with the next step."""
    require("peft")
    from torch.distributed.checkpoint.metadata import Metadata

    from replicated_ckpt.errors import ConfigInvalid
    from replicated_ckpt.integrations.model_state import AdapterPlanner, drop_base

    with torch.device("meta"):
        model = adapted()
    state = get_model_state_dict(model)
    planner = AdapterPlanner({"model": model})
    saved = {f"model.{name}": value for name, value in drop_base(model, state).items()}
    with pytest.raises(ConfigInvalid, match="only the adapter") as refused:
        planner.set_up_planner({"model": state}, Metadata(saved))
    assert "from_pretrained" in refused.value.hint
