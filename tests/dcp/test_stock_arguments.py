"""Arguments in the form that FileSystemWriter and FileSystemReader take: each works, or its error states what to pass
instead.
"""

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from replicated_ckpt import CheckpointExists, CheckpointNotFound, ConfigInvalid, ReplicatedReader, ReplicatedWriter

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*1 node:replicated_ckpt.errors.ReplicatedCkptWarning"),
]


def save(root: Path, checkpoint_id: str) -> None:
    dcp.save({"w": torch.ones(3)}, checkpoint_id=checkpoint_id, storage_writer=ReplicatedWriter(root), no_dist=True)


def test_a_checkpoint_given_as_root_gets_a_hint(tmp_path: Path) -> None:
    """A checkpoint's own directory is passed as the root of a load: the hint names the parent directory and the id to
    pass.
    """
    save(tmp_path, "step-1")
    with pytest.raises(CheckpointNotFound) as raised:
        dcp.load({"w": torch.zeros(3)}, checkpoint_id="latest", storage_reader=ReplicatedReader(tmp_path / "step-1"))
    assert "pass the directory above as root, and checkpoint_id='step-1'" in raised.value.hint


def test_no_store_is_made_in_a_checkpoint(tmp_path: Path) -> None:
    """A checkpoint's own directory is passed as the root of a save: the save is refused, and the directory stays
    unchanged.
    """
    save(tmp_path, "step-1")
    before = sorted((tmp_path / "step-1").iterdir())
    with pytest.raises(CheckpointException) as raised:
        save(tmp_path / "step-1", "step-1")
    error, _ = raised.value.failures[0]
    assert isinstance(error, ConfigInvalid)
    assert f"Pass the directory above as root: {tmp_path}, and an id such as checkpoint_id='step-1'" in error.hint
    assert sorted((tmp_path / "step-1").iterdir()) == before


@pytest.mark.parametrize("given", [7, 1.5, b"step-1"])
def test_an_id_that_is_no_text_is_refused(tmp_path: Path, given: object) -> None:
    """A number or bytes as `checkpoint_id` raise ConfigInvalid in a save and in a load."""
    for call in (
        lambda: save(tmp_path, given),  # type: ignore[arg-type]
        lambda: dcp.load({}, checkpoint_id=given, storage_reader=ReplicatedReader(tmp_path), no_dist=True),
    ):
        with pytest.raises(CheckpointException) as raised:
            call()
        error, _ = raised.value.failures[0]
        assert isinstance(error, ConfigInvalid)
        assert f"was given {given!r} as its checkpoint_id" in error.message


def test_a_root_without_a_store_is_named(tmp_path: Path) -> None:
    """The error of a load states that the root has no store. Its hint covers a first run and a mistyped root."""
    with pytest.raises(CheckpointNotFound, match=r"Searched: no node's store yet at .*/typo \(own store\)") as raised:
        dcp.load({}, checkpoint_id="latest", storage_reader=ReplicatedReader(tmp_path / "typo"), no_dist=True)
    assert raised.value.hint.startswith("On a first run nothing is saved yet: start without a load")
    assert f"check that the root {tmp_path}/typo is the root of the save" in raised.value.hint


def test_the_hint_for_a_missing_id_has_the_root_of_the_load(tmp_path: Path) -> None:
    """The `ls` command in the hint contains the quoted root of this load, and can be copied."""
    with pytest.raises(CheckpointNotFound) as raised:
        dcp.load({}, checkpoint_id="stpe-1", storage_reader=ReplicatedReader(tmp_path / "my root"), no_dist=True)
    assert f"`replicated-ckpt ls --root '{tmp_path}/my root'` lists them" in raised.value.hint


def test_repr_shows_root_and_options(tmp_path: Path) -> None:
    """`repr` shows the root and the main options, and no credentials."""
    assert (
        repr(ReplicatedWriter(tmp_path, ack="local")) == f"<ReplicatedWriter({str(tmp_path)!r}, copies=2, ack='local')>"
    )
    assert repr(ReplicatedReader(tmp_path)) == f"<ReplicatedReader({str(tmp_path)!r})>"
    in_bucket = ReplicatedReader(object_store="s3://bucket/run", storage_options={"secret": "hidden"})
    assert repr(in_bucket) == "<ReplicatedReader(None, object_store='s3://bucket/run')>"


