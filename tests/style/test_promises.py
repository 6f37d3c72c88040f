"""Each test says which promise it keeps, by its name and the first line of its docstring."""

import ast
from pathlib import Path

from tests.style.package_source import sources_of


def test_each_test_says_its_promise() -> None:
    """A name alone leaves open what holds, and for whom."""
    silent = [
        f"{source.path}:{node.lineno}: {node.name}"
        for source in sources_of("tests")
        if Path(source.path).name.startswith("test_")
        for node in source.nodes
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and not ast.get_docstring(node)
    ]
    assert silent == []
