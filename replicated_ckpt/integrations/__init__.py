"""Classes that plug into training frameworks. Each module needs its framework, and first checks the version."""

import re
from importlib.metadata import PackageNotFoundError, requires, version

from replicated_ckpt.errors import ConfigInvalid

_NEEDED = re.compile(r"""(?P<name>[\w.-]+)(\[.*\])?>=(?P<version>[\d.]+); *extra *== *["'](?P<extra>\w+)["']""")


def check_versions(extra: str) -> None:
    """Compares the lowest versions in an extra of this package with the installed ones. Skips packages without metadata.

    Raises:
        ConfigInvalid: a package is too old.
    """
    for line in _find_lines():
        # Skips other extras, and packages without a lower bound.
        needed = _NEEDED.fullmatch(line)
        if needed is None or needed["extra"] != extra:
            continue
        try:
            installed = version(needed["name"])
        except PackageNotFoundError:
            continue
        if _numbers(installed) < _numbers(needed["version"]):
            raise ConfigInvalid(
                f"replicated_ckpt.integrations.{extra} needs {needed['name']} {needed['version']} or newer, but "
                f"{installed} is installed.",
                f"pip install '{needed['name']}>={needed['version']}', on every node.",
            )


def _find_lines() -> list[str]:
    try:
        return requires("replicated-ckpt") or []
    except PackageNotFoundError:
        return []  # this package runs from a source tree, and has no metadata


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)))
