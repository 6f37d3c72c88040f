""" "latest" is the newest checkpoint of one directory of ids: which one, how it is named, and when it is refused."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from replicated_ckpt import ReplicatedReader, ReplicatedWriter
from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.cli.main import main
from replicated_ckpt.core.reading.newest import Newest
from replicated_ckpt.dcp.agreement import node_post
from replicated_ckpt.errors import CheckpointNotFound, ConfigInvalid, LatestAmbiguous
from tests.agent.agents import stop_agent

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:.*has no manifest. stock torch wrote it"),
]


def save(root: Path, checkpoint_id: str, value: float, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    """Saves as another job would, with a run of its own in each directory of ids."""
    monkeypatch.setattr(node_post, "_seen", {})
    writer = ReplicatedWriter(root, copies=1, **options)
    dcp.save({"w": torch.full((3,), value)}, checkpoint_id=checkpoint_id, storage_writer=writer)


def load(reader: ReplicatedReader, asked: Any) -> tuple[float, str]:
    state = {"w": torch.zeros(3)}
    dcp.load(state, checkpoint_id=asked, storage_reader=reader)
    assert reader.last_load is not None
    return float(state["w"][0]), reader.last_load.checkpoint_id


def save_two_runs(root: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Path:
    """Two runs in directories of their own. run-b was saved last."""
    for value, checkpoint_id in enumerate(("run-a/step-1", "run-a/step-2", "run-b/step-1"), 1):
        save(root, checkpoint_id, value, monkeypatch, **options)
    return root


@pytest.fixture
def two_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return save_two_runs(tmp_path, monkeypatch)


@pytest.fixture(params=["nodes", "refuse", "bucket"])
def reader(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ReplicatedReader]:
    """A reader of two runs: on this node, with lineage="refuse", or of the bucket alone."""
    if request.param != "bucket":
        save_two_runs(tmp_path / "root", monkeypatch)
        lineage = "refuse" if request.param == "refuse" else "newest"
        yield ReplicatedReader(tmp_path / "root", lineage=lineage)
        return
    url = f"file://{tmp_path}/bucket"
    save_two_runs(tmp_path / "root", monkeypatch, object_store=url, ack="object")
    stop_agent(tmp_path / "root")
    yield ReplicatedReader(object_store=url)


def test_several_directories_of_ids_are_refused_with_their_names(reader: ReplicatedReader) -> None:
    """Two directories have checkpoints: "latest" raises LatestAmbiguous and lists "run-a/latest" and "run-b/latest".
    Each of these loads.
    """
    with pytest.raises(LatestAmbiguous, match="but 2 directories have checkpoints") as raised:
        reader.latest()
    assert raised.value.choices == ("run-a/latest", "run-b/latest")
    assert all(repr(choice) in raised.value.hint for choice in raised.value.choices)
    with pytest.raises(LatestAmbiguous):
        load(reader, "latest")
    assert [load(reader, "run-a/latest"), load(reader, "run-b/latest")] == [
        (2.0, "run-a/step-2"),
        (3.0, "run-b/step-1"),
    ]
    assert [reader.latest("run-a"), reader.latest("run-b"), reader.latest("run-c")] == [
        "run-a/step-2",
        "run-b/step-1",
        None,
    ]
    assert [reader.exists("run-a/latest"), reader.exists("run-c/latest")] == [True, False]
    with pytest.raises(CheckpointNotFound, match=r"No checkpoint in 'run-c/' was found\."):
        load(reader, "run-c/latest")


def test_latest_may_be_a_path(two_runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ "latest" may be a path below the root. "./latest" means the root itself, and a path outside the root is refused."""
    reader = ReplicatedReader(two_runs)
    assert load(reader, two_runs / "run-a" / "latest")[1] == "run-a/step-2"
    save(two_runs, "step-7", 7.0, monkeypatch)
    with pytest.raises(LatestAmbiguous, match="but 3 directories have checkpoints") as raised:
        reader.latest()
    assert raised.value.choices[0] == "./latest"
    assert {load(reader, asked)[1] for asked in ("./latest", two_runs / "latest")} == {reader.latest("")} == {"step-7"}
    with pytest.raises((CheckpointException, ConfigInvalid), match="not inside the root"):
        load(reader, "/latest")


