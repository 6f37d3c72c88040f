"""What the framework integrations share: checkpoints under a framework's names, a value per rank, and files of hooks."""

import io
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from replicated_ckpt import Retention
from replicated_ckpt.dcp.named_checkpoints import NamedCheckpoints
from replicated_ckpt.dcp.rank_state import rank_state
from replicated_ckpt.dcp.rank_state.rank_state import entries_of, values_in, wanted_entries
from replicated_ckpt.errors import ManifestInvalid, ObjectUnsafe
from replicated_ckpt.integrations.directory_files import collect_files, put_files
from tests.agent.agents import wait_for

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def opened(root: Path, **options: Any) -> NamedCheckpoints:
    return NamedCheckpoints(root, {"copies": 1, **options})


def test_names_are_found_loaded_and_removed(root: Path) -> None:
    """Checkpoints with a framework's names are saved, found, loaded and deleted. "latest" is the newest of them."""
    checkpoints = opened(root)
    assert checkpoints.find("latest") is None
    for name, value in (("logs,epoch=0-step=2.ckpt", 2.0), ("logs,epoch=0-step=4.ckpt", 4.0)):
        checkpoints.save(name, {"x": torch.full((3,), value)})
    state = {"x": torch.zeros(3)}
    assert checkpoints.load("latest", state) == "logs,epoch=0-step=4.ckpt"
    assert state["x"].tolist() == [4.0] * 3
    assert checkpoints.delete("logs,epoch=0-step=4.ckpt")
    assert not checkpoints.delete("logs,epoch=0-step=4.ckpt")
    assert checkpoints.find("logs,epoch=0-step=4.ckpt") is None
    assert checkpoints.find("latest") == "logs,epoch=0-step=2.ckpt"
    checkpoints.close()


def test_the_best_one_is_kept_by_its_metric(root: Path) -> None:
    """Retention keeps the best checkpoint by the metric that the framework passes."""
    checkpoints = opened(root, retention=Retention(keep_last=1, keep_best="eval_loss"))
    for step, loss in enumerate((3.0, 1.0, 2.0, 4.0)):
        checkpoints.save(f"checkpoint-{step}", {"x": torch.zeros(1)}, notes={"metrics": {"eval_loss": loss}})
    kept = ["checkpoint-1", "checkpoint-3"]
    wait_for(lambda: sorted(path.parent.name for path in root.glob("*/.metadata")) == kept, 20, "the last and the best")


def test_a_ranks_value_is_restored(tmp_path: Path) -> None:
    """A rank's value of bytes, numbers and tensors in any tree loads without a template of that tree."""
    checkpoints = opened(tmp_path)
    checkpoints.save("a", entries_of({"files": {"x.pt": b"\x00\xff"}, "deep": [{"t": torch.arange(3)}, (1, None)]}))
    state = wanted_entries()
    checkpoints.load("a", state)
    own, first = values_in(state, trust_pickles=False)
    for value in (own, first):
        assert value["files"] == {"x.pt": b"\x00\xff"}
        assert value["deep"][0]["t"].tolist() == [0, 1, 2]
        assert value["deep"][1] == (1, None)


@pytest.mark.parametrize("path", [(), ("random",), ("app", 0, "random")])
def test_another_world_gets_the_value_of_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: tuple[Any, ...]
) -> None:
    """One rank loads what two saved, at any level of the state: the rank gets no value of its own, and gets rank 0's
    value.
    """

    def placed(entries: dict[str, Any]) -> Any:
        value: Any = entries
        for key in reversed(path):
            value = [value] if key == 0 else {key: value}
        return value

    checkpoints = opened(tmp_path)
    with monkeypatch.context() as patch:
        for module in (rank_state, rank_state):
            patch.setattr(module, "rank_and_world", lambda: (0, 2))
        checkpoints.save("a", placed(entries_of({"rank": 0})))
    wanted = wanted_entries()
    for _ in range(2):  # again into the same state dict, as after a memory tier that could not be read
        checkpoints.load("a", placed(wanted))
        assert values_in(wanted, trust_pickles=False) == (None, {"rank": 0})


