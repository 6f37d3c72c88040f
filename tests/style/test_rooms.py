"""Rooms: imports go in no circle, between files or between folders."""

from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.style.package_source import Source, imported_names, sources_of

FOLDERS = ("replicated_ckpt", "benchmarks")
Graph = Mapping[str, set[str]]


def imports_of(sources: Iterable[Source]) -> Graph:
    """Which modules each module imports; what a folder's own `__init__` gives out is not looked through."""
    modules = {source.name: source for source in sources if not source.path.endswith("__init__.py")}
    return {name: set(_imported(source, modules.keys() - {name})) for name, source in modules.items()}


def _imported(source: Source, modules: Iterable[str]) -> Iterator[str]:
    for _, name in imported_names(source):
        yield from {name, name.rpartition(".")[0]} & set(modules)


def rooms_of(imports: Graph) -> Graph:
    """The same between folders. A folder's `__main__` stands above it: it is a program, which nothing imports."""
    rooms: dict[str, set[str]] = {}
    for name, others in imports.items():
        room = name if name.endswith(".__main__") else name.rpartition(".")[0]
        rooms.setdefault(room, set()).update(other.rpartition(".")[0] for other in others)
    return {room: others - {room} for room, others in rooms.items()}


def circle_in(graph: Graph) -> list[str]:
    """One circle, its first member repeated at the end; empty: there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as exc:
        circle: list[str] = exc.args[1]
        return circle
    return []


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_files_import_each_other_in_a_circle(folder: str) -> None:
    """Also not inside functions."""
    assert circle_in(imports_of(sources_of(folder))) == []


def test_no_rooms_import_each_other_in_a_circle() -> None:
    """Each folder of the package lies above or below another one, not both."""
    assert circle_in(rooms_of(imports_of(sources_of("replicated_ckpt")))) == []


def test_a_circle_is_found() -> None:
    """Both ways of importing a module, and between folders where files have none."""
    sources = [
        Source("a/one.py", "from b import two"),
        Source("b/two.py", "x = 1"),
        Source("b/three.py", "import a.one"),
    ]
    assert circle_in(imports_of(sources)) == []
    assert circle_in(rooms_of(imports_of(sources))) != []
    assert circle_in(imports_of([*sources, Source("b/two.py", "from a.one import f")])) != []
