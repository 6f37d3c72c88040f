"""Members of enums as Python 3.11.0 to 3.11.3 pickle them, by their name: `.metadata` has one for each kind of tensor."""

import copyreg
import io
import pickle
import zipfile
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from replicated_ckpt import ReplicatedReader, ReplicatedWriter
from replicated_ckpt.dcp.metadata.metadata import decode_metadata
from replicated_ckpt.dcp.objects.weights_only import load_object, warn_if_unloadable
from replicated_ckpt.dcp.runtime.torch_private import MemoryFormat
from replicated_ckpt.errors import MetadataUnsafe, ObjectUnsafe

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore::replicated_ckpt.errors.ReplicatedCkptWarning"),
]


class Phase(Enum):
    WARM_UP = "warm-up"
    DECAY = "decay"

    def describe(self) -> str:
        return self.value


def by_name(member: Enum) -> tuple[Any, ...]:
    """What `Enum.__reduce_ex__` of CPython 3.11.0 to 3.11.3 returns."""
    return getattr, (type(member), member.name)


def pickled(value: Any, protocol: int = pickle.DEFAULT_PROTOCOL) -> bytes:
    file = io.BytesIO()
    pickler = pickle.Pickler(file, protocol)
    pickler.dispatch_table = copyreg.dispatch_table | {MemoryFormat: by_name, Phase: by_name}
    pickler.dump(value)
    assert b"getattr" in file.getvalue()
    return file.getvalue()


def as_object(value: Any, protocol: int = 2) -> memoryview:
    """What `torch.save` makes of it there."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", pickled(value, protocol))
    return memoryview(file.getvalue())


def stock_metadata(directory: Path, state: dict[str, Any]) -> Metadata:
    dcp.save(state, storage_writer=dcp.FileSystemWriter(directory))
    return dcp.FileSystemReader(directory).read_metadata()


def test_metadata_of_such_a_python_is_read(tmp_path: Path) -> None:
    """Also what stock DCP wrote there; each tensor has the properties that it was saved with."""
    state = {"a": torch.ones(2, 3), "b": torch.ones(1, 2, 2, 2).to(memory_format=torch.channels_last), "c": {"x": 1}}
    metadata = stock_metadata(tmp_path / "stock", state)
    assert decode_metadata(pickled(metadata), "here") == metadata


def test_a_checkpoint_of_such_a_python_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`.metadata` that names an enum's member by `getattr`, as Python 3.11.0 to 3.11.3 write it, is read."""
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(copyreg, "dispatch_table", copyreg.dispatch_table | {MemoryFormat: by_name})
        dcp.save({"a": torch.arange(4.0)}, checkpoint_id="step-1", storage_writer=ReplicatedWriter(tmp_path, copies=1))
    (written,) = tmp_path.rglob(".metadata")
    assert b"getattr" in written.read_bytes()
    loaded = {"a": torch.zeros(4)}
    dcp.load(loaded, checkpoint_id="step-1", storage_reader=ReplicatedReader(tmp_path))
    assert torch.equal(loaded["a"], torch.arange(4.0))


class Unpickled:
    """Pickles as the name of something that is no member of an enum."""

    def __init__(self, *arguments: Any) -> None:
        self._arguments = arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, self._arguments


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((Metadata, "__init__"), "names builtins.getattr"),
        ((MemoryFormat, "__class__"), "'__class__', which is not a member of"),
        ((MemoryFormat, "mro"), "'mro', which is not a member of"),
        ((MemoryFormat, "PRESERVE"), "'PRESERVE', which is not a member of"),
        ((MemoryFormat, "TORCH_PRESERVE_FORMAT", None), "names builtins.getattr"),
        (("a text", "upper"), "names builtins.getattr"),
        ((Phase, "DECAY"), "names tests.dcp.items.test_enum_members.Phase"),
    ],
)
def test_nothing_else_is_had_by_its_name(arguments: tuple[Any, ...], said: str) -> None:
    """`getattr` in `.metadata` gives members of the allowed enums alone: anything else is refused, by name."""
    with pytest.raises(MetadataUnsafe) as raised:
        decode_metadata(pickle.dumps(Metadata({}, Unpickled(*arguments), {})), "here")
    assert said in raised.value.message


@pytest.mark.parametrize("protocol", [2, 4])
def test_an_object_may_have_members_of_an_enum_that_is_allowed(
    protocol: int, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """An enum that the user has allowed loads, its members too, and no save warns of it."""
    raw = as_object({"phase": [Phase.DECAY]}, protocol)
    with pytest.raises(ObjectUnsafe) as raised:
        load_object(raw, "trainer", "shard __0_0.distcp")
    assert raised.value.names == ((__name__, "Phase"),)
    with torch.serialization.safe_globals([Phase]):
        assert load_object(raw, "trainer", "shard __0_0.distcp") == {"phase": [Phase.DECAY]}
        warn_if_unloadable(raw, "trainer")
    assert not list(recwarn)


def test_an_object_may_not_have_what_an_enum_else_has() -> None:
    """Of an enum that is allowed the members load, and not its methods."""
    raw = as_object(Unpickled(Phase, "describe"))
    with torch.serialization.safe_globals([Phase]), pytest.raises(ObjectUnsafe) as raised:
        load_object(raw, "trainer", "shard __0_0.distcp")
    assert "'describe', which is not a member of" in str(raised.value)
