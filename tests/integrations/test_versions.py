"""A framework that is too old is named before its import, which would fail with another error."""

import importlib
import sys
from pathlib import Path

import pytest

from replicated_ckpt.errors import ConfigInvalid
from replicated_ckpt.integrations import check_versions


def install(directory: Path, package: str, version: str) -> None:
    """Writes the metadata that pip installs for a package, without code."""
    metadata = directory / f"{package}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")


@pytest.mark.parametrize(
    ("module", "package", "version"),
    [
        ("lightning", "lightning", "2.5.6"),
        ("transformers", "transformers", "5.2.0"),
        ("transformers", "accelerate", "1.9.0"),
        ("accelerate", "accelerate", "1.9.0"),
        ("torchtitan", "torchtitan", "0.2.1"),
        ("ray", "ray", "2.59.1"),
    ],
)
def test_a_framework_that_is_too_old_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, package: str, version: str
) -> None:
    """The import of an integration raises, with the installed and the needed version, and a hint that installs it."""
    install(tmp_path, package, version)
    monkeypatch.syspath_prepend(tmp_path)
    name = f"replicated_ckpt.integrations.{module}"
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(
        ConfigInvalid, match=rf"{name} needs {package} [0-9.]+ or newer, but {version} is installed"
    ) as caught:
        importlib.import_module(name)
    assert f"pip install '{package}>=" in caught.value.hint


@pytest.mark.parametrize("version", ["2.6", "2.6.0rc1", "2.10.0.dev20261128+cpu", "3"])
def test_a_framework_that_is_new_enough_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """The lowest version, its release candidate, and any newer version."""
    install(tmp_path, "lightning", version)
    monkeypatch.syspath_prepend(tmp_path)
    check_versions("lightning")
