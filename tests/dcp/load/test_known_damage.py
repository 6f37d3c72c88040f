"""The only copy of the newest checkpoint is known to be damaged: "latest" loads an older one, and the load warns."""

import errno
import logging
import os
import re
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from replicated_ckpt import CheckpointManager, ReplicatedCkptWarning, ReplicatedReader, ReplicatedWriter
from replicated_ckpt.core.inventory import Holding, SaveFound, saves_found
from replicated_ckpt.core.layout import OBJECT_NODE
from replicated_ckpt.dcp.find.absence import SkippedSave, describe_silent, describe_skipped
from replicated_ckpt.node.state.damage import DamageBook
from replicated_ckpt.stores.files import existence
from replicated_ckpt.stores.local.store import LocalStore
from tests.agent.agents import running_agent
from tests.agent.checkpoints import checkpointed, findings, introduced
from tests.damage import flip

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore::replicated_ckpt.errors.ReplicatedCkptWarning"),
]
SHARD = "__0_0.distcp"


def test_latest_is_an_older_checkpoint_where_the_newest_is_known_to_be_damaged(tmp_path: Path) -> None:
    """The agent has recorded damage in the newest checkpoint: "latest" loads the one before. File sizes alone would
    select the damaged one each time.
    """
    for step in (1, 2):
        saved = {"x": torch.full((1000,), float(step))}
        dcp.save(saved, checkpoint_id=f"step-{step}", storage_writer=ReplicatedWriter(tmp_path, copies=1))
    store = LocalStore(tmp_path)
    flip(tmp_path / "step-2" / SHARD, 100)
    DamageBook(store).mark("step-2", store.catalog.manifest("step-2").save_id, SHARD)
    found = {"x": torch.zeros(1000)}
    dcp.load(found, checkpoint_id="latest", storage_reader=ReplicatedReader(tmp_path))
    assert found["x"].eq(1.0).all()


@pytest.mark.parametrize(
    ("damaged", "footer_damaged", "others", "is_lacking"),
    [((SHARD,), (), 0, True), ((SHARD,), (SHARD,), 0, False), ((SHARD,), (), 1, False), ((), (), 0, False)],
    ids=["the-only-copy", "its-footer-alone", "one-of-two", "intact"],
)
def test_a_shard_with_one_damaged_copy_alone_is_missing(
    damaged: tuple[str, ...], footer_damaged: tuple[str, ...], others: int, *, is_lacking: bool
) -> None:
    """A shard is missing if its only copy is damaged. Two damaged copies may complete each other, and a copy with only
    a damaged footer is readable.
    """
    holdings = [Holding("n0", "step-1", "1" * 32, 1, True, {SHARD: 9}, damaged, footer_damaged=footer_damaged)]
    holdings += [Holding("n1", "step-1", "1" * 32, 1, True, {SHARD: 9}, (SHARD,))] * others
    save = SaveFound("step-1", "1" * 32, 1, tuple(holdings))
    assert bool(save.list_missing({SHARD: 9}, save.damaged_copies)) is is_lacking
    assert save.list_missing({SHARD: 9}) == ()


def save(root: Path, step: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ReplicatedCkptWarning)
        saved = {"x": torch.full((1000,), float(step))}
        dcp.save(saved, checkpoint_id=f"step-{step}", storage_writer=ReplicatedWriter(root, copies=1))


def load(root: Path, checkpoint_id: str = "latest") -> float:
    found = {"x": torch.zeros(1000)}
    dcp.load(found, checkpoint_id=checkpoint_id, storage_reader=ReplicatedReader(root))
    return float(found["x"][0])


@pytest.mark.parametrize(
    ("lost", "told"),
    [
        (SHARD, rf"Newer, but without an intact copy of {SHARD}: 'step-2' \(save \w+, sequence 2\)\."),
        (".manifest.json", r"Possibly newer, but without a valid manifest: 'step-2'\."),
    ],
)
def test_a_load_of_the_latest_warns_of_what_it_skips(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, lost: str, told: str
) -> None:
    """The newest checkpoint lost a file: a load of "latest" warns about it, and `latest()` logs it. Once the file is
    back, nothing is reported.
    """
    for step in (1, 2):
        save(tmp_path, step)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ReplicatedCkptWarning)
        assert load(tmp_path) == 2.0
    kept = (tmp_path / "step-2" / lost).read_bytes()
    (tmp_path / "step-2" / lost).write_bytes(b"")
    said = rf"'step-1' \(save \w+, sequence 1\) is loaded, .* {told}"
    with pytest.warns(ReplicatedCkptWarning, match=said):
        assert load(tmp_path) == 1.0
    with caplog.at_level(logging.WARNING):
        assert ReplicatedReader(tmp_path).latest() == "step-1"
    assert re.search(said, caplog.text)
    (tmp_path / "step-2" / lost).write_bytes(kept)
    assert load(tmp_path) == 2.0
    assert findings(LocalStore(tmp_path)) == []


def test_a_process_that_can_open_no_file_loads_no_older_checkpoint(tmp_path: Path) -> None:
    """The newest manifest exists, but the process has no free descriptor: the load raises, and does not take an older
    checkpoint.
    """
    for step in (1, 2):
        save(tmp_path, step)
    manifest, real = tmp_path / "step-2" / ".manifest.json", existence.read_plain

    def read(path: Path) -> bytes:
        if path == manifest:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(path)

    with (
        mock.patch("replicated_ckpt.dcp.find.survey.read_plain", read),
        pytest.raises(CheckpointException, match="Too many open files"),
    ):
        load(tmp_path)
    assert load(tmp_path) == 2.0
    assert findings(LocalStore(tmp_path)) == []