def test_one_directory_needs_no_name(two_runs: Path) -> None:
    """Only one directory has checkpoints: plain "latest" loads from there, also beside a copy that a user made."""
    shutil.rmtree(two_runs / "run-b")
    assert load(ReplicatedReader(two_runs), "latest") == (2.0, "run-a/step-2")
    for name in ("step-1", "step-2"):
        shutil.move(two_runs / "run-a" / name, two_runs / name)
    shutil.copytree(two_runs / "step-2", two_runs / "best")
    assert load(ReplicatedReader(two_runs), "latest")[0] == 2.0
    assert main(["verify", "--root", str(two_runs)]) == ExitCode.OK


def test_a_lost_checkpoint_is_replaced_from_its_own_directory(two_runs: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The newest checkpoint of a directory is lost: "latest" takes the one before in that directory. The warning names
    no other directory.
    """
    (two_runs / "run-a/step-2/__0_0.distcp").unlink()
    (two_runs / "run-b/step-1/.manifest.json").write_bytes(b"damaged")
    reader = ReplicatedReader(two_runs)
    assert reader.latest("run-a") == "run-a/step-1"
    assert "'run-a/step-2'" in caplog.text
    assert "run-b" not in caplog.text
    with pytest.raises(LatestAmbiguous):  # run-b's manifest is damaged, but the directory counts
        reader.latest()


def test_stock_checkpoints_follow_the_same_rule(two_runs: Path) -> None:
    """Stock torch's checkpoints, ordered by file time, follow the same rules."""
    for manifest in two_runs.rglob(".manifest.json"):
        manifest.unlink()
    for shard in two_runs.rglob("*.distcp"):
        dcp.save({"w": torch.full((3,), 9.0)}, storage_writer=dcp.FileSystemWriter(shard.parent))
    reader = ReplicatedReader(two_runs)
    with pytest.raises(LatestAmbiguous):
        reader.latest()
    assert load(reader, "run-b/latest") == (9.0, "run-b/step-1")
    with pytest.raises(CheckpointNotFound, match="No checkpoint in 'run-c/'"):
        load(reader, "run-c/latest")


def test_no_checkpoint_is_saved_under_the_name_latest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save under the id "latest" is refused in every directory, as no load could name it."""
    with pytest.raises(CheckpointException, match="'run-a/latest' is not a valid name"):
        save(tmp_path, "run-a/latest", 1.0, monkeypatch)


@pytest.mark.parametrize(
    ("asked", "fitting", "others"),
    [
        ("latest", ["step-1", "run/step-1"], []),
        ("./latest", ["step-1", "best"], ["run/step-1"]),
        ("run/latest", ["run/step-1", "run/best"], ["step-1", "run/a/step-1", "other/run/step-1"]),
        (
            "./latest step-{}",
            ["step-0", "step-17"],
            ["step-", "step-07", "step-1a", "step-1-best", "run/step-1", "x-1"],
        ),
        ("my run/latest step-{}", ["my run/step-1"], ["step-1", "my run/best", "run/step-1"]),
        ("./latest iter_{:07d}", ["iter_0000010", "iter_12345678"], ["iter_10", "iter_00000010", "step-1"]),
    ],
)
def test_newest_parses_and_fits(asked: str, fitting: list[str], others: list[str]) -> None:
    """`Newest` parses and prints the same text, and fits only the ids of its directory and form."""
    newest = Newest.parse(asked)
    assert newest is not None
    assert str(newest) == asked
    assert [name for name in [*fitting, *others] if newest.fits(name)] == fitting


@pytest.mark.parametrize(
    "asked", ["step-1", "latest model", "latest/step-1", "my-latest", "step-{}", "latest step-{}/x"]
)
def test_an_id_is_never_taken_for_latest(asked: str) -> None:
    """An id that contains the word "latest" is not parsed as "latest"."""
    assert Newest.parse(asked) is None


def test_on_a_first_run_there_is_no_latest(tmp_path: Path) -> None:
    """On a first run `latest()` returns None for every directory, and a load raises CheckpointNotFound."""
    reader = ReplicatedReader(tmp_path)
    assert [reader.latest(), reader.latest("run-a"), reader.latest("")] == [None, None, None]
    with pytest.raises(CheckpointException) as raised:
        load(reader, "latest")
    assert isinstance(raised.value, CheckpointNotFound)
