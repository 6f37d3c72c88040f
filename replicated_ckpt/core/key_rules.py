"""Rules that select and rename the entries of a state dict in a conversion."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any

from replicated_ckpt.errors import ConfigInvalid
from replicated_ckpt.wording import list_some

Path = tuple[str | int, ...]
"""The place of an entry in the nested state dict: keys of dictionaries (texts) and positions in lists (numbers)."""

_KEYS_SHOWN = 5


@dataclass(frozen=True)
class KeyRules:
    """Rules for the names of entries (FQNs), applied in this order: select by globs, strip, rename, add a prefix.

    An empty `include` selects all entries. `rename` has pairs of a regular expression and its replacement, as for
    `re.sub`. A glob, a prefix or an expression that matches no name is an error, because it is probably a typo.
    """

    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    strip_prefix: str = ""
    rename: Sequence[tuple[str, str]] = ()
    add_prefix: str = ""

    def new_names(self, keys: Iterable[str]) -> dict[str, str]:
        """The new name of each selected entry, by its old name.

        Raises:
            ConfigInvalid: no entry is selected, a rule matches no name, or two entries get the same name.
        """
        names = self._choose(list(keys))
        if self.strip_prefix:
            self._check_fits([key.startswith(self.strip_prefix) for key in names], "prefix", self.strip_prefix, names)
            names = {key: name.removeprefix(self.strip_prefix) for key, name in names.items()}
        for pattern, replacement in self.rename:
            names = _rename(names, pattern, replacement)
        names = {key: self.add_prefix + name for key, name in names.items()}
        key_by_name: dict[str, str] = {}
        for key, name in names.items():
            if key and not name:
                raise ConfigInvalid(
                    f"{key!r} would have no name left.",
                    "Change the rule that removes all of the name, or exclude this entry.",
                )
            if name in key_by_name:
                raise ConfigInvalid(
                    f"Both {key_by_name[name]!r} and {key!r} would become {name!r}.",
                    "Exclude one of them, or change the rule that gives both this name.",
                )
            key_by_name[name] = key
        return names

    def _choose(self, keys: Sequence[str]) -> dict[str, str]:
        for glob in self.include:
            self._check_fits([fnmatchcase(key, glob) for key in keys], "glob", glob, keys)
        included = [key for key in keys if not self.include or _fits_any(key, self.include)]
        chosen = {key: key for key in included if not _fits_any(key, self.exclude)}
        if not chosen:
            raise ConfigInvalid(
                f"No key is left to convert: all of {_format_keys(keys)} are excluded.", "Exclude fewer keys."
            )
        return chosen

    @staticmethod
    def _check_fits(fits: Sequence[bool], kind: str, rule: str, keys: Iterable[str]) -> None:
        if not any(fits):
            raise ConfigInvalid(f"No key has the {kind} {rule!r}. Keys are {_format_keys(list(keys))}.")


def _fits_any(key: str, globs: Iterable[str]) -> bool:
    return any(fnmatchcase(key, glob) for glob in globs)


def _rename(names: Mapping[str, str], pattern: str, replacement: str) -> dict[str, str]:
    try:
        expression = re.compile(pattern)
        renamed = {key: expression.sub(replacement, name) for key, name in names.items()}
    except (re.error, IndexError) as exc:
        raise ConfigInvalid(f"{pattern!r} = {replacement!r} is not a valid renaming: {exc}.") from exc
    if not any(map(expression.search, names.values())):
        raise ConfigInvalid(f"No key contains {pattern!r}. Keys are {_format_keys(list(names.values()))}.")
    return renamed


def _format_keys(keys: Sequence[str]) -> str:
    return list_some([repr(key) for key in keys], _KEYS_SHOWN) or "no key"


def rename_path(path: Path, name: str) -> Path:
    """The place of an entry under its new name: levels that both names share stay, and the rest becomes one level.

    A list position at the first level becomes a key, since the state dict is a dictionary.
    """
    parts = [str(part) for part in path]
    if ".".join(parts) == name:
        return path
    head = tail = 0
    while tail < len(parts) and _ends_with(name, ".".join(parts[len(parts) - tail - 1 :])):
        tail += 1
    end = ".".join(parts[len(parts) - tail :])
    rest = name[: len(name) - len(end)].removesuffix(".") if tail else name
    while head < len(parts) - tail and _begins_with(rest, ".".join(parts[: head + 1])):
        head += 1
    middle = rest[len(".".join(parts[:head])) :].removeprefix(".") if head else rest
    kept = (*path[:head], *((middle,) if middle else ()), *path[len(path) - tail :])
    return (str(kept[0]), *kept[1:])


def _ends_with(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}")


def _begins_with(name: str, start: str) -> bool:
    return name == start or name.startswith(f"{start}.")


def nest(values: Mapping[Path, Any]) -> dict[str, Any]:
    """The state dict that has each value at its path. Gaps in lists are None.

    Raises:
        ConfigInvalid: one path needs a value where another path needs a container.
    """
    root: dict[str, Any] = {}
    for path, value in values.items():
        container: Any = root
        for part, below in pairwise(path):
            container = _inside(container, part, [] if isinstance(below, int) else {}, path)
        if _inside(container, path[-1], value, path) is not value:
            raise _conflict(path)
    return root


def _inside(container: Any, part: str | int, default: Any, path: Path) -> Any:
    """The value in a container under a key or position. If there is none, `default` is put there."""
    if isinstance(container, dict):
        return container.setdefault(part, default)
    if not isinstance(container, list) or not isinstance(part, int):
        raise _conflict(path)
    container += [None] * (part + 1 - len(container))
    if container[part] is None:
        container[part] = default
    return container[part]


def _conflict(path: Path) -> ConfigInvalid:
    where = ".".join(map(str, path))
    return ConfigInvalid(
        f"{where!r} would lie inside or replace another entry.", "Rename this entry, or exclude one of the two."
    )
