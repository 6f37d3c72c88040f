"""The key file of a user: an agent that was started with it gives the owner's right to each command that has it."""

import os
import stat

from replicated_ckpt.environment import OWNER_KEY_ENV, TRUST_ROOT_ENV, is_switched_on
from replicated_ckpt.errors import ConfigInvalid

_CHARS_MIN, _BYTES_MAX = 32, 4096
_HINT = (
    f"Make one with `(umask 077; openssl rand -hex 32 > ~/.replicated-ckpt.key)`, put the same file on each node, and set "
    f"{OWNER_KEY_ENV} to its absolute path. Or unset {OWNER_KEY_ENV}."
)


def read_owner_key() -> str:
    """The content of the file that REPLICATED_CKPT_OWNER_KEY names. "": the variable is not set.

    Raises:
        ConfigInvalid: it cannot be read, is too short or long, or another user may read or write it.
    """
    path = os.environ.get(OWNER_KEY_ENV, "")
    if not path:
        return ""
    # An agent runs in "/", so a relative path would name another file there.
    if not os.path.isabs(path):  # noqa: PTH117 - a variable's text
        raise _refuse(path, "its path is relative")
    try:
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:  # noqa: PTH123
            status, raw = os.fstat(file.fileno()), file.read(_BYTES_MAX + 1)
    except OSError as exc:
        raise _refuse(path, f"it cannot be read: {exc.strerror}") from exc
    mode = stat.S_IMODE(status.st_mode)
    is_private = status.st_uid == os.geteuid() and not mode & 0o077
    if not (is_private or is_switched_on(TRUST_ROOT_ENV)):
        raise _refuse(path, f"other users may read or write it (owner {status.st_uid}, mode {mode:04o})")
    key = raw.decode(errors="replace").strip()
    if len(key) < _CHARS_MIN or len(raw) > _BYTES_MAX:
        raise _refuse(path, f"it must hold {_CHARS_MIN} to {_BYTES_MAX} characters, not {len(key)}")
    return key


def _refuse(path: str, why: str) -> ConfigInvalid:
    return ConfigInvalid(f"The key file {path!r} of {OWNER_KEY_ENV} is not used: {why}.", _HINT)
