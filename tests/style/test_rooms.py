"""Imports have no cycles, neither between files nor between folders."""

from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.style.package_source import Source, imported_names, sources_of

FOLDERS = ("replicated_ckpt", "benchmarks")
Graph = Mapping[str, set[str]]


def imports_of(sources: Iterable[Source]) -> Graph:
    """The modules that each module imports. Names that an `__init__` re-exports are not followed."""
    modules = {source.name: source for source in sources if not source.path.endswith("__init__.py")}
    return {name: set(_imported(source, modules.keys() - {name})) for name, source in modules.items()}


def _imported(source: Source, modules: Iterable[str]) -> Iterator[str]:
    for _, name in imported_names(source):
        yield from {name, name.rpartition(".")[0]} & set(modules)


def rooms_of(imports: Graph) -> Graph:
    """The imports between folders. A `__main__` counts as a folder of its own, because nothing imports it."""
    rooms: dict[str, set[str]] = {}
    for name, others in imports.items():
        room = name if name.endswith(".__main__") else name.rpartition(".")[0]
        rooms.setdefault(room, set()).update(other.rpartition(".")[0] for other in others)
    return {room: others - {room} for room, others in rooms.items()}


def find_cycle(graph: Graph) -> list[str]:
    """One cycle, with its first member repeated at the end. Empty: there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as exc:
        circle: list[str] = exc.args[1]
        return circle
    return []


@pytest.mark.parametrize("folder", FOLDERS)
def test_files_have_no_import_cycle(folder: str) -> None:
    """Imports inside functions count."""
    assert find_cycle(imports_of(sources_of(folder))) == []


def test_folders_have_no_import_cycle() -> None:
    """Of two folders of the package, at most one imports the other."""
    assert find_cycle(rooms_of(imports_of(sources_of("replicated_ckpt")))) == []


def test_a_cycle_is_found() -> None:
    """Both import statements count. Folders may form a cycle where their files do not."""
    sources = [
        Source("a/one.py", "from b import two"),
        Source("b/two.py", "x = 1"),
        Source("b/three.py", "import a.one"),
    ]
    assert find_cycle(imports_of(sources)) == []
    assert find_cycle(rooms_of(imports_of(sources))) != []
    assert find_cycle(imports_of([*sources, Source("b/two.py", "from a.one import f")])) != []
