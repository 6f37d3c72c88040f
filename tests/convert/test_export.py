"""Export: each format contains what was saved, and a partial output never has the final name."""

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
    """The file has the nested state dict with its objects, bit for bit, and loads with `weights_only=True` and `mmap`."""
    done = exported(saved, tmp_path / "model.pth", "torch")
    assert_equal(torch.load(tmp_path / "model.pth", weights_only=True, mmap=mmap), saved[1])
    assert (done.tensors, done.objects, done.skipped) == (len(tensors_of(saved[1])), 4, ())
    assert entries(tmp_path) == ["model.pth"]


def test_windows_smaller_than_a_row_give_the_same(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result does not depend on the size of the window in memory."""
    monkeypatch.setattr(source, "WINDOW_BYTES", 3_000_001)
    done = exported(saved, tmp_path / "model.pth", "torch", keys=KeyRules(include=["large", "odd.*"]))
    assert_equal(torch.load(tmp_path / "model.pth"), {"large": saved[1]["large"], "odd": saved[1]["odd"]})
    assert done.objects == 0


def test_safetensors_are_read_by_their_own_package(saved: Saved, tmp_path: Path) -> None:
    """One file if everything fits, else files of a limited size and an index. Entries without a tensor are skipped and
    listed.
    """
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


def test_entries_that_safetensors_cannot_hold_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The line has the number of skipped entries and the first names."""
    state = {"w": torch.ones(2), **{f"counter{number}": number for number in range(9)}}
    writer = ReplicatedWriter(tmp_path / "node", copies=1)
    dcp.save(state, checkpoint_id="step-1", storage_writer=writer)
    command = ["export", "step-1", "--root", str(tmp_path / "node"), "--to", "safetensors", str(tmp_path / "out")]
    assert main(command) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "counter" in line]
    names = "counter0, counter1, counter2, counter3 and 5 more"
    assert lines == [f"export: left out 9 entries without a tensor, which safetensors files cannot hold: {names}"]


def test_a_dcp_directory_is_read_by_stock_torch(saved: Saved, tmp_path: Path) -> None:
    """FileSystemReader loads it without this package. With a size limit there are several shards."""
    exported(saved, tmp_path / "plain", "dcp", shard_size_limit="10KB")
    state = blank(saved[1])
    dcp.load(state, storage_reader=dcp.FileSystemReader(tmp_path / "plain"))
    assert_equal(state, saved[1])
    assert entries(tmp_path / "plain")[:3] == [".metadata", "__0_0.distcp", "__0_1.distcp"]


def test_keys_are_chosen_and_renamed(saved: Saved, tmp_path: Path) -> None:
    """The command exports only the weights, without the `model.` prefix."""
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
    """The error names the objects. The export works with trust, or without these objects."""
    saved = tmp_path / "root", checkpoint(tmp_path / "root", scheduled())
    with pytest.raises(ObjectUnsafe, match=r"'schedule'.*tests\.convert\.states\.Schedule") as raised:
        exported(saved, tmp_path / "m.pth", "torch")
    assert "--trust-pickles" in raised.value.hint
    exported(saved, tmp_path / "m.pth", "torch", trust_pickles=True)
    assert_equal(torch.load(tmp_path / "m.pth", weights_only=False), saved[1])
    exported(saved, tmp_path / "w.pth", "torch", keys=KeyRules(exclude=["schedule"]))
    assert_equal(torch.load(tmp_path / "w.pth"), {"weight": saved[1]["weight"]})


