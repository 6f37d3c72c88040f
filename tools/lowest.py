"""Prints the lowest versions that pyproject.toml allows for what the package and its tests need, as pip's constraints."""

import re
import tomllib
from pathlib import Path

EXTRAS = "s3", "drill", "completion", "test"
_LOWEST = re.compile(r"([\w.-]+)(?:\[[\w,]+\])?>=([\w.]+)")


def read_lowest(pyproject: str) -> dict[str, str]:
    """By package. What names no lowest version, as an extra of this package itself, is left out."""
    project = tomllib.loads(pyproject)["project"]
    needs = [*project["dependencies"], *(need for name in EXTRAS for need in project["optional-dependencies"][name])]
    return {found[1]: found[2] for found in map(_LOWEST.fullmatch, needs) if found}


if __name__ == "__main__":
    text = (Path(__file__).resolve().parents[1] / "pyproject.toml").read_text()
    print(*(f"{name}=={version}" for name, version in read_lowest(text).items()), sep="\n")
