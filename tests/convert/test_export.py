"""Export: what comes out is what was saved, in each format, and nothing half-made ever has its name."""

import errno
import fcntl
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from replicated_ckpt import Converted, KeyRules, ReplicatedWriter, export_checkpoint, import_checkpoint
from replicated_ckpt.cli.checkpoints.export import Printer, describe_converted
from replicated_ckpt.cli.main import main
from replicated_ckpt.core.chunk import Chunk
from replicated_ckpt.dcp.convert import source
from replicated_ckpt.dcp.convert.source import Progress
from replicated_ckpt.errors import (
    CheckpointNotFound,
    ConfigInvalid,
    ObjectCorrupt,
    ObjectUnsafe,
    ShardLost,
    StoreError,
    StoreFull,
)
from replicated_ckpt.stores.files import durable
from replicated_ckpt.stores.output import output
from tests.convert import states
from tests.convert.states import assert_equal, blank, checkpoint, contents, scheduled, tensors_of
from tests.damage import flip
from tests.harness.processes import open_below
from tests.marks import mark_long

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
Saved = tuple[Path, dict[str, Any]]


def exported(saved: Saved, to: Path, format_: Any, **options: Any) -> Converted:
    return export_checkpoint("step-1", to, format=format_, root=saved[0], **options)


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("mmap", [False, True])
def test_a_torch_file_is_the_state_dict(saved: Saved, tmp_path: Path, *, mmap: bool) -> None:
    """Nested as it was, objects included, bit for bit, loadable with `weights_only=True` and mapped."""
    done = exported(saved, tmp_path / "model.pth", "torch")
    assert_equal(torch.load(tmp_path / "model.pth", weights_only=True, mmap=mmap), saved[1])
    assert (done.tensors, done.objects, done.skipped) == (len(tensors_of(saved[1])), 4, ())
    assert entries(tmp_path) == ["model.pth"]


