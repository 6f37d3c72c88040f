"""Code in the documents: each block of Python or shell runs here, or has a reason why it does not."""

import contextlib
import io
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import AsyncStager

import replicated_ckpt
from replicated_ckpt import ReplicatedReader, ReplicatedWriter
from tests.agent.agents import stop_agent
from tests.docs.test_docs import DOCUMENTS, ROOT, text_of
from tools.readme_job import alone_on

RUN_HERE = {
    "README.md",
    "docs/async.md",
    "docs/getting-started.md",
    "docs/migrating.md",
    "docs/object-store.md",
    "docs/rank-state.md",
    "docs/reference.md",
    "docs/runbook.md",
}
HELD_ELSEWHERE = {  # document -> the test that runs its commands
    "examples/README.md": "tests/multiprocess/test_examples.py",
    "benchmarks/README.md": "tests/benchmarks",
}
RUNNABLE, NOT_RUN = "runnable", "not run: "

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),  # DCP says that there is no process group
    pytest.mark.filterwarnings("ignore:.*1 node:replicated_ckpt.errors.ReplicatedCkptWarning"),
]


@dataclass(frozen=True)
class Block:
    """A fenced block. `mark` is the HTML comment on the line before it, or empty."""

    mark: str
    language: str
    code: str

    @property
    def is_marked(self) -> bool:
        if self.language == "text":
            return True
        return self.mark == RUNNABLE or (self.mark.startswith(NOT_RUN) and len(self.mark) > len(NOT_RUN))


@pytest.fixture(autouse=True)
def stop_agents(tmp_path: Path) -> Iterator[None]:
    """Stops the agents that examples start."""
    yield
    for endpoint in tmp_path.glob("*/.agent/endpoint.json"):
        stop_agent(endpoint.parents[1])


def blocks_of(text: str) -> Iterator[Block]:
    for mark, language, code in re.findall(
        r"(?:^<!-- ([^\n]*) -->\n)?^ *```(\w*)[^\n]*\n(.*?)^ *```$", text, flags=re.DOTALL | re.MULTILINE
    ):
        yield Block(mark, language, code)


def runnable_code(document: str) -> list[str]:
    return [block.code for block in blocks_of(text_of(document)) if block.mark == RUNNABLE]


def run(document: str, folder: Path, **yours: object) -> dict[str, object]:
    """Runs a document's blocks in turn, with the paths replaced. `yours` are the names that the user's program has
    already.
    """
    names: dict[str, object] = yours
    for code in runnable_code(document):
        placed = re.sub('"/(nvme|tmp)/', f'"{folder}/', code).replace("s3://bucket", f"file://{folder}/bucket")
        exec(placed, names)
    return names


@pytest.mark.parametrize("document", [name for name in DOCUMENTS if name not in HELD_ELSEWHERE])
def test_each_block_is_run_or_has_a_reason(document: str) -> None:
    """A block without a mark is an error, and so is a runnable block in a document that is not run."""
    blocks = list(blocks_of(text_of(document)))
    assert [block for block in blocks if not block.is_marked] == []
    assert any(block.mark == RUNNABLE for block in blocks) == (document in RUN_HERE)
    assert all(block.language == "python" for block in blocks if block.mark == RUNNABLE)


def test_no_root_of_the_pages_lies_in_another_one() -> None:
    """A reader may follow all pages on one node, and a store inside another one is refused."""
    named = re.compile(
        r"""(?:--root[ =]"?|ROOT=|NODE_DISK=|root="|save="|(?:tedWriter|tedReader|Manager)\(")(/[\w/-]+)"""
    )
    roots = {root for document in [*DOCUMENTS, "examples/README.md"] for root in named.findall(text_of(document))}
    assert {"/tmp/first-run", "/tmp/ckpt/node-", "/nvme/ckpt"} <= roots
    assert [(inner, outer) for inner in roots for outer in roots if inner.startswith(f"{outer}/")] == []


