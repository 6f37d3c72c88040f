"""The process's environment, for several rooms: variables, switches, locale and working directory."""

import os
import sys

from replicated_ckpt.errors import ConfigInvalid

AGENT_ENV_PREFIX = "REPLICATED_CKPT_AGENT_"
DIRECT_IO_ENV = "REPLICATED_CKPT_DIRECT_IO"
DOMAIN_ENV = "REPLICATED_CKPT_DOMAIN"
HOST_ENV = "REPLICATED_CKPT_HOST"
OWNER_KEY_ENV = "REPLICATED_CKPT_OWNER_KEY"
PLAIN_ENV = "REPLICATED_CKPT_PLAIN"
PORT_ENV = "REPLICATED_CKPT_PORT"
ROOT_ENV = "REPLICATED_CKPT_ROOT"
RSH_ENV = "REPLICATED_CKPT_RSH"
TLS_CERT_ENV = "REPLICATED_CKPT_TLS_CERT"
TLS_KEY_ENV = "REPLICATED_CKPT_TLS_KEY"
TRUST_ROOT_ENV = "REPLICATED_CKPT_TRUST_ROOT"


def default_root() -> str | None:
    """The store that REPLICATED_CKPT_ROOT names, for commands without `--root`. None: it is not set, or empty."""
    return os.environ.get(ROOT_ENV) or None


def is_switched_on(variable: str) -> bool:
    """Whether a switch, which may be 1, 0 or empty, is 1.

    Raises:
        ConfigInvalid: any other value, such as "false", whose meaning would be a guess.
    """
    text = os.environ.get(variable, "")
    # "false" would count as on in some programs, and off in others.
    if text not in ("", "0", "1"):
        hint = f"Set {variable}=1, or unset it; nothing was written."
        raise ConfigInvalid(f"The environment variable {variable} must be 1, 0 or empty, not {text!r}.", hint)
    return text == "1"


def check_switches() -> None:
    """Checks all switches at the start, before a background thread would meet an invalid one.

    Raises:
        ConfigInvalid: as `is_switched_on`.
    """
    for variable in (PLAIN_ENV, TRUST_ROOT_ENV):
        is_switched_on(variable)


def check_encodable(name: str, text: str) -> None:
    """Checks that `text` can be a file name in this process. `name`: the name of `text` in the error.

    Raises:
        ConfigInvalid: the file-system encoding of this process cannot represent `text`.
    """
    try:
        os.fsencode(text)
    except UnicodeEncodeError as exc:
        raise ConfigInvalid(
            f"{name} {text!r} cannot be a file name in this process, which encodes names as "
            f"{sys.getfilesystemencoding()}.",
            "Start Python with PYTHONUTF8=1 or in a UTF-8 locale (such as LC_ALL=C.UTF-8), on all nodes alike.",
        ) from exc


def make_absolute(path: str | os.PathLike[str]) -> str:
    """The absolute path; symbolic links in it are kept.

    Raises:
        ConfigInvalid: the path is relative, and the working directory of this process was removed.
    """
    try:
        return os.path.abspath(path)  # noqa: PTH100 - Path.resolve follows links
    except FileNotFoundError as exc:
        raise ConfigInvalid(
            f"{os.fspath(path)!r} is relative, and the working directory of this process no longer exists.",
            "Pass an absolute path, or start in a directory that exists.",
        ) from exc
