"""Rights: which token allows which request, and the key file that gives a user the owner's right on each node.

A verb that `needed_right` does not name needs the owner's right.
"""

import hashlib
import hmac
import os
import secrets
import stat
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from replicated_ckpt.environment import OWNER_KEY_ENV, TRUST_ROOT_ENV, is_switched_on
from replicated_ckpt.errors import ConfigInvalid
from replicated_ckpt.stores.peer.tls import pin_name

INVITATION_S = 86400.0
"""One day. The slowest rank of a save or load arrives within its process group's time-out, which is hours at most."""


class Right(IntEnum):
    """The right of a request's sender, which its token shows. Each right includes those before it."""

    SCRAPER = 0
    """A monitoring system: it has the token of ROOT/.agent/metrics.token, and reads metrics alone."""
    PEER = 1
    """A node of this or an earlier job: it has the agent's token, which it got with the agent's address."""
    JOB = 2
    """The coordinator of a job with ranks on this node: it has an invitation, which those ranks posted for it."""
    OWNER = 3
    """The agent's own user, who has read the token in ROOT/.agent, or has the key file that the agent was started with."""


@dataclass(frozen=True)
class Tokens:
    """The tokens of one agent. None of them appears in `repr`, logs or errors.

    `key`: the content of the user's key file; "" without one. `names`: the `pin_name` of each certificate that the agent
    shows, the current one last. `_boot_unix_s`: the wall clock minus the monotonic clock, at the start. An invitation ends
    only when both clocks have passed its end, so a wall clock that jumps forward does not end it during a save.
    """

    peer: str = field(repr=False)
    owner: str = field(repr=False)
    key: str = field(default="", repr=False)
    names: Callable[[], Collection[str]] = field(default=lambda: (pin_name(""),), repr=False, compare=False)
    _boot_unix_s: float = field(default_factory=lambda: time.time() - time.monotonic(), repr=False, compare=False)

    @classmethod
    def draw(cls) -> "Tokens":
        return cls(secrets.token_hex(16), secrets.token_hex(16))

    def right_of(self, given: str) -> Right | None:
        """The right that the token `given` shows; None: it is not valid."""
        if _are_same(given, self.owner):
            return Right.OWNER
        if _are_same(given, self.peer):
            return Right.PEER
        if _are_same(given, self.scraper):
            return Right.SCRAPER
        now_unix_s = min(time.time(), self._boot_unix_s + time.monotonic())
        if self.key and any(_is_valid(given, self.key, _OWNER.format(name), now_unix_s) for name in self.names()):
            return Right.OWNER
        return Right.JOB if _is_valid(given, self.owner, _INVITATION, now_unix_s) else None

    @property
    def scraper(self) -> str:
        """The token of a scraper. It is derived from the owner's token, and changes only with it."""
        return _signature(self.owner, _SCRAPER) if self.owner else ""

    def prove(self, challenge: str) -> str:
        """The proof for a client with the same key that this agent has the key, too. "": this agent has no key."""
        return prove(self.key, tuple(self.names())[-1], challenge) if self.key else ""


def invite(owner_token: str, now_unix_s: float) -> str:
    """A token with which the coordinator of a job can open saves here and introduce the job's nodes, for INVITATION_S.

    The owner's token signs it, and is not revealed by it. So a rank needs no agent to make it, and no agent stores it.
    """
    return _sign(owner_token, _INVITATION, now_unix_s)


def show_key(key: str, tls_sha256: str, now_unix_s: float) -> str:
    """A token that gives the owner's right at the agent with this certificate, for INVITATION_S.

    Any other agent refuses it. So a process that answers in place of that agent cannot use the token elsewhere.
    """
    return _sign(key, _OWNER.format(pin_name(tls_sha256)), now_unix_s)


def prove(key: str, name: str, challenge: str) -> str:
    """The answer to a client's challenge by an agent that has the key and shows the certificate `name`."""
    return _signature(key, f"agent {name} {challenge}")


_INVITATION, _OWNER, _SCRAPER = "invitation", "owner {}", "scraper"