@pytest.mark.parametrize("mark", ["", "<!-- not run: -->\n", "<!-- not run:  -->\n", "<!-- some comment -->\n"])
def test_a_block_without_a_reason_is_found(mark: str) -> None:
    """Shows that the test above can fail."""
    (block,) = blocks_of(f"text\n\n{mark}```sh\nrm -r /\n```\n")
    assert not block.is_marked


def test_the_tutorial_runs_twice(tmp_path: Path) -> None:
    """In the second run the checkpoint exists already, as the page shows."""
    for _ in range(2):
        with contextlib.redirect_stdout(io.StringIO()) as output:
            names = run("docs/getting-started.md", tmp_path)
        assert_loaded(names, "step-1000")
        assert names["saved_before"] is True
        assert "rank 0: CheckpointExists: Checkpoint already exists: 'step-1000'" in output.getvalue()


def test_the_asynchronous_save_runs(tmp_path: Path) -> None:
    """The writer is the stager, and the checkpoint exists when the future is done."""
    names = run("docs/async.md", tmp_path)
    state = {"step": 0}
    dcp.load(state, checkpoint_id="step-1000", storage_reader=ReplicatedReader(tmp_path / "ckpt", expect_partial=True))
    assert state == {"step": 1000}
    assert isinstance(names["writer"], AsyncStager)


def test_the_readmes_job_resumes_where_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job saves every 100 steps up to its last one. A second run restores model and optimizer, and trains no
    further.
    """
    for name, value in alone_on(tmp_path / "first-run").items():
        monkeypatch.setenv(name, value)
    weights = []
    for _ in range(2):
        try:
            names = run("README.md", tmp_path)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        model, optimizer = names["model"], names["optimizer"]
        assert isinstance(model, torch.nn.Module)
        assert isinstance(optimizer, torch.optim.AdamW)
        assert names["step"] == 300
        assert [int(moments["step"]) for moments in optimizer.state.values()] == [300, 300]
        weights.append([value.to_local() for value in model.state_dict().values()])
        saved = {path.parent.name for path in (tmp_path / "first-run").glob("*/.metadata")}
        assert {"step-100", "step-200", "step-300"} <= saved
    assert all(torch.equal(first, second) for first, second in zip(*weights, strict=True))


@pytest.mark.parametrize("steps", [250, 300])
def test_the_references_loop_and_cached_plans_run(tmp_path: Path, caplog: pytest.LogCaptureFixture, steps: int) -> None:
    """The manager saves every 100 steps and resumes, a cached planner saves, and the log has its line."""
    state = {"step": 0}

    def train_step(_: object) -> int:
        state["step"] += 1
        return state["step"]

    writer = ReplicatedWriter(tmp_path / "own")
    ours = {name: getattr(replicated_ckpt, name) for name in replicated_ckpt.__all__}
    yours = ours | {"dcp": dcp, "logging": logging, "state": state, "writer": writer}
    run("docs/reference.md", tmp_path, steps=steps, train_step=train_step, **yours)
    assert {path.parent.name for path in tmp_path.glob("*/*/.metadata")} >= {"step-100", "step-200"}
    assert (tmp_path / "own" / "step-200" / ".metadata").exists()
    dcp.save(state, checkpoint_id="step-201", storage_writer=writer)
    assert "saved step-201 (save " in caplog.text
    logging.getLogger("replicated_ckpt").setLevel(logging.NOTSET)


def test_a_stock_checkpoint_loads_and_is_converted_as_the_page_on_migrating_says(tmp_path: Path) -> None:
    """It loads with one changed line, from the directory above the checkpoint. Then the example exports, imports and
    loads.
    """
    dcp.save({"a": torch.ones(3)}, checkpoint_id=tmp_path / "ckpt" / "step-10")
    state = {"a": torch.zeros(3)}
    with pytest.warns(replicated_ckpt.ReplicatedCkptWarning, match="step-10 has no manifest: stock torch wrote it"):
        run("docs/migrating.md", tmp_path, dcp=dcp, ReplicatedReader=ReplicatedReader, state=state)
    assert state["a"].tolist() == [1, 1, 1]
    assert (tmp_path / "weights.pth").exists()


def test_the_state_of_a_rank_is_saved_as_its_page_says(tmp_path: Path) -> None:
    """The example runs an epoch of its loader. The manager finds no checkpoint to restore."""
    data, app = torch.utils.data.TensorDataset(torch.arange(96)), {"w": torch.ones(2)}
    names = run("docs/rank-state.md", tmp_path, DataLoader=torch.utils.data.DataLoader, data=data, app=app)
    assert names["step"] == 0
    assert len(names["batch"][0]) == 32  # type: ignore[index]


def assert_loaded(names: dict[str, object], checkpoint_id: str) -> None:
    reader = names["reader"]
    assert isinstance(reader, ReplicatedReader)
    assert reader.last_load is not None
    assert reader.last_load.checkpoint_id == checkpoint_id


def test_the_object_stores_examples_run(tmp_path: Path) -> None:
    """After `wait` the bucket has the checkpoint, and stock torch loads it from there."""
    assert 'writer.wait(ack="object")' in runnable_code("docs/object-store.md")[0]
    run("docs/object-store.md", tmp_path)
    state = {"model": torch.arange(4)}
    dcp.load(state, storage_reader=dcp.FileSystemReader(tmp_path / "bucket" / "run-42" / "step-1000"))
    assert state["model"].tolist() == [4, 3, 2, 1]


@pytest.mark.timeout(400)
def test_the_example_of_a_custom_tier_keeps_the_contract(tmp_path: Path) -> None:
    """The example's client passes the contract tests, and a faulty one fails one of them."""
    code = text_of("examples/own_tier.py")
    worse = code.replace("AND 'v' || hex(data) = ?", "AND ? != ''")
    assert worse != code
    printed = run_pytest(tmp_path, {"test_tier.py": code, "test_worse.py": worse})
    (failed,) = re.findall(r"^FAILED (\S+)", printed, flags=re.MULTILINE)
    assert re.fullmatch(r"test_worse\.py::\w+::test_a_mark_is_put_only_over_what_was_seen", failed)
    (passed,) = re.findall(r"^1 failed, (\d+) passed", printed, flags=re.MULTILINE)
    assert int(passed) % 2 == 1, "both files have the same tests, and one of them failed"


