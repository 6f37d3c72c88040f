"""Import: files of other writers become a checkpoint that loads like any other."""

import io
import itertools
import json
import math
import os
import pickle
import shutil
import struct
import warnings
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata

from replicated_ckpt import KeyRules, ReplicatedReader, export_checkpoint, import_checkpoint
from replicated_ckpt.cli.main import main
from replicated_ckpt.core.chunk import Chunk
from replicated_ckpt.core.manifest import decode_manifest
from replicated_ckpt.dcp.convert import source
from replicated_ckpt.dcp.convert.dcp_format import SourcePlanner
from replicated_ckpt.errors import (
    CheckpointExists,
    ConfigInvalid,
    ObjectCorrupt,
    ObjectMissing,
    ObjectUnsafe,
    ReplicatedCkptWarning,
    StoreError,
    StoreFull,
)
from tests.convert.states import assert_equal, blank, contents, scheduled, tensors_of
from tests.fault.hostile.test_hostile_peers import memory_at_most

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
Saved = tuple[Path, dict[str, Any]]


def imported(path: Path, root: Path, format_: Any, checkpoint_id: str = "step-7", **options: Any) -> None:
    import_checkpoint(path, checkpoint_id, format=format_, root=root, copies=1, **options)


def loaded(root: Path, like: Any, checkpoint_id: str = "step-7") -> Any:
    state = blank(like)
    dcp.load(state, checkpoint_id=checkpoint_id, storage_reader=ReplicatedReader(root), no_dist=True)
    return state


def test_a_torch_file_becomes_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nested values and objects are imported, read by windows. The manifest has the wanted number of copies."""
    monkeypatch.setattr(source, "WINDOW_BYTES", 3_000_001)
    state = contents()
    state["view"] = state["large"][1:, 5:100]
    torch.save(state, tmp_path / "model.pth")
    with pytest.warns(ReplicatedCkptWarning, match="1 node"):
        import_checkpoint(tmp_path / "model.pth", "step-7", format="torch", root=tmp_path / "root", copies=2)
    assert_equal(loaded(tmp_path / "root", state), state)
    manifest = decode_manifest((tmp_path / "root" / "step-7" / ".manifest.json").read_bytes(), "here")
    assert manifest.copies == 2


def overstated(directory: Path) -> Path:
    """A stock DCP directory whose .metadata describes a tensor of 4 elements as one of 2**50."""
    dcp.save({"a": torch.arange(4.0)}, checkpoint_id=directory, no_dist=True)
    metadata, size = dcp.FileSystemReader(directory).read_metadata(), torch.Size((1 << 50,))
    described = metadata.state_dict_metadata["a"]
    assert isinstance(described, TensorStorageMetadata)
    chunk = ChunkStorageMetadata(torch.Size((0,)), size)
    metadata.state_dict_metadata["a"] = TensorStorageMetadata(described.properties, size, [chunk])
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    return directory


@pytest.mark.parametrize("format_", ["torch", "safetensors", "dcp"])
def test_a_small_file_that_describes_a_huge_tensor_is_refused(tmp_path: Path, format_: Any) -> None:
    """Import and export compare the described size with the item before they allocate."""
    with pytest.raises(ObjectCorrupt, match=f"a tensor of {1 << 52} bytes in an item of"):
        imported(overstated(tmp_path / "stock"), tmp_path / "root", "dcp")
    overstated(tmp_path / "own" / "step-1")
    refused = pytest.raises(ObjectCorrupt, match=f"a tensor of {1 << 52} bytes in an item of")
    with pytest.warns(ReplicatedCkptWarning, match="no manifest"), refused:
        export_checkpoint("step-1", tmp_path / "out", format=format_, root=tmp_path / "own")
    torch.save({"a": torch.zeros(1).expand(1 << 50)}, tmp_path / "expanded.pth")
    with pytest.raises(StoreFull, match=f"it needs {1 << 52} bytes"):
        imported(tmp_path / "expanded.pth", tmp_path / "root", "torch")
    assert not (tmp_path / "root").exists()
    assert not (tmp_path / "out").exists()


def test_windows_are_listed_as_they_are_read() -> None:
    """A tensor of any size uses no memory before its first window is read."""
    entry = source.TensorEntry("w", "w", ("w",), torch.float32, (1 << 60,), (Chunk.whole((1 << 60,)),))

    class Zeros:
        def read(self, parts: list[source.Part]) -> list[torch.Tensor]:
            return [torch.zeros(1) for _ in parts]

    ((first, _), (second, _)) = itertools.islice(source.stream_tensors(Zeros(), [entry]), 2)  # type: ignore[arg-type]
    assert first is second is entry


def test_conjugate_and_negated_views_keep_their_values(tmp_path: Path) -> None:
    """A conjugate or negated view is contiguous, but its memory has other values."""
    state = {"conjugate": torch.tensor([1 + 2j, 3 - 4j]).conj(), "negated": torch._neg_view(torch.arange(3.0))}
    torch.save(state, tmp_path / "m.pth")
    imported(tmp_path / "m.pth", tmp_path / "root", "torch")
    found = loaded(tmp_path / "root", {name: torch.empty_like(tensor) for name, tensor in state.items()})
    assert {name: each.tolist() for name, each in found.items()} == {name: e.tolist() for name, e in state.items()}


def test_safetensors_become_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file, or a directory with an index, is imported with a prefix added or removed."""
    library = pytest.importorskip("safetensors.torch")
    weights = tensors_of({"a": contents()["model"], "b": contents()["odd"]})
    weights = {name: tensor.contiguous() for name, tensor in weights.items()}
    library.save_file(weights, tmp_path / "model.safetensors")
    command = ["import", str(tmp_path / "model.safetensors"), "step-7", "--from", "safetensors"]
    assert main([*command, "--root", str(tmp_path / "root"), "--copies", "1", "--add-prefix", "model."]) == 0
    assert "step-7: 9 tensors" in capsys.readouterr().out
    assert_equal(loaded(tmp_path / "root", {"model": weights}), {"model": weights})
    export_checkpoint("step-7", tmp_path / "hf", format="safetensors", root=tmp_path / "root", shard_size_limit=100)
    imported(tmp_path / "hf", tmp_path / "root", "safetensors", "step-8", keys=KeyRules(strip_prefix="model."))
    assert_equal(loaded(tmp_path / "root", weights, "step-8"), weights)


