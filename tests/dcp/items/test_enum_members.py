"""Python 3.11.0 to 3.11.3 pickle the members of enums by name. `.metadata` contains such a member for each tensor."""

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
    """The container that `torch.save` writes on such a Python."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", pickled(value, protocol))
    return memoryview(file.getvalue())


def stock_metadata(directory: Path, state: dict[str, Any]) -> Metadata:
    dcp.save(state, storage_writer=dcp.FileSystemWriter(directory))
    return dcp.FileSystemReader(directory).read_metadata()


def test_metadata_with_members_by_name_is_read(tmp_path: Path) -> None:
    """Stock DCP's `.metadata` from such a Python is read with all tensor properties."""
    state = {"a": torch.ones(2, 3), "b": torch.ones(1, 2, 2, 2).to(memory_format=torch.channels_last), "c": {"x": 1}}
    metadata = stock_metadata(tmp_path / "stock", state)
    assert decode_metadata(pickled(metadata), "here") == metadata


def test_a_checkpoint_with_members_by_name_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint whose `.metadata` contains an enum member by `getattr` loads."""
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(copyreg, "dispatch_table", copyreg.dispatch_table | {MemoryFormat: by_name})
        dcp.save({"a": torch.arange(4.0)}, checkpoint_id="step-1", storage_writer=ReplicatedWriter(tmp_path, copies=1))
    (written,) = tmp_path.rglob(".metadata")
    assert b"getattr" in written.read_bytes()
    loaded = {"a": torch.zeros(4)}
    dcp.load(loaded, checkpoint_id="step-1", storage_reader=ReplicatedReader(tmp_path))
    assert torch.equal(loaded["a"], torch.arange(4.0))


class Unpickled:
    """Pickles as `getattr` of these arguments, which name no member of an allowed enum."""

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
def test_getattr_of_anything_else_is_refused(arguments: tuple[Any, ...], said: str) -> None:
    """`getattr` in `.metadata` is allowed for members of the allowed enums only. Anything else raises MetadataUnsafe
    with its name.
    """
    with pytest.raises(MetadataUnsafe) as raised:
        decode_metadata(pickle.dumps(Metadata({}, Unpickled(*arguments), {})), "here")
    assert said in raised.value.message


@pytest.mark.parametrize("protocol", [2, 4])
def test_members_of_an_allowed_enum_load(
    protocol: int, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """Once the user has allowed an enum, an object with its members loads, and a save gives no warning."""
    raw = as_object({"phase": [Phase.DECAY]}, protocol)
    with pytest.raises(ObjectUnsafe) as raised:
        load_object(raw, "trainer", "shard __0_0.distcp")
    assert raised.value.names == ((__name__, "Phase"),)
    with torch.serialization.safe_globals([Phase]):
        assert load_object(raw, "trainer", "shard __0_0.distcp") == {"phase": [Phase.DECAY]}
        warn_if_unloadable(raw, "trainer")
    assert not list(recwarn)


def test_methods_of_an_allowed_enum_are_refused() -> None:
    raw = as_object(Unpickled(Phase, "describe"))
    with torch.serialization.safe_globals([Phase]), pytest.raises(ObjectUnsafe) as raised:
        load_object(raw, "trainer", "shard __0_0.distcp")
    assert "'describe', which is not a member of" in str(raised.value)