def run_pytest(folder: Path, code_by_name: dict[str, str]) -> str:
    """Runs test files in another pytest without the settings of this one. Returns its output."""
    for name, code in code_by_name.items():
        (folder / name).write_text(code)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder), *code_by_name]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    return done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.parametrize(("damage", "verdict"), [(False, "intact"), (True, "MISSING OR DAMAGED")])
def test_the_runbooks_check_tells_intact_from_damaged(tmp_path: Path, *, damage: bool, verdict: str) -> None:
    """The runbook's code reports an intact and a damaged shard, and a gathered checkpoint loads."""
    writer = ReplicatedWriter(tmp_path, copies=1)
    dcp.save({"a": torch.arange(4)}, checkpoint_id="step-1000", storage_writer=writer)
    shard = tmp_path / "step-1000" / "__0_0.distcp"
    if damage:
        shard.write_bytes(shard.read_bytes()[:-1])
    (code,) = runnable_code("docs/runbook.md")
    assert code.count('"/rescue/step-1000"') == 1
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(code.replace("/rescue", str(tmp_path)), {})
    assert f"__0_0.distcp {verdict}" in output.getvalue()
    if not damage:
        state = {"a": torch.zeros(4, dtype=torch.int64)}
        dcp.load(state, storage_reader=dcp.FileSystemReader(tmp_path / "step-1000"))
        assert state["a"].tolist() == [0, 1, 2, 3]
