"""The package as text: every module with its syntax tree, read without importing the package."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "replicated_ckpt"


@dataclass(frozen=True)
class Source:
    """One module. `name` is dotted, `path` is relative to the repository."""

    path: str
    text: str

    @property
    def name(self) -> str:
        return self.path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")

    @property
    def room(self) -> str:
        """The first name below the package: `core`, `errors`, ...; empty for the package itself."""
        return self.name.removeprefix(PACKAGE).lstrip(".").partition(".")[0]

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All nodes of the tree."""
        return tuple(ast.walk(self.tree))


@cache
def sources_of(folder: str) -> tuple[Source, ...]:
    """Every module in a folder of the repository. Read and parsed once for all rules."""
    files = sorted((ROOT / folder).rglob("*.py"))
    return tuple(Source(file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8")) for file in files)


def package_sources() -> tuple[Source, ...]:
    """Every module of the package."""
    return sources_of(PACKAGE)


def imported_names(source: Source) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every import in the module, including those inside functions."""
    for node in source.nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