def _sign(secret: str, what: str, now_unix_s: float) -> str:
    until = str(int(now_unix_s + INVITATION_S))
    return f"{until}.{_signature(secret, f'{what} {until}')}"


def _is_valid(given: str, secret: str, what: str, now_unix_s: float) -> bool:
    until, _, signature = given.partition(".")
    return _are_same(signature, _signature(secret, f"{what} {until}")) and now_unix_s < int(until)


def _signature(secret: str, text: str) -> str:
    return hmac.new(secret.encode(), text.encode(errors="replace"), hashlib.sha256).hexdigest()


def _are_same(given: str, known: str) -> bool:
    # An empty token opens nothing. The comparison takes constant time, so that no token is guessed byte by byte.
    return bool(known) and hmac.compare_digest(given.encode(errors="replace"), known.encode())


def needed_right(method: str, parts: Sequence[str]) -> Right:  # noqa: PLR0911 - one return a kind of verb
    """The least right that a request for this path needs. SECURITY.md has the reasons."""
    match (method, *parts):
        case ("GET", "metrics"):
            return Right.SCRAPER
        case ("GET", "v1", "holdings" | "reports" | "status"):
            return Right.PEER
        case ("GET", "v1", "files", _) | ("GET", "v1", "unmanaged"):
            return Right.PEER
        case ("POST", "v1", "saves", _):
            return Right.JOB
        case ("POST", "v1", "saves", _, "finish"):
            # Named here, because the next case would open it to peers.
            return Right.OWNER
        case ("GET" | "PUT" | "POST", "v1", "saves", _, *_):
            return Right.PEER
        case ("POST", "v1", "hello" | "sequence" | "suspects" | "verify" | "repair" | "marks"):
            return Right.PEER
        case ("POST", "v1", "unmanaged", "verify") | ("POST", "v1", "object", "upload"):
            return Right.PEER
        case ("POST", "v1", "peers"):
            return Right.JOB
    return Right.OWNER


_KEY_CHARS_MIN, _KEY_BYTES_MAX = 32, 4096
_KEY_HINT = (
    f"Make one with `(umask 077; openssl rand -hex 32 > ~/.replicated-ckpt.key)`, put the same file on each node, and set "
    f"{OWNER_KEY_ENV} to its absolute path. Or unset {OWNER_KEY_ENV}."
)


def read_owner_key() -> str:
    """The content of the file that REPLICATED_CKPT_OWNER_KEY names. "": the variable is not set.

    Raises:
        ConfigInvalid: the file cannot be read, is too short or too long, or another user may read or write it.
    """
    path = os.environ.get(OWNER_KEY_ENV, "")
    if not path:
        return ""
    # An agent's working directory is "/", so a relative path would name another file there.
    if not os.path.isabs(path):  # noqa: PTH117 - a variable's text
        raise _refuse_key(path, "its path is relative")
    try:
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:  # noqa: PTH123
            status, raw = os.fstat(file.fileno()), file.read(_KEY_BYTES_MAX + 1)
    except OSError as exc:
        raise _refuse_key(path, f"it cannot be read: {exc.strerror}") from exc
    mode = stat.S_IMODE(status.st_mode)
    is_private = status.st_uid == os.geteuid() and not mode & 0o077
    if not (is_private or is_switched_on(TRUST_ROOT_ENV)):
        raise _refuse_key(path, f"other users may read or write it (owner {status.st_uid}, mode {mode:04o})")
    key = raw.decode(errors="replace").strip()
    if len(key) < _KEY_CHARS_MIN or len(raw) > _KEY_BYTES_MAX:
        raise _refuse_key(path, f"it must hold {_KEY_CHARS_MIN} to {_KEY_BYTES_MAX} characters, not {len(key)}")
    return key


def _refuse_key(path: str, why: str) -> ConfigInvalid:
    return ConfigInvalid(f"The key file {path!r} of {OWNER_KEY_ENV} is not used: {why}.", _KEY_HINT)