def test_windows_smaller_than_a_row_give_the_same(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However little is held in memory at once."""
    monkeypatch.setattr(source, "WINDOW_BYTES", 3_000_001)
    done = exported(saved, tmp_path / "model.pth", "torch", keys=KeyRules(include=["large", "odd.*"]))
    assert_equal(torch.load(tmp_path / "model.pth"), {"large": saved[1]["large"], "odd": saved[1]["odd"]})
    assert done.objects == 0


def test_safetensors_are_read_by_their_own_package(saved: Saved, tmp_path: Path) -> None:
    """One file if all fits; else files of a bounded size and the index; without what is no tensor, which is named."""
    library = pytest.importorskip("safetensors.torch")
    wanted = tensors_of(saved[1])
    done = exported(saved, tmp_path / "one", "safetensors")
    assert entries(tmp_path / "one") == ["model.safetensors"]
    assert_equal(library.load_file(tmp_path / "one" / "model.safetensors"), wanted)
    assert set(done.skipped) == {"step", "scheduler.last_epoch", "scheduler.milestones", "scheduler.name"}
    exported(saved, tmp_path / "many", "safetensors", shard_size_limit="200B")
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_bytes())
    files = {name: library.load_file(tmp_path / "many" / name) for name in set(index["weight_map"].values())}
    assert sorted(files) == [f"model-{n:05}-of-{len(files):05}.safetensors" for n in range(1, len(files) + 1)]
    assert entries(tmp_path / "many") == [*sorted(files), "model.safetensors.index.json"]
    assert_equal({name: files[file][name] for name, file in index["weight_map"].items()}, wanted)
    assert sum(map(len, files.values())) == len(wanted)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in wanted.values())
    for tensors in files.values():
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= 200


def test_what_safetensors_cannot_hold_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It has the number of entries and the first names, however many there are."""
    state = {"w": torch.ones(2), **{f"counter{number}": number for number in range(9)}}
    writer = ReplicatedWriter(tmp_path / "node", copies=1)
    dcp.save(state, checkpoint_id="step-1", storage_writer=writer)
    command = ["export", "step-1", "--root", str(tmp_path / "node"), "--to", "safetensors", str(tmp_path / "out")]
    assert main(command) == 0
    told = [line for line in capsys.readouterr().err.splitlines() if "counter" in line]
    names = "counter0, counter1, counter2, counter3 and 5 more"
    assert told == [f"export: left out 9 entries without a tensor, which safetensors files cannot hold: {names}"]


def test_a_dcp_directory_is_read_by_stock_torch(saved: Saved, tmp_path: Path) -> None:
    """By FileSystemReader, without this package; several shards if the limit says so."""
    exported(saved, tmp_path / "plain", "dcp", shard_size_limit="10KB")
    state = blank(saved[1])
    dcp.load(state, storage_reader=dcp.FileSystemReader(tmp_path / "plain"))
    assert_equal(state, saved[1])
    assert entries(tmp_path / "plain")[:3] == [".metadata", "__0_0.distcp", "__0_1.distcp"]


def test_keys_are_chosen_and_renamed(saved: Saved, tmp_path: Path) -> None:
    """The weights alone, as a model without the `model.` level takes them, by the command line."""
    library = pytest.importorskip("safetensors.torch")
    command = ["export", "step-1", "--root", str(saved[0]), "--include", "model.*", "--strip-prefix", "model."]
    assert main([*command, "--to", "torch", str(tmp_path / "m.pth")]) == 0
    assert_equal(torch.load(tmp_path / "m.pth"), saved[1]["model"])
    more = ["--exclude", "*.bias", "--rename", r"^(\d+)=layers.\1"]
    assert main([*command, *more, "--to", "safetensors", str(tmp_path / "m")]) == 0
    wanted = {f"layers.{name}": value for name, value in saved[1]["model"].items() if "bias" not in name}
    assert_equal(library.load_file(tmp_path / "m" / "model.safetensors"), wanted)


@pytest.mark.filterwarnings("ignore:.*will not be loaded by default")
def test_objects_that_need_trust_are_not_unpickled_without_it(tmp_path: Path) -> None:
    """They are named; with trust, or left out, the export is made."""
    saved = tmp_path / "root", checkpoint(tmp_path / "root", scheduled())
    with pytest.raises(ObjectUnsafe, match=r"'schedule'.*tests\.convert\.states\.Schedule") as raised:
        exported(saved, tmp_path / "m.pth", "torch")
    assert "--trust-pickles" in raised.value.hint
    exported(saved, tmp_path / "m.pth", "torch", trust_pickles=True)
    assert_equal(torch.load(tmp_path / "m.pth", weights_only=False), saved[1])
    exported(saved, tmp_path / "w.pth", "torch", keys=KeyRules(exclude=["schedule"]))
    assert_equal(torch.load(tmp_path / "w.pth"), {"weight": saved[1]["weight"]})


@pytest.mark.filterwarnings("ignore:.*will not be loaded by default")
def test_an_object_of_a_class_that_is_not_here_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trust alone does not bring it: the error says what is missing, in a checkpoint and in a torch file."""
    saved = tmp_path / "root", checkpoint(tmp_path / "root", scheduled())
    torch.save(scheduled(), tmp_path / "m.pth")
    monkeypatch.delattr(states, "Schedule")
    with pytest.raises(ConfigInvalid, match=r"'schedule' needs.*Schedule.*PYTHONPATH"):
        exported(saved, tmp_path / "out.pth", "torch", trust_pickles=True)
    with pytest.raises(ConfigInvalid, match=r"m\.pth needs.*Schedule.*PYTHONPATH"):
        import_checkpoint(tmp_path / "m.pth", "step-2", format="torch", root=saved[0], copies=1, trust_pickles=True)
    assert entries(tmp_path) == ["m.pth", "root"]


def test_tensors_inside_objects_are_written(tmp_path: Path) -> None:
    """A tuple of tensors is one object to DCP; gradients stay wanted."""
    seen_otherwise = torch.tensor([1 + 2j]).conj(), torch._neg_view(torch.ones(2))  # memory has the other sign
    state = {"pair": (torch.arange(5), torch.ones(2, requires_grad=True), *seen_otherwise)}
    saved = tmp_path / "root", checkpoint(tmp_path / "root", state)
    exported(saved, tmp_path / "m.pth", "torch")
    found = torch.load(tmp_path / "m.pth")["pair"]
    assert [tensor.tolist() for tensor in found] == [tensor.tolist() for tensor in state["pair"]]
    assert found[1].requires_grad


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["step-9", "--to", "torch", "PATH"], 3),
        (["step-1", "--to", "torch", "PATH", "--include", "modle.*"], 2),
        (["step-1", "--to", "torch", "PATH", "--rename", "x"], 2),
        (["step-1", "--to", "safetensors", "PATH", "--shard-size-limit", "much"], 2),
        (["step-1", "--to", "safetensors", "PATH", "--include", "step"], 2),
        (["step-1", "--to", "torch", "PATH/no/such/place"], 2),
    ],
)
def test_wrong_arguments_write_nothing(saved: Saved, tmp_path: Path, arguments: list[str], code: int) -> None:
    """And have the exit code of their kind."""
    made = [argument.replace("PATH", str(tmp_path / "out")) for argument in arguments]
    assert main(["export", *made, "--root", str(saved[0])]) == code
    assert entries(tmp_path) == []


def test_there_must_be_a_place_to_read_from(tmp_path: Path) -> None:
    """A root that does not exist is not created; no root and no bucket is an error of usage."""
    command = ["export", "step-1", "--to", "torch", str(tmp_path / "x")]
    assert main([*command, "--root", str(tmp_path / "none")]) == 3
    assert main(command) == 2
    assert entries(tmp_path) == []
    with pytest.raises(CheckpointNotFound):
        export_checkpoint("step-1", tmp_path / "x", format="torch", root=tmp_path)


@pytest.mark.parametrize("format_", ["torch", "safetensors", "dcp"])
def test_what_exists_is_replaced_only_on_demand(saved: Saved, tmp_path: Path, format_: str) -> None:
    """And a directory never if it holds anything else."""
    out, rules = tmp_path / "out", KeyRules(include=["model.*"])
    exported(saved, out, format_, keys=rules)
    with pytest.raises(ConfigInvalid, match="exists"):
        exported(saved, out, format_, keys=rules)
    exported(saved, out, format_, keys=KeyRules(include=["history.*"]), overwrite=True)
    assert entries(tmp_path) == ["out"]
    if format_ == "torch":
        assert list(torch.load(out)) == ["history"]
        return
    (out / "config.json").write_text("{}")
    with pytest.raises(ConfigInvalid, match=r"config\.json"):
        exported(saved, out, format_, keys=rules, overwrite=True)
    with pytest.raises(ConfigInvalid, match=r"is not a file\. Hint: Name another path; nothing was written\."):
        exported(saved, out, "torch", keys=rules, overwrite=True)


def test_what_a_killed_export_left_is_taken_over(saved: Saved, tmp_path: Path) -> None:
    """And a living one is not disturbed."""
    (tmp_path / ".out.part").mkdir()
    (tmp_path / ".out.part" / "half").write_text("x")
    exported(saved, tmp_path / "out", "dcp", keys=KeyRules(include=["model.*"]))
    assert entries(tmp_path / "out") == [".metadata", "__0_0.distcp"]
    (tmp_path / ".out.replaced").mkdir()
    (tmp_path / ".out.replaced" / ".metadata").write_text("x")
    exported(saved, tmp_path / "out", "dcp", keys=KeyRules(include=["model.*"]), overwrite=True)
    assert entries(tmp_path) == ["out"]
    place = tmp_path / "two"
    with (
        output.LocalOutput(place, is_directory=True, size_bytes=1),
        pytest.raises(ConfigInvalid, match="Another process"),
    ):
        exported(saved, place, "dcp")
    assert entries(tmp_path) == ["out"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root acts as another user")
@pytest.mark.parametrize("format_", ["torch", "dcp"])
def test_what_another_user_has_prepared_is_not_written_to(saved: Saved, tmp_path: Path, format_: str) -> None:
    """Its owner could put other bytes there once they were verified, and before they have their name."""
    part = tmp_path / ".out.part"
    part.mkdir()
    os.chown(part, 65534, 65534)
    with pytest.raises(ConfigInvalid, match=r"\.out\.part belongs to another user"):
        exported(saved, tmp_path / "out", format_, keys=KeyRules(include=["model.*"]))
    assert entries(tmp_path) == [".out.part"]
    assert entries(part) == []


def test_what_is_not_read_back_is_an_error_of_ours(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fails under what was written there, at the last look: no defect of ours, and nothing is left."""
    read = Path.read_bytes

    def fail(path: Path) -> bytes:
        if path.is_relative_to(tmp_path / ".out.part"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(StoreError, match=r"read back .* Input/output error"):
        exported(saved, tmp_path / "out", "dcp")
    assert entries(tmp_path) == []


@pytest.mark.parametrize("format_", ["torch", "dcp"])
def test_what_cannot_be_cleared_away_at_the_end_fails_nothing(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format_: str
) -> None:
    """The output is at its place, read back: it was said to have failed. The next export clears the rest away."""
    place = tmp_path / "out"
    exported(saved, place, format_)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, "rmdir", refuse)
        exported(saved, place, format_, overwrite=True)
    assert len(entries(tmp_path)) == 2, "something was left"
    exported(saved, place, format_, overwrite=True)
    assert entries(tmp_path) == ["out"]


def test_one_that_another_process_publishes_at_that_moment_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The place beside it is gone between two looks: that is said, and no descriptor stays open."""
    place = tmp_path / "out"

    def lock(fd: int, how: int) -> None:
        if how != fcntl.LOCK_UN:
            (tmp_path / ".out.part").rename(place)
        real(fd, how)

    real = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", lock)
    with pytest.raises(ConfigInvalid, match="Another process"):
        output.LocalOutput(place, is_directory=True, size_bytes=1)
    assert open_below(tmp_path) == []


@pytest.mark.parametrize("format_", ["torch", "safetensors", "dcp"])
def test_a_disk_without_room_is_left_as_it_was(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format_: str
) -> None:
    """It is found out before anything is written, or, if somebody else fills the disk meanwhile, by the write itself."""
    room = os.statvfs(tmp_path)
    full = os.statvfs_result((*room[:3], 0, 0, *room[5:]))
    with monkeypatch.context() as patched:
        patched.setattr(os, "statvfs", lambda _path: full)
        with pytest.raises(StoreFull, match=r"24\d{6} bytes, but only 0 are free"):
            exported(saved, tmp_path / "out", format_)
    real, left = durable.write_all, [1_000_000]

    def fills_up(fd: int, data: memoryview) -> None:
        left[0] -= len(data)
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(fd, data)

    monkeypatch.setattr(output, "write_all", fills_up)
    with pytest.raises(StoreFull):
        exported(saved, tmp_path / "out", format_)
    assert entries(tmp_path) == []


def test_it_is_read_back_before_it_is_said_to_be_done(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that stores other bytes than it was given is found out."""
    real = durable.write_all

    def lies(fd: int, data: memoryview) -> None:
        copy = bytearray(data)
        if len(copy) > 1_000_000:
            copy[500_000] ^= 1
        real(fd, memoryview(copy))

    monkeypatch.setattr(output, "write_all", lies)
    with pytest.raises(ObjectCorrupt, match="read back"):
        exported(saved, tmp_path / "out", "torch")
    assert entries(tmp_path) == []


def test_a_damaged_store_exports_nothing(tmp_path: Path) -> None:
    """No wrong byte gets out: without an intact copy there is no output, and the exit code says so."""
    root = tmp_path / "root"
    checkpoint(root, {"weight": torch.arange(300_000)})
    shard = root / "step-1" / "__0_0.distcp"
    flip(shard, 1_000_000)
    with pytest.raises(ShardLost):
        export_checkpoint("step-1", tmp_path / "out", format="torch", root=root)
    assert main(["export", "step-1", "--to", "torch", str(tmp_path / "out"), "--root", str(root)]) == 4
    assert entries(tmp_path) == ["root"]


@pytest.mark.parametrize("format_", mark_long(["torch", "dcp"], keep=["torch"]))
def test_a_tensor_of_another_layout_is_refused(tmp_path: Path, format_: Any) -> None:
    """A format of plain elements has no place for a sparse or a quantized one: it is named, and can be left out."""
    kinds = {
        "sparse": torch.eye(3).to_sparse(),
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    }
    for name, tensor in kinds.items():
        saved = tmp_path / "root", checkpoint(tmp_path / "root", {name: tensor, "plain": torch.ones(2)}, name)
        with pytest.raises(ConfigInvalid, match=f"'{name}' is not a plain tensor .{name}|torch.{name}") as raised:
            export_checkpoint(name, tmp_path / "out", format=format_, root=saved[0])
        assert "--exclude" in raised.value.hint
        assert entries(tmp_path) == ["root"]


def test_a_tensor_of_which_parts_are_missing_is_refused() -> None:
    """It would be filled up with whatever memory held."""
    entry = source.TensorEntry("w", "w", ("w",), torch.float32, (4, 2), (Chunk((0, 0), (2, 2)),))
    with pytest.raises(ConfigInvalid, match="only a part of 'w'"):
        source.check_covered(entry)


def test_a_torch_file_goes_to_a_url(saved: Saved, tmp_path: Path) -> None:
    """In one pass, under a part's name first; a directory alike, and replaced on demand only."""
    url = f"file://{tmp_path}/bucket"
    exported(saved, f"{url}/m.pth", "torch")  # type: ignore[arg-type]
    assert_equal(torch.load(tmp_path / "bucket" / "m.pth"), contents())
    for overwrite in (False, True):
        exported(saved, f"{url}/plain", "dcp", overwrite=overwrite)  # type: ignore[arg-type]
        with pytest.raises(ConfigInvalid, match="exists"):
            exported(saved, f"{url}/plain", "dcp")  # type: ignore[arg-type]
    state = blank(saved[1])
    dcp.load(state, storage_reader=dcp.FileSystemReader(tmp_path / "bucket" / "plain"))
    assert_equal(state, saved[1])
    with pytest.raises(ConfigInvalid, match="exists"):
        exported(saved, f"{url}/m.pth", "torch")  # type: ignore[arg-type]
    exported(saved, f"{url}/m.pth", "torch", overwrite=True)  # type: ignore[arg-type]
    with pytest.raises(ConfigInvalid, match="is not a file"):
        exported(saved, f"{url}/plain", "torch", overwrite=True)  # type: ignore[arg-type]
    with pytest.raises(ConfigInvalid, match="is not a directory"):
        exported(saved, f"{url}/m.pth", "dcp", overwrite=True)  # type: ignore[arg-type]
    assert sorted(entries(tmp_path / "bucket" / "plain")) == [".metadata", "__0_0.distcp"]
    assert entries(tmp_path / "bucket") == ["m.pth", "plain"]
    with pytest.raises(ConfigInvalid, match="s3://bucket names no file or directory in a bucket"):
        exported(saved, "s3://bucket", "torch")  # type: ignore[arg-type]


def test_progress_and_outcome_fit_any_size(capsys: pytest.CaptureFixture[str]) -> None:
    """What is smaller than a megabyte is not "0 of 0 MB", and one tensor is no "1 tensors"."""
    with Printer("export") as printer:
        printer._shown_at -= 2  # a line a second
        printer.show(Progress("writing", 10, 40))
        printer.show(Progress("verifying", 40, 40))
    said = capsys.readouterr().err
    assert re.fullmatch(r"export: 10 B of 40 B \(25%\) written, [\d.]+ [kM]?B/s, \d s left\nexport: verifying\n", said)
    one, more = (Converted("step-1", "x", count, count, count, 0.2) for count in (1, 2))
    assert describe_converted(one) == "1 tensor and 1 other entry, 1 byte in 0.2 s,"
    assert describe_converted(more) == "2 tensors and 2 other entries, 2 bytes in 0.2 s,"
