"""The examples of other frameworks on two nodes: after a node loss, their runs equal undisturbed ones."""

import json
import shutil
from pathlib import Path

import pytest
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from replicated_ckpt.cli.main import main
from replicated_ckpt.stores.local.store import LocalStore
from tests.agent.checkpoints import findings
from tests.frameworks.running import EVERY, STEPS, contents, lines, require, run
from tests.harness.processes import end, processes_of

pytestmark = [pytest.mark.multiprocess, pytest.mark.long, pytest.mark.timeout(600)]


def run_with_a_lost_store(tmp_path: Path, script: str) -> dict[int, str]:
    """The second node's store is deleted halfway. The resumed run must end as an undisturbed one. Returns its steps'
    output.
    """
    nodes = [tmp_path / "node-0", tmp_path / "node-1"]
    try:
        first = run(script, nodes, EVERY)
        shutil.rmtree(nodes[1])
        second = run(script, nodes, STEPS)
        undisturbed = run(script, [tmp_path / "whole-0", tmp_path / "whole-1"], STEPS)
    finally:
        end(processes_of(str(tmp_path)))
    assert "starting at step 0 on 2 ranks" in first
    assert f"starting at step {EVERY} on 2 ranks" in second
    assert {**lines(first), **lines(second)} == lines(undisturbed)
    assert sorted(lines(undisturbed)) == [EVERY, STEPS]
    assert contents(nodes[0], STEPS) == contents(tmp_path / "whole-0", STEPS)
    for node in nodes:
        assert len(list(node.glob(f"*[-=]{STEPS}*/.metadata"))) == 1
        assert findings(LocalStore(node)) == []
    return lines(second)


@pytest.mark.parametrize(
    ("module", "script"),
    [
        ("accelerate", "accelerate_fsdp2.py"),
        ("transformers", "hf_trainer.py"),
        ("lightning", "lightning_strategy.py"),
        ("torch", "torchtitan_style.py"),
    ],
)
def test_an_example_resumes_after_a_node_loss(tmp_path: Path, module: str, script: str) -> None:
    """The resumed run prints the same for its later steps as an undisturbed run."""
    require(module)
    run_with_a_lost_store(tmp_path, script)


def test_trl_resumes_and_exports_safetensors(tmp_path: Path) -> None:
    """SFTTrainer with FSDP2 resumes. The blank node exports the trained model in files of limited size."""
    require("trl")
    printed = run_with_a_lost_store(tmp_path, "trl_sft.py")
    store, whole = tmp_path / "node-1", tmp_path / "model"
    written = FileSystemReader(store / f"checkpoint-{STEPS}").read_metadata().state_dict_metadata
    weights = {name.removeprefix("model."): entry for name, entry in written.items() if name.startswith("model.")}
    assert all(isinstance(entry, TensorStorageMetadata) and len(entry.chunks) == 2 for entry in weights.values())

    export = ["export", f"checkpoint-{STEPS}", "--root", str(store), "--to", "safetensors", str(whole)]
    choose = ["--include", "model.*", "--strip-prefix", "model.", "--shard-size-limit", "20kB"]
    assert main([*export, *choose]) == 0
    load_file = pytest.importorskip("safetensors.torch").load_file
    tensors = {name: tensor for file in whole.glob("*.safetensors") for name, tensor in load_file(file).items()}
    index = json.loads((whole / "model.safetensors.index.json").read_text())
    assert set(tensors) == set(index["weight_map"]) == set(weights)
    total = sum(float(tensor.double().abs().sum()) for tensor in tensors.values())
    assert printed[STEPS] == f"sum of weights {total:.6f}, saved"