def test_no_warning_of_a_directory_left_open(tmp_path: Path) -> None:
    """Saving, loading and listing leave no directory open: there is no ResourceWarning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(3):
            save(tmp_path, f"step-{number}")
        dcp.load({"w": torch.zeros(3)}, checkpoint_id="latest", storage_reader=ReplicatedReader(tmp_path), no_dist=True)
        assert list(ReplicatedWriter(tmp_path).store.catalog.without_manifest()) == []
    assert [str(one.message) for one in caught if one.category is ResourceWarning] == []


def test_a_path_outside_the_root_is_refused_as_an_id(tmp_path: Path) -> None:
    """A path outside the root as `checkpoint_id` is refused, and the hint explains what to pass."""
    with pytest.raises(CheckpointException) as raised:
        save(tmp_path / "root", str(tmp_path / "elsewhere" / "step-1"))
    error, _ = raised.value.failures[0]
    assert isinstance(error, ConfigInvalid)
    assert "Pass a name under the root" in error.hint


@pytest.mark.parametrize(
    ("root", "given"),
    [
        ("real", "./step-1"),
        ("real", "real/step-1"),
        ("./real", "real//step-1"),
        ("link", "link/step-1"),
        ("link", "{base}/real/step-1"),
        ("{base}/real", "{base}/link/step-1"),
        ("{base}/link/new", "{base}/real/new/step-1"),
    ],
)
def test_a_path_below_the_root_means_the_checkpoint_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: str, given: str
) -> None:
    """A path to a checkpoint below the root works as its id, relative to the working directory or through a symbolic
    link.
    """
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path)
    root, given = (text.format(base=tmp_path) for text in (root, given))
    save(Path(root), given)
    reader = ReplicatedReader(root, no_dist=True)
    assert reader.exists(given)
    state = {"w": torch.zeros(3)}
    dcp.load(state, checkpoint_id=given, storage_reader=reader)
    assert state["w"].tolist() == [1.0] * 3
    assert reader.checkpoint_id == "step-1"
    assert [path.parent.name for path in tmp_path.glob("real/**/.metadata")] == ["step-1"]


@pytest.mark.parametrize(
    "given", ["../real/step-1", "real/../step-1", "{base}/other/step-1", "{base}/real", "a/../../b"]
)
def test_a_path_that_leaves_the_root_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    """A path that leads out of the root is refused, and nothing is written."""
    (tmp_path / "real").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointException) as raised:
        save(tmp_path / "real", given.format(base=tmp_path))
    error, _ = raised.value.failures[0]
    assert isinstance(error, ConfigInvalid), error
    assert list(tmp_path.rglob(".metadata")) == []


@pytest.mark.parametrize("below", [".", "deeper"])
def test_a_root_that_is_no_directory_is_refused(tmp_path: Path, below: str) -> None:
    """The root, or a directory above it, is a file: the save raises ConfigInvalid, not a store error."""
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointException) as raised:
        save(tmp_path / "file" / below, "step-1")
    error, _ = raised.value.failures[0]
    assert isinstance(error, ConfigInvalid), error
    assert "Pass a directory on a disk of this node" in error.hint


def test_a_name_that_is_taken_leaves_no_descriptor(tmp_path: Path) -> None:
    """A save that is refused because its id is taken closes the directories that it opened."""
    save(tmp_path, "step-1")
    writer = ReplicatedWriter(tmp_path, overwrite=False)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with pytest.raises(CheckpointException) as raised:
            dcp.save({"w": torch.ones(3)}, checkpoint_id="step-1", storage_writer=writer, no_dist=True)
    error, _ = raised.value.failures[0]
    assert isinstance(error, CheckpointExists)
    assert [str(each.message) for each in said if each.category is ResourceWarning] == []
