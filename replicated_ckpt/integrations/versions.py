"""The check of a framework's version, before it is imported: the extras of this package name the lowest ones."""

import re
from importlib.metadata import PackageNotFoundError, requires, version

from replicated_ckpt.errors import ConfigInvalid

_NEEDED = re.compile(r"""(?P<name>[\w.-]+)(\[.*\])?>=(?P<version>[\d.]+); *extra *== *["'](?P<extra>\w+)["']""")


def check_versions(extra: str) -> None:
    """Compares what an extra of this package names with what is installed. Packages without metadata are not compared.

    Raises:
        ConfigInvalid: a package is too old.
    """
    for line in _find_lines():
        needed = _NEEDED.fullmatch(line)
        if needed is None or needed["extra"] != extra:
            continue
        try:
            installed = version(needed["name"])
        except PackageNotFoundError:
            continue
        if _numbers(installed) < _numbers(needed["version"]):
            raise ConfigInvalid(
                f"replicated_ckpt.integrations.{extra} needs {needed['name']} {needed['version']} or newer, and "
                f"{installed} is installed.",
                f"pip install '{needed['name']}>={needed['version']}', on every node.",
            )


def _find_lines() -> list[str]:
    try:
        return requires("replicated-ckpt") or []
    except PackageNotFoundError:
        return []


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)))
