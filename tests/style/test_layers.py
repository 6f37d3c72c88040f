"""The layers of the package: which parts may import which, and which work without torch."""

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.style.package_source import PACKAGE, ROOT, Source, imported_names, package_sources

ANYBODY = {"errors", "config", "environment", "version", "failpoints", "wording"}
ALLOWED_BY_ROOM: dict[str, set[str]] = {
    "errors": {"wording"},
    "wording": set(),
    "version": set(),
    "config": {"errors", "environment"},
    "environment": {"errors"},
    "failpoints": {"errors"},
    "core": ANYBODY - {"failpoints", "environment"},
    "stores": {"core"} | ANYBODY,
    "node": {"stores", "core"} | ANYBODY,
    "agent": {"node", "stores", "core"} | ANYBODY,
    "dcp": {"agent", "node", "stores", "core"} | ANYBODY,
    "drill": {"dcp", "agent", "node", "stores", "core", ""} | ANYBODY,
    "cli": {"drill", "dcp", "agent", "node", "stores", "core", ""} | ANYBODY,
    "testing": {"stores", "core"} | ANYBODY,
    "__main__": {"cli"},
    "integrations": {"dcp", "stores", "core", ""} | ANYBODY,
    "": {"dcp", "core"} | ANYBODY,  # the public interface imports torch on first use
}

# Modules that pure functions need. Before you add one: it must not use a clock, disk, network, thread or randomness.
PURE_MODULES = {
    "__future__",
    "abc",
    "array",
    "base64",
    "bisect",
    "collections",
    "copy",
    "dataclasses",
    "enum",
    "fastcrc",
    "fnmatch",
    "fractions",
    "functools",
    "hashlib",
    "heapq",
    "itertools",
    "json",
    "math",
    "operator",
    "posixpath",
    "re",
    "statistics",
    "string",
    "struct",
    "types",
    "typing",
    "zlib",
}
PURE_NAMES = {"pathlib.PurePath", "pathlib.PurePosixPath"}

TORCH_FREE_ROOMS = {"", "core", "stores", "node", "agent", "cli"} | ANYBODY
NEEDS_TORCH = {"replicated_ckpt.cli.drill", "replicated_ckpt.cli.bench"}

IMPORT_WITHOUT_TORCH = """
import importlib, sys
BLOCKED = {"torch", "torchvision", "numpy"}
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"{name} is absent on purpose")
sys.meta_path.insert(0, NoTorch())
for name in sys.argv[1:]:
    importlib.import_module(name)
assert not BLOCKED & set(sys.modules)
"""


def room_of_import(name: str) -> str | None:
    """The part of the package that an imported name belongs to. None: another package."""
    if name != PACKAGE and not name.startswith(f"{PACKAGE}."):
        return None
    first = name.removeprefix(PACKAGE).lstrip(".").partition(".")[0]
    return first if first in ALLOWED_BY_ROOM else ""  # such as `from replicated_ckpt import ReplicatedWriter`


def forbidden_imports(source: Source) -> Iterator[str]:
    allowed = ALLOWED_BY_ROOM.get(source.room)
    if allowed is None:
        yield f"{source.path}: no such room; give it a place in ALLOWED_BY_ROOM"
        return
    for line, name in imported_names(source):
        room = room_of_import(name)
        if room is not None and room != source.room and room not in allowed:
            yield f"{source.path}:{line}: {source.room or 'the package'} may not import {name}"


def impurities(source: Source) -> Iterator[str]:
    for line, name in imported_names(source):
        own = room_of_import(name) is not None
        if not own and name.partition(".")[0] not in PURE_MODULES and name not in PURE_NAMES:
            yield f"{source.path}:{line}: core is pure and may not import {name}"


def import_without_torch(names: list[str], *, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", IMPORT_WITHOUT_TORCH, *names]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)


def synthetic(path: str, text: str) -> Source:
    return Source(path, textwrap.dedent(text))


def test_imports_between_layers_go_one_way() -> None:
    """cli, drill -> dcp -> agent -> node -> stores -> core -> errors, and never back."""
    assert [arrow for source in package_sources() for arrow in forbidden_imports(source)] == []


def test_only_the_contract_tests_need_pytest() -> None:
    """Only `testing` imports pytest, which users of the package may not have."""
    rooms = {s.room for s in package_sources() for _, name in imported_names(s) if name.partition(".")[0] == "pytest"}
    assert rooms == {"testing"}


def test_core_is_pure() -> None:
    """core imports nothing that uses a disk, network, clock, thread, random numbers or torch."""
    core = [source for source in package_sources() if source.room == "core"]
    assert core
    assert [impurity for source in core for impurity in impurities(source)] == []


def test_torch_free_rooms_import_without_torch() -> None:
    """The agent, the stores, core and all commands except drill and bench import without torch."""
    names = [s.name for s in package_sources() if s.room in TORCH_FREE_ROOMS and s.name not in NEEDS_TORCH]
    assert "replicated_ckpt" in names
    result = import_without_torch(names)
    assert result.returncode == 0, result.stderr


def test_a_command_imports_its_own_verb() -> None:
    """A short command does not import the modules of the others, which take several times as long."""
    code = (
        "import sys; from replicated_ckpt.cli.main import main; main(['ls', '--root', '/nowhere']); print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert "replicated_ckpt.cli.checkpoints.ls" in done.stdout.split()
    assert "replicated_ckpt.cli.checkpoints.repair" not in done.stdout.split()


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("replicated_ckpt/core/protocol/placement.py", "from replicated_ckpt.stores.local.store import LocalStore"),
        ("replicated_ckpt/core/protocol/placement.py", "def f():\n    import replicated_ckpt.agent.http.server"),
        ("replicated_ckpt/stores/peer/copy.py", "from replicated_ckpt import dcp"),
        ("replicated_ckpt/agent/http/server.py", "from replicated_ckpt.dcp.save.writer import ReplicatedWriter"),
        ("replicated_ckpt/agent/http/server.py", "from replicated_ckpt import ReplicatedWriter"),
        ("replicated_ckpt/errors.py", "import replicated_ckpt.config"),
        ("replicated_ckpt/dcp/save/writer.py", "from replicated_ckpt.cli import main"),
        ("replicated_ckpt/stores/tee.py", "from replicated_ckpt.testing import MemorySink"),
        ("replicated_ckpt/testing/memory.py", "from replicated_ckpt.node.saves.service import NodeService"),
        ("replicated_ckpt/attic/old.py", ""),
    ],
)
def test_a_forbidden_import_is_found(path: str, text: str) -> None:
    """Shows that the layer test can fail."""
    assert len(list(forbidden_imports(synthetic(path, text)))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "import os",
        "import os.path",
        "from time import monotonic",
        "import threading",
        "from pathlib import Path",
        "import torch",
    ],
)
def test_an_impure_import_is_found(text: str) -> None:
    """Shows that the purity test can fail."""
    assert len(list(impurities(synthetic("replicated_ckpt/core/x.py", text)))) == 1


def test_an_import_of_torch_is_found(tmp_path: Path) -> None:
    """Shows that the torch-free test can fail: also an indirect import of torch is found."""
    (tmp_path / "outer.py").write_text("import inner\n")
    (tmp_path / "inner.py").write_text("import torch.distributed\n")
    result = import_without_torch(["outer"], cwd=tmp_path)
    assert result.returncode != 0
    assert "torch is absent on purpose" in result.stderr
