"""`make test TORCH=lowest` installs the lowest declared version of each dependency."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tools.lowest import EXTRAS, read_lowest

PYPROJECT = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
PROJECT = tomllib.loads(PYPROJECT)["project"]
NEEDS = {*PROJECT["dependencies"], *(need for name in EXTRAS for need in PROJECT["optional-dependencies"][name])}


@pytest.mark.parametrize("need", [Requirement(need) for need in sorted(NEEDS)], ids=lambda need: need.name)
def test_each_dependency_is_tested_at_its_lowest_version(need: Requirement) -> None:
    """A dependency without a lowest version would allow any version."""
    if need.name == PROJECT["name"]:
        return
    version = read_lowest(PYPROJECT)[need.name]
    assert version in need.specifier
    assert str(need.specifier) == f">={version}"
