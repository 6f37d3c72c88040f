"""The examples of other frameworks, on two real nodes: stopped, one lost, resumed, and held against an undisturbed run."""

import shutil
from pathlib import Path

import pytest

from replicated_ckpt.stores.local import LocalStore
from tests.agent.checkpoints import findings
from tests.frameworks.running import EVERY, STEPS, contents, lines, require, run
from tests.multiprocess.processes import end, processes_of

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("module", "script"),
    [
        ("accelerate", "accelerate_fsdp2.py"),
        ("transformers", "hf_trainer.py"),
        ("lightning", "lightning_callback.py"),
        ("torch", "torchtitan_style.py"),
    ],
)
def test_it_goes_on_after_the_loss_of_a_node(tmp_path: Path, module: str, script: str) -> None:
    """Half way a node's store is deleted; what the resumed run says of its later steps is what an undisturbed one says."""
    require(module)
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
        assert (node / f"step-{STEPS}" / ".metadata").exists()
        assert findings(LocalStore(node)) == []
