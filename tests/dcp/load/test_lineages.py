"""Checkpoints of two runs in one directory of ids: which run a load takes, and how a user makes it refuse."""

import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from replicated_ckpt import ReplicatedReader, ReplicatedWriter
from replicated_ckpt.core.inventory import Holding, SaveFound, saves_found
from replicated_ckpt.core.manifest import decode_manifest
from replicated_ckpt.dcp.find.choice import choose_lineage
from replicated_ckpt.errors import LineagesMet, ReplicatedCkptWarning

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
    pytest.mark.filterwarnings("ignore::replicated_ckpt.errors.ReplicatedCkptWarning"),
]


def lineage_of(folder: Path) -> str:
    return decode_manifest((folder / ".manifest.json").read_bytes(), "this test").lineage


def test_a_load_that_refuses_lists_the_runs(tmp_path: Path) -> None:
    """With lineage="refuse" or an unknown lineage, a load raises LineagesMet and lists the runs. With a listed lineage
    it loads that run.
    """
    roots = [tmp_path / name for name in "ab"]
    for number, root in enumerate(roots):
        root.mkdir()
        dcp.save(
            {"x": torch.full((4,), number)},
            checkpoint_id=f"step-{number}",
            storage_writer=ReplicatedWriter(root),
            no_dist=True,
        )
    shutil.copytree(roots[1] / "step-1", roots[0] / "step-1")
    lineages = [lineage_of(roots[0] / f"step-{number}") for number in range(2)]
    assert lineages[0] != lineages[1]
    state = {"x": torch.zeros(4, dtype=torch.int64)}
    for wanted in ("refuse", "0" * 16):
        with pytest.raises(LineagesMet) as raised:
            dcp.load(
                state, checkpoint_id="latest", storage_reader=ReplicatedReader(roots[0], lineage=wanted), no_dist=True
            )
        assert all(lineage in raised.value.message for lineage in lineages)
        assert "ReplicatedReader(lineage=" in raised.value.hint
    for number, lineage in enumerate(lineages):
        reader = ReplicatedReader(roots[0], lineage=lineage)
        dcp.load(state, checkpoint_id="latest", storage_reader=reader, no_dist=True)
        assert state["x"].tolist() == [number] * 4


def test_a_load_by_id_of_an_older_run_warns(tmp_path: Path) -> None:
    """A load by id of a run that is not the newest warns about both runs. With lineage="refuse" it raises. A load from
    the newest run is silent.
    """
    roots = [tmp_path / name for name in "ab"]
    for number, root in enumerate(roots):
        root.mkdir()
        for step in (3, 5) if number else (3,):
            writer = ReplicatedWriter(root)
            dcp.save({"x": torch.full((4,), number)}, checkpoint_id=f"step-{step}", storage_writer=writer, no_dist=True)
    shutil.copytree(roots[1] / "step-5", roots[0] / "step-5")
    lineages = [lineage_of(roots[0] / f"step-{step}") for step in (3, 5)]
    state = {"x": torch.zeros(4, dtype=torch.int64)}
    told = f"Loaded: lineage '{lineages[0]}', newest 'step-3' .*Not loaded: lineage '{lineages[1]}', newest 'step-5' "
    with pytest.warns(ReplicatedCkptWarning, match=told):
        dcp.load(state, checkpoint_id="step-3", storage_reader=ReplicatedReader(roots[0]), no_dist=True)
    assert state["x"].tolist() == [0] * 4
    reader = ReplicatedReader(roots[0], lineage="refuse")
    with pytest.raises(LineagesMet):
        dcp.load(state, checkpoint_id="step-3", storage_reader=reader, no_dist=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ReplicatedCkptWarning)
        dcp.load(state, checkpoint_id="step-5", storage_reader=ReplicatedReader(roots[0]), no_dist=True)
    assert state["x"].tolist() == [1] * 4


def test_saves_are_not_compared_with_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """`choose_lineage` compares no saves with each other. With 5,000 checkpoints the 12 million comparisons dominated
    the load.
    """
    holding = Holding(
        node_id="n", checkpoint_id="step", save_id="", sequence=1, has_metadata=True, sizes={}, lineage="a"
    )
    holdings = [replace(holding, checkpoint_id=f"step-{n}", save_id=f"{n:032x}", sequence=n) for n in (1, 2, 3)]
    foreign = replace(holding, checkpoint_id="stock", save_id="f" * 32, sequence=0, lineage="")
    saves = saves_found([*holdings, foreign])
    monkeypatch.setattr(SaveFound, "__eq__", lambda *_: pytest.fail("two saves are compared"))
    chosen = choose_lineage("latest", saves, "newest")
    assert [save.checkpoint_id for save in chosen.saves] == ["step-3", "step-2", "step-1", "stock"]