def test_a_stock_directory_becomes_a_checkpoint(tmp_path: Path) -> None:
    """All chunks and objects are imported."""
    state = contents()
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "stock"), no_dist=True)
    imported(tmp_path / "stock", tmp_path / "root", "dcp")
    assert_equal(loaded(tmp_path / "root", state), state)


def test_an_existing_checkpoint_is_replaced_only_on_demand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without `--overwrite` the exit code is 1, and the checkpoint stays unchanged."""
    for number in (1, 2):
        torch.save({"a": torch.full((3,), number)}, tmp_path / f"{number}.pth")
    imported(tmp_path / "1.pth", tmp_path / "root", "torch")
    command = ["import", str(tmp_path / "2.pth"), "step-7", "--from", "torch", "--root", str(tmp_path / "root")]
    with pytest.raises(CheckpointExists):
        imported(tmp_path / "2.pth", tmp_path / "root", "torch")
    assert main(command) == 1
    assert "or replace the existing checkpoint with --overwrite." in capsys.readouterr().err
    assert loaded(tmp_path / "root", {"a": torch.zeros(3, dtype=torch.int64)})["a"].tolist() == [1, 1, 1]
    assert main([*command, "--overwrite"]) == 0
    assert loaded(tmp_path / "root", {"a": torch.zeros(3, dtype=torch.int64)})["a"].tolist() == [2, 2, 2]


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt, 130), (TypeError, 70)])
def test_the_exit_code_is_that_of_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], code: int
) -> None:
    """DCP wraps an interrupt in a CheckpointException: the exit code is that of the interrupt all the same."""

    def ends(*_: object) -> None:
        raise error("by test")

    torch.save({"a": torch.ones(3)}, tmp_path / "m.pth")
    monkeypatch.setattr(SourcePlanner, "resolve_data", ends)
    command = ["import", str(tmp_path / "m.pth"), "step-7", "--from", "torch", "--root", str(tmp_path / "root")]
    assert main([*command, "--copies", "1"]) == code
    assert not (tmp_path / "root" / "step-7").exists()


def header(fields: Any, data: bytes = b"") -> bytes:
    return headed(json.dumps(fields).encode(), data)


def headed(raw: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(raw)) + raw + data


def bytes_at(start: int, end: int) -> dict[str, Any]:
    return {"dtype": "U8", "shape": [end - start], "data_offsets": [start, end]}


def deflated(value: Any) -> bytes:
    """A file of torch.save with compressed records, which expand to any size when they are read."""
    buffer = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(pickled(value))) as source,
        zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as to,
    ):
        for entry in source.infolist():
            to.writestr(entry.filename, source.read(entry))
    return buffer.getvalue()


def pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("format_", "raw", "message"),
    [
        ("torch", None, "does not exist"),
        ("torch", b"nothing", "not a file of torch.save"),
        ("torch", pickled([torch.ones(2)]), "holds a list"),
        ("torch", pickled({"a.b": 1, "a": {"b": 2}}), "two entries with the same name"),
        ("torch", deflated({"a": torch.zeros(5)}), "store differently"),
        ("torch", pickled({"a": torch.eye(3).to_sparse()}), "not a plain tensor|mapped"),
        ("safetensors", None, "does not exist"),
        ("safetensors", b"", "no header"),
        ("safetensors", struct.pack("<Q", 1 << 62) + b"{}", "no header"),
        ("safetensors", header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"1234567"), "offsets"),
        ("safetensors", header({"a": bytes_at(0, 4), "b": bytes_at(2, 6)}, b"123456"), "gap, or overlap another"),
        ("safetensors", header({"a": bytes_at(0, 4), "b": bytes_at(0, 4)}, b"1234"), "gap, or overlap another"),
        ("safetensors", header({"a": bytes_at(0, 4), "b": bytes_at(5, 6)}, b"123456"), "gap, or overlap another"),
        ("safetensors", header({"a": bytes_at(0, 4)}, b"123456"), "end at 4, but the data ends at 6"),
        ("safetensors", header({"a": {"dtype": "U8", "shape": [0, 10**30], "data_offsets": [0, 0]}}), "invalid sizes"),
        ("safetensors", header({"a": {"dtype": "U8", "shape": [1] * 65, "data_offsets": [0, 1]}}, b"1"), "65 dim"),
        ("safetensors", header({"a": {"dtype": "U8", "shape": [math.inf], "data_offsets": [0, 1]}}, b"1"), "Infinity"),
        ("safetensors", header({"a": {"dtype": "U8", "shape": [math.nan], "data_offsets": [0, 1]}}, b"1"), "NaN"),
        ("safetensors", header({"__metadata__": [1]}), "no '{' at byte"),
        ("safetensors", headed(b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{}}'), "'a' appears twice"),
        (
            "safetensors",
            headed(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"dtype":"I32"}}') + bytes(8),
            "'dtype' appears twice",
        ),
        ("safetensors", headed(b'{"a":' + b"[" * 3000 + b"]" * 3000 + b"}"), "not a safetensors"),
        ("safetensors", headed(b"{} {}"), "bytes after the header"),
        ("safetensors", header({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, b"12345678"), "offsets"),
        ("safetensors", header({"a": {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]}}, b"12345678"), "'F99'"),
        ("safetensors", header({"a": {"dtype": "F32", "shape": [-2], "data_offsets": [8, 0]}}), "invalid sizes"),
        ("safetensors", header([1, 2]), "not a safetensors"),
        ("dcp", None, "no .metadata"),
        ("dcp", b"x", "no .metadata"),
    ],
)
def test_an_invalid_file_is_refused(tmp_path: Path, format_: str, raw: bytes | None, message: str) -> None:
    """The error says what is wrong, and no store is created."""
    path = tmp_path / "given"
    if raw is not None:
        path.write_bytes(raw)
    with pytest.raises(ConfigInvalid, match=message):
        imported(path, tmp_path / "root", format_)
    assert not (tmp_path / "root").exists()


@pytest.mark.filterwarnings("ignore:.*will not be loaded by default")
def test_a_torch_file_with_objects_needs_trust(tmp_path: Path) -> None:
    """Pickles run code only with `trust_pickles`."""
    torch.save(scheduled(), tmp_path / "m.pth")
    with pytest.raises(ObjectUnsafe, match=r"tests\.convert\.states\.Schedule") as raised:
        imported(tmp_path / "m.pth", tmp_path / "root", "torch")
    assert "add_safe_globals([tests.convert.states.Schedule])" in raised.value.hint
    assert not (tmp_path / "root").exists()
    imported(tmp_path / "m.pth", tmp_path / "root", "torch", trust_pickles=True)
    export_checkpoint("step-7", tmp_path / "out", format="torch", root=tmp_path / "root", trust_pickles=True)
    assert_equal(torch.load(tmp_path / "out", weights_only=False), scheduled())


@pytest.mark.parametrize("damage", ["missing", "short"])
def test_an_incomplete_stock_directory_is_refused(tmp_path: Path, damage: str) -> None:
    """The missing or short file is named, and nothing is saved."""
    dcp.save(contents(), storage_writer=dcp.FileSystemWriter(tmp_path / "stock"), no_dist=True)
    shard = tmp_path / "stock" / "__0_0.distcp"
    raw = shard.read_bytes()
    shard.unlink()
    if damage == "short":
        shard.write_bytes(raw[:-100])
    with pytest.raises(StoreError, match="__0_0") as raised:
        imported(tmp_path / "stock", tmp_path / "root", "dcp")
    assert isinstance(raised.value, ObjectMissing) == (damage == "missing")
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize(
    ("raw", "twice"),
    [
        ('{"weight_map": {}, "weight_map": {"a": "x.safetensors"}}', "weight_map"),
        ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "a"),
    ],
)
def test_an_index_with_a_duplicate_key_is_refused(tmp_path: Path, raw: str, twice: str) -> None:
    """A duplicate key at any depth is refused, because readers differ in which value they use."""
    (tmp_path / "model.safetensors.index.json").write_text(raw)
    with pytest.raises(ConfigInvalid, match=f"'{twice}' appears twice"):
        imported(tmp_path, tmp_path / "root", "safetensors")


def test_an_index_that_names_a_missing_file_is_refused(tmp_path: Path) -> None:
    """A missing file and a file outside the directory are refused."""
    for name in ("model-00001-of-00001.safetensors", "../x"):
        index = {"metadata": {}, "weight_map": {"a": name}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(ConfigInvalid, match="does not exist"):
            imported(tmp_path, tmp_path / "root", "safetensors")


def test_an_index_must_match_its_files(tmp_path: Path) -> None:
    """A tensor that no file has is an error, and so are several indexes."""
    library = pytest.importorskip("safetensors.torch")
    library.save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "x.safetensors", "b": "x.safetensors"}}))
    with pytest.raises(ConfigInvalid, match="names 'b', which is in none of its files"):
        imported(tmp_path, tmp_path / "root", "safetensors")
    index.write_text(json.dumps({"weight_map": {"a": "x.safetensors"}}))
    shutil.copy(index, tmp_path / "model.fp16.safetensors.index.json")
    with pytest.raises(ConfigInvalid, match=r"several indexes, each for a whole model: model\.fp16"):
        imported(tmp_path, tmp_path / "root", "safetensors")


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("format_", "name"),
    [("safetensors", "model.safetensors"), ("safetensors", "model.safetensors.index.json"), ("dcp", ".metadata")],
)
@pytest.mark.parametrize("way", ["a pipe", "a terabyte"])
def test_a_pipe_or_a_huge_file_does_not_block_an_import(tmp_path: Path, format_: str, name: str, way: str) -> None:
    """A pipe or a file of a terabyte has the name of a file: the import fails soon, without much memory."""
    if way == "a pipe":
        os.mkfifo(tmp_path / name)
    else:
        with (tmp_path / name).open("wb") as file:
            file.truncate(1 << 40)
    with memory_at_most(1 << 30), pytest.raises((ConfigInvalid, StoreError)):
        imported(tmp_path, tmp_path / "root", format_)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("way", ["a link", "a pipe"])
def test_an_import_reads_only_regular_files(tmp_path: Path, name: str, way: str) -> None:
    """A symbolic link is not followed, and a pipe is not opened."""
    directory, elsewhere = tmp_path / "stock", tmp_path / "private"
    dcp.save({"a": torch.arange(4.0)}, checkpoint_id=directory, no_dist=True)
    (directory / name).rename(elsewhere)
    if way == "a link":
        (directory / name).symlink_to(elsewhere)
    else:
        os.mkfifo(directory / name)
    with pytest.raises(
        (ConfigInvalid, StoreError), match=r"symbolic link\. Hint: Links are not followed|holds no|no such"
    ):
        imported(directory, tmp_path / "root", "dcp")
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize("trust", [False, True])
def test_a_pipe_is_no_torch_file(tmp_path: Path, *, trust: bool) -> None:
    """An open of a pipe would wait forever."""
    os.mkfifo(tmp_path / "m.pth")
    with pytest.raises(ConfigInvalid, match="does not exist"):
        imported(tmp_path / "m.pth", tmp_path / "root", "torch", trust_pickles=trust)


@pytest.mark.parametrize("format_", ["torch", "safetensors", "dcp"])
def test_a_path_with_a_nul_is_refused(tmp_path: Path, format_: str) -> None:
    """A NUL in a path argument, or in an index, is an error like any other invalid path."""
    with pytest.raises(ConfigInvalid):
        imported(tmp_path / "a\0b", tmp_path / "root", format_)
    torch.save({"a": torch.ones(2)}, tmp_path / "m.pth")
    with pytest.raises(ConfigInvalid):
        imported(tmp_path / "m.pth", tmp_path / "a\0b", "torch")
    imported(tmp_path / "m.pth", tmp_path / "root", "torch")
    with pytest.raises(ConfigInvalid, match="NUL"):
        export_checkpoint("step-7", tmp_path / "a\0b", format=format_, root=tmp_path / "root")  # type: ignore[arg-type]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "x\0y.safetensors"}}))
    with pytest.raises(ConfigInvalid, match="does not exist"):
        imported(tmp_path, tmp_path / "root", "safetensors")
    with pytest.raises(SystemExit):
        main(["ls", "--root", str(tmp_path / "a\0b")])


def test_an_object_larger_than_the_memory_is_a_store_error(tmp_path: Path) -> None:
    """A sparse file and a small `.metadata` describe an item of 8 GiB: import, export and load name it, and how to
    exclude it.
    """
    directory = tmp_path / "root" / "step-1"
    dcp.save({"a": "text"}, checkpoint_id=directory, no_dist=True)
    metadata = dcp.FileSystemReader(directory).read_metadata()
    ((index, info),) = metadata.storage_data.items()
    metadata.storage_data[index] = replace(info, length=8 << 30)
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    (directory / "__0_0.distcp").write_bytes(b"")
    os.truncate(directory / "__0_0.distcp", 8 << 30)
    with warnings.catch_warnings(), memory_at_most(2 << 30):
        warnings.simplefilter("ignore", ReplicatedCkptWarning)
        with pytest.raises(StoreError, match=r"an item of 8589934592 bytes .* --exclude"):
            imported(directory, tmp_path / "other", "dcp")
        with pytest.raises(StoreError, match=r"an item of 8589934592 bytes .* --exclude"):
            export_checkpoint("step-1", tmp_path / "out.pth", format="torch", root=tmp_path / "root")
        with pytest.raises(CheckpointException, match=r"an item of 8589934592 bytes .* --exclude"):
            loaded(tmp_path / "root", {"a": "text"}, "step-1")
