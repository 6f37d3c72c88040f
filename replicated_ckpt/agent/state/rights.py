"""Rights: what each token allows. A verb that is not named here needs the owner's right."""

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from replicated_ckpt.stores.peer.tls import pin_name

INVITATION_S = 86400.0
"""One day: the slowest rank of a save or load arrives within its process group's time-out, at most hours."""


class Right(IntEnum):
    """The right of a request's sender, by its token. Each right includes those before it."""

    SCRAPER = 0
    """A monitoring system: it has the token of ROOT/.agent/metrics.token, and reads metrics alone."""
    PEER = 1
    """Another node of a job, or one that was: it has the agent's token, which travels with the agent's address."""
    JOB = 2
    """The coordinator of a job with ranks on this node: it has an invitation, which those ranks have posted for it."""
    OWNER = 3
    """The agent's own user: it has read ROOT/.agent, or has the key file with which the agent was started."""


@dataclass(frozen=True)
class Tokens:
    """The tokens of one agent. None of them appears in `repr`, logs or errors.

    `key`: the content of the user's key file; "" without one. `names`: the certificates that the agent shows, the current
    one last, each by its `pin_name`.
    `_boot_unix_s`: the wall clock minus the monotonic clock, at the start. An invitation ends only when both clocks have
    passed its end, so a wall clock that jumps during a save does not end it.
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
        """The token of a scraper. It is derived, so it stays the same as long as the owner's."""
        return _signature(self.owner, _SCRAPER) if self.owner else ""

    def prove(self, challenge: str) -> str:
        """Shows a client with the same key that this agent has it, too. "": this agent has none."""
        return prove(self.key, tuple(self.names())[-1], challenge) if self.key else ""


def invite(owner_token: str, now_unix_s: float) -> str:
    """A token that allows the coordinator of a job to open saves here and introduce the job's nodes, for INVITATION_S.

    It is signed with the owner's token, which it does not reveal. So a rank makes it alone, and no agent has to store it.
    """
    return _sign(owner_token, _INVITATION, now_unix_s)


def show_key(key: str, tls_sha256: str, now_unix_s: float) -> str:
    """A token that gives the owner's right at the agent with this certificate, for INVITATION_S.

    Another agent refuses it. So whoever answers in the place of that agent cannot use the token elsewhere.
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
    # An empty token opens nothing; and in constant time, so that none is guessed byte by byte.
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
            # A new verb that is not named above is closed to peers.
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