def test_a_missing_tensor_named_like_a_ranks_item_is_an_error(tmp_path: Path) -> None:
    """An ordinary tensor whose name looks like a rank's item still raises an error if it is missing."""
    checkpoints = opened(tmp_path)
    checkpoints.save("a", {"mine": {"rank-0-of-2": torch.ones(1)}})
    with pytest.raises(CheckpointException, match=r"mine\.rank-0-of-1"):
        checkpoints.load("a", {"mine": {"rank-0-of-1": torch.zeros(1)}})


class Strange:
    """A class that nobody has allowed."""


def test_a_strange_class_runs_nothing_unless_trusted(tmp_path: Path) -> None:
    """A value of an unknown class: the save warns and the load raises ObjectUnsafe. With `trust_pickles` it loads."""
    checkpoints = opened(tmp_path)
    with pytest.warns(UserWarning, match="Strange"):
        checkpoints.save("a", entries_of({"x": Strange()}))
    state = wanted_entries()
    checkpoints.load("a", state)
    with pytest.raises(ObjectUnsafe, match="Strange"):
        values_in(state, trust_pickles=False)
    assert type(values_in(state, trust_pickles=True)[0]["x"]).__name__ == "Strange"


def test_files_of_hooks_are_restored_with_subdirectories(tmp_path: Path) -> None:
    (tmp_path / "a" / "unet" / "deep").mkdir(parents=True)
    (tmp_path / "a" / "rng.bin").write_bytes(b"1")
    (tmp_path / "a" / "unet" / "deep" / "w.bin").write_bytes(b"2")
    files = collect_files(tmp_path / "a")
    assert files == {"rng.bin": b"1", "unet/deep/w.bin": b"2"}
    put_files(tmp_path / "b", files, torch_files=re.compile("scheduler.bin"))
    assert collect_files(tmp_path / "b") == files


def torch_file(pickled: bytes) -> bytes:
    """A container as `torch.save` writes it, with this pickle."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as container:
        container.writestr("archive/data.pkl", pickled)
        container.writestr("archive/byteorder", "little")
        container.writestr("archive/version", "3\n")
    return buffer.getvalue()


TAKES_YEARS = b"\x80\x02}" + b")" + b"".join(b"q%ch%c\x86" % (n, n) for n in range(60)) + b"K\x01s."
RUNS_CODE = b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R."


@pytest.mark.parametrize(
    "raw", [torch_file(TAKES_YEARS), torch_file(RUNS_CODE), RUNS_CODE], ids=["years", "code", "bare"]
)
def test_a_framework_gets_no_file_that_torchs_unpickler_hangs_on(tmp_path: Path, raw: bytes) -> None:
    """Torch files for the framework are checked and rewritten first. A hostile one raises ObjectUnsafe, and no file is
    written.
    """
    with pytest.raises(ObjectUnsafe, match=r"scheduler\.pt"):
        put_files(tmp_path / "b", {"state.json": b"{}", "scheduler.pt": raw})
    assert list(tmp_path.iterdir()) == []
    buffer, written = io.BytesIO(), {"base_lrs": [0.1, 0.2], "last_epoch": 3}
    torch.save(written, buffer)
    put_files(tmp_path / "b", {"state.json": b"{}", "scheduler.pt": buffer.getvalue()})
    assert torch.load(tmp_path / "b" / "scheduler.pt", weights_only=True) == written


@pytest.mark.parametrize("path", ["../x", "sub/../../x", "/{root}/x", ""])
def test_a_file_path_outside_the_directory_is_refused(tmp_path: Path, path: str) -> None:
    """A file path that leaves the directory raises ManifestInvalid, and nothing is written."""
    path = path.format(root=tmp_path)
    with pytest.raises(ManifestInvalid, match="outside"):
        put_files(tmp_path / "b", {"good": b"1", path: b"2"})
    assert list(tmp_path.iterdir()) == []