@pytest.mark.filterwarnings("ignore:.*will not be loaded by default")
def test_an_object_of_a_missing_class_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class that cannot be imported is named in the error, for a checkpoint and for a torch file, although pickles
    are trusted.
    """
    saved = tmp_path / "root", checkpoint(tmp_path / "root", scheduled())
    torch.save(scheduled(), tmp_path / "m.pth")
    monkeypatch.delattr(states, "Schedule")
    with pytest.raises(ConfigInvalid, match=r"'schedule' needs.*Schedule.*PYTHONPATH"):
        exported(saved, tmp_path / "out.pth", "torch", trust_pickles=True)
    with pytest.raises(ConfigInvalid, match=r"m\.pth needs.*Schedule.*PYTHONPATH"):
        import_checkpoint(tmp_path / "m.pth", "step-2", format="torch", root=saved[0], copies=1, trust_pickles=True)
    assert entries(tmp_path) == ["m.pth", "root"]


def test_tensors_inside_objects_are_written(tmp_path: Path) -> None:
    """DCP treats a tuple of tensors as one object. `requires_grad` survives."""
    seen_otherwise = torch.tensor([1 + 2j]).conj(), torch._neg_view(torch.ones(2))  # the memory has the opposite sign
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
    """Each kind of wrong argument has its exit code."""
    made = [argument.replace("PATH", str(tmp_path / "out")) for argument in arguments]
    assert main(["export", *made, "--root", str(saved[0])]) == code
    assert entries(tmp_path) == []


def test_an_export_needs_an_existing_source(tmp_path: Path) -> None:
    """A missing root is not created. Without root and bucket, the command is a usage error."""
    command = ["export", "step-1", "--to", "torch", str(tmp_path / "x")]
    assert main([*command, "--root", str(tmp_path / "none")]) == 3
    assert main(command) == 2
    assert entries(tmp_path) == []
    with pytest.raises(CheckpointNotFound):
        export_checkpoint("step-1", tmp_path / "x", format="torch", root=tmp_path)


@pytest.mark.parametrize("format_", ["torch", "safetensors", "dcp"])
def test_an_existing_output_is_replaced_only_on_demand(saved: Saved, tmp_path: Path, format_: str) -> None:
    """An existing output is replaced only with `overwrite`, and never if the directory holds other files."""
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


def test_the_remains_of_a_killed_export_are_replaced(saved: Saved, tmp_path: Path) -> None:
    """An export replaces the remains of a killed one, and refuses the output of a running one."""
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
def test_a_temporary_directory_of_another_user_is_refused(saved: Saved, tmp_path: Path, format_: str) -> None:
    """The owner of the temporary directory could replace the bytes after they were verified."""
    part = tmp_path / ".out.part"
    part.mkdir()
    os.chown(part, 65534, 65534)
    with pytest.raises(ConfigInvalid, match=r"\.out\.part belongs to another user"):
        exported(saved, tmp_path / "out", format_, keys=KeyRules(include=["model.*"]))
    assert entries(tmp_path) == [".out.part"]
    assert entries(part) == []


def test_a_disk_error_on_read_back_is_a_store_error(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fails when the output is read back: a StoreError is raised, and no file remains."""
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
def test_a_failed_cleanup_does_not_fail_the_export(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format_: str
) -> None:
    """The export succeeds although the old output cannot be deleted. The next export deletes it."""
    place = tmp_path / "out"
    exported(saved, place, format_)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, "rmdir", refuse)
        exported(saved, place, format_, overwrite=True)
    assert len(entries(tmp_path)) == 2, "the old output is still there"
    exported(saved, place, format_, overwrite=True)
    assert entries(tmp_path) == ["out"]


def test_an_output_that_another_process_publishes_meanwhile_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The temporary directory is renamed by another process before it is locked: the export is refused, and no
    descriptor leaks.
    """
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
    """A full disk is detected before the first write, or by a write if it fills up meanwhile. No file remains."""
    room = os.statvfs(tmp_path)
    full = os.statvfs_result((*room[:3], 0, 0, *room[5:]))
    with monkeypatch.context() as patched:
        patched.setattr(os, "statvfs", lambda _path: full)
        with pytest.raises(StoreFull, match=r"24\d{6} bytes, but only 0 are free"):
            exported(saved, tmp_path / "out", format_)
    real, left = durable.write_all, [1_000_000]

    def fill_up(fd: int, data: memoryview) -> None:
        left[0] -= len(data)
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(fd, data)

    monkeypatch.setattr(output, "write_all", fill_up)
    with pytest.raises(StoreFull):
        exported(saved, tmp_path / "out", format_)
    assert entries(tmp_path) == []


def test_an_output_is_read_back_before_the_export_ends(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that stores wrong bytes is detected."""
    real = durable.write_all

    def flip_a_bit(fd: int, data: memoryview) -> None:
        copy = bytearray(data)
        if len(copy) > 1_000_000:
            copy[500_000] ^= 1
        real(fd, memoryview(copy))

    monkeypatch.setattr(output, "write_all", flip_a_bit)
    with pytest.raises(ObjectCorrupt, match="read back"):
        exported(saved, tmp_path / "out", "torch")
    assert entries(tmp_path) == []


def test_a_damaged_store_exports_nothing(tmp_path: Path) -> None:
    """Without an intact copy there is no output, and the exit code is 4."""
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
    """Sparse and quantized tensors are refused by name, with the option that excludes them."""
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
    """The missing parts would contain arbitrary memory."""
    entry = source.TensorEntry("w", "w", ("w",), torch.float32, (4, 2), (Chunk((0, 0), (2, 2)),))
    with pytest.raises(ConfigInvalid, match="only a part of 'w'"):
        source.check_covered(entry)


def test_exports_to_a_url(saved: Saved, tmp_path: Path) -> None:
    """Files and directories at a URL are written under a temporary name first, and replaced only with `overwrite`."""
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
    """Sizes below a megabyte and single tensors are printed correctly."""
    with Printer("export") as printer:
        printer._shown_at -= 2  # one line a second
        printer.show(Progress("writing", 10, 40))
        printer.show(Progress("verifying", 40, 40))
    printed = capsys.readouterr().err
    assert re.fullmatch(
        r"export: 10 B of 40 B \(25%\) written, [\d.]+ [kM]?B/s, \d s left\nexport: verifying\n", printed
    )
    one, more = (Converted("step-1", "x", count, count, count, 0.2) for count in (1, 2))
    assert describe_converted(one) == "1 tensor and 1 other entry, 1 byte in 0.2 s,"
    assert describe_converted(more) == "2 tensors and 2 other entries, 2 bytes in 0.2 s,"
