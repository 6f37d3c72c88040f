"""What the integrations share, without a framework: checkpoints under names of others, and a value of each rank."""

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
    """A framework's names, with all that is in them; the newest by "latest"; a removed one is not found again."""
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
    """Retention knows the metric that a framework passes with a checkpoint."""
    checkpoints = opened(root, retention=Retention(keep_last=1, keep_best="eval_loss"))
    for step, loss in enumerate((3.0, 1.0, 2.0, 4.0)):
        checkpoints.save(f"checkpoint-{step}", {"x": torch.zeros(1)}, notes={"metrics": {"eval_loss": loss}})
    kept = ["checkpoint-1", "checkpoint-3"]
    wait_for(lambda: sorted(path.parent.name for path in root.glob("*/.metadata")) == kept, 20, "the last and the best")


def test_a_ranks_value_comes_back_as_it_was(tmp_path: Path) -> None:
    """Files, numbers and tensors in any tree, without the same tree being there before."""
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
def test_another_world_gets_rank_0s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: tuple[Any, ...]) -> None:
    """One rank loads what two saved, at any level of the state: there is none of its own, and rank 0's is there."""

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
    for _ in range(2):  # into the same state dict again, as after a memory tier that could not be read
        checkpoints.load("a", placed(wanted))
        assert values_in(wanted, trust_pickles=False) == (None, {"rank": 0})


def test_a_name_like_a_ranks_is_still_asked_for(tmp_path: Path) -> None:
    """Another value under such a name, a tensor say, is not left out without an error."""
    checkpoints = opened(tmp_path)
    checkpoints.save("a", {"mine": {"rank-0-of-2": torch.ones(1)}})
    with pytest.raises(CheckpointException, match=r"mine\.rank-0-of-1"):
        checkpoints.load("a", {"mine": {"rank-0-of-1": torch.zeros(1)}})


class Strange:
    """A class that nothing allows."""


def test_a_strange_class_runs_nothing_unless_trusted(tmp_path: Path) -> None:
    """The save warns of it, the load refuses it, and says which it is; on request it is loaded."""
    checkpoints = opened(tmp_path)
    with pytest.warns(UserWarning, match="Strange"):
        checkpoints.save("a", entries_of({"x": Strange()}))
    state = wanted_entries()
    checkpoints.load("a", state)
    with pytest.raises(ObjectUnsafe, match="Strange"):
        values_in(state, trust_pickles=False)
    assert type(values_in(state, trust_pickles=True)[0]["x"]).__name__ == "Strange"


def test_files_of_hooks_are_kept_with_those_below(tmp_path: Path) -> None:
    """What lies in directories of its own comes back there."""
    (tmp_path / "a" / "unet" / "deep").mkdir(parents=True)
    (tmp_path / "a" / "rng.bin").write_bytes(b"1")
    (tmp_path / "a" / "unet" / "deep" / "w.bin").write_bytes(b"2")
    files = collect_files(tmp_path / "a")
    assert files == {"rng.bin": b"1", "unet/deep/w.bin": b"2"}
    put_files(tmp_path / "b", files, torch_files=re.compile("scheduler.bin"))
    assert collect_files(tmp_path / "b") == files


def torch_file(pickled: bytes) -> bytes:
    """A container as `torch.save` makes it, around any pickle."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as container:
        container.writestr("archive/data.pkl", pickled)
        container.writestr("archive/byteorder", "little")
        container.writestr("archive/version", "3\n")
    return buffer.getvalue()


TAKES_AGES = b"\x80\x02}" + b")" + b"".join(b"q%ch%c\x86" % (n, n) for n in range(60)) + b"K\x01s."
RUNS_CODE = b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R."


@pytest.mark.parametrize(
    "raw", [torch_file(TAKES_AGES), torch_file(RUNS_CODE), RUNS_CODE], ids=["ages", "code", "bare"]
)
def test_a_framework_gets_no_file_that_torchs_unpickler_hangs_on(tmp_path: Path, raw: bytes) -> None:
    """It reads what this process has read, within bounds, and saved again; else nothing of the checkpoint is put there."""
    with pytest.raises(ObjectUnsafe, match=r"scheduler\.pt"):
        put_files(tmp_path / "b", {"state.json": b"{}", "scheduler.pt": raw})
    assert list(tmp_path.iterdir()) == []
    buffer, written = io.BytesIO(), {"base_lrs": [0.1, 0.2], "last_epoch": 3}
    torch.save(written, buffer)
    put_files(tmp_path / "b", {"state.json": b"{}", "scheduler.pt": buffer.getvalue()})
    assert torch.load(tmp_path / "b" / "scheduler.pt", weights_only=True) == written


@pytest.mark.parametrize("path", ["../x", "sub/../../x", "/{root}/x", ""])
def test_a_checkpoint_puts_no_file_elsewhere(tmp_path: Path, path: str) -> None:
    """A path that leads out of the directory is refused, and nothing is written."""
    path = path.format(root=tmp_path)
    with pytest.raises(ManifestInvalid, match="outside"):
        put_files(tmp_path / "b", {"good": b"1", path: b"2"})
    assert list(tmp_path.iterdir()) == []
