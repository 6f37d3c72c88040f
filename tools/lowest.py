"""Prints the lowest versions that pyproject.toml allows for the package and its tests, as constraints for pip."""

import re
import tomllib
from pathlib import Path

EXTRAS = "s3", "drill", "completion", "test"
_LOWEST = re.compile(r"([\w.-]+)(?:\[[\w,]+\])?>=([\w.]+)")


def read_lowest(pyproject: str) -> dict[str, str]:
    """The lowest version of each package. Packages without one, such as this package's own extras, are left out."""
    project = tomllib.loads(pyproject)["project"]
    needs = [*project["dependencies"], *(need for name in EXTRAS for need in project["optional-dependencies"][name])]
    return {found[1]: found[2] for found in map(_LOWEST.fullmatch, needs) if found}


if __name__ == "__main__":
    text = (Path(__file__).resolve().parents[1] / "pyproject.toml").read_text()
    print(*(f"{name}=={version}" for name, version in read_lowest(text).items()), sep="\n")