def test_a_node_that_is_alone_logs_the_silent_nodes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No other node of the save answers: "latest" logs once which nodes may have newer checkpoints. After one has
    answered, nothing is logged.
    """
    nodes = [LocalStore(tmp_path / name) for name in ("here", "there")]
    checkpointed(nodes, 1, {SHARD: (0, 1)})
    with running_agent(nodes[1].root) as there:
        introduced(nodes[0], [there.endpoint.address()])
        with caplog.at_level(logging.WARNING):
            assert ReplicatedReader(nodes[0].root).latest() == "step-1"
        assert caplog.text == ""
    with caplog.at_level(logging.WARNING):
        assert ReplicatedReader(nodes[0].root).exists("step-1")
        assert caplog.text == "", "a look-up by id"
        assert ReplicatedReader(nodes[0].root).latest() == "step-1"
        assert ReplicatedReader(nodes[0].root).latest() == "step-1"
    said = (
        rf"'step-1' .* none of its other nodes was reached: node {nodes[1].node_id()} at .* may have saved newer ones"
    )
    assert len(re.findall(said, caplog.text)) == 1
    assert [findings(store) for store in nodes] == [[], []]


def test_a_bucket_that_does_not_answer_may_have_a_newer_one(tmp_path: Path) -> None:
    """The bucket does not answer: the description states that the bucket may have newer checkpoints. If the bucket
    answers, nothing is described.
    """
    store = LocalStore(tmp_path)
    manifest = checkpointed([store], 1, {SHARD: (0,)}, copies=1)
    found = saves_found(store.catalog.holdings(store.node_id()))[0]
    places = {store.node_id(): "own", OBJECT_NODE: "s3://b/run: not reached (no answer within 5 s)"}
    said = describe_silent(found, manifest, store.node_id(), places)
    assert "Not reached: s3://b/run, which may have newer ones" in said
    assert describe_silent(found, manifest, store.node_id(), {**places, OBJECT_NODE: "s3://b/run"}) == ""


def test_a_bucket_that_answers_replaces_no_node(tmp_path: Path) -> None:
    """The bucket answers but may have only some of the checkpoints: the description still lists the silent nodes."""
    nodes = [LocalStore(tmp_path / name) for name in ("here", "there")]
    manifest = checkpointed(nodes, 1, {SHARD: (0, 1)})
    here, there = (store.node_id() for store in nodes)
    found = saves_found(nodes[0].catalog.holdings(here))[0]
    places = {here: "own", there: "node b: not reached (no agent)", OBJECT_NODE: "s3://b/run"}
    assert "was reached: node b. They may have saved" in describe_silent(found, manifest, here, places)


def test_a_load_of_a_stock_checkpoint_warns_that_newer_ones_are_lost(tmp_path: Path) -> None:
    """The only checkpoint with a manifest lost a shard, and stock torch wrote an older one: the load takes the older
    one and warns about both.
    """
    dcp.save({"x": torch.full((1000,), 1.0)}, checkpoint_id=tmp_path / "step-1")
    save(tmp_path, 2)
    lost = tmp_path / "step-2" / SHARD
    kept = lost.read_bytes()
    lost.unlink()
    with pytest.warns(ReplicatedCkptWarning, match=f"step-1 has no manifest.* newer ones exist: .*step-2.*{SHARD}"):
        assert load(tmp_path) == 1.0
    lost.write_bytes(kept)
    assert load(tmp_path) == 2.0
    assert findings(LocalStore(tmp_path)) == []


def test_a_damaged_step_is_not_listed(tmp_path: Path) -> None:
    """`all_steps` and `best_step` omit a step that is known to be damaged, although its file sizes are right."""
    with CheckpointManager(tmp_path, copies=1, preempt_on=()) as manager:
        for step in (1, 2):
            manager.save(step, {"x": torch.full((1000,), float(step))}, metrics={"loss": 1.0 / step})
        store, good = LocalStore(tmp_path), (tmp_path / "step-2" / SHARD).read_bytes()
        flip(tmp_path / "step-2" / SHARD, 100)
        DamageBook(store).mark("step-2", store.catalog.manifest("step-2").save_id, SHARD)
        assert (manager.all_steps(), manager.best_step("loss")) == ((1,), 1)
        (tmp_path / "step-2" / SHARD).write_bytes(good)
    assert findings(store) == []


def test_the_description_names_the_nodes_that_did_not_answer() -> None:
    """The description of skipped checkpoints names the newest one, counts the others, and lists the nodes that did not
    answer.
    """
    older, newer, newest = (
        SaveFound("step-1", str(n) * 32, n, (Holding("a", "step-1", str(n) * 32, n, True, {SHARD: 9}),))
        for n in (1, 2, 3)
    )
    places = ["node a at /root (own store)", "node b at host-b:1: not reached (no answer in time)"]
    said = describe_skipped(older, [SkippedSave(newest), SkippedSave(newer)], places)
    assert "Newer, but without an intact copy of .manifest.json: 'step-1' (save 33333333, sequence 3); 1 other" in said
    assert "other newer checkpoint incomplete, too. Not reached: node b at host-b:1. To load" in said
    assert describe_skipped(newest, [], places) == ""
