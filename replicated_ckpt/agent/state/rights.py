"""Rights: what each token allows. A verb that is not named here needs the owner's right."""

import hashlib
import hmac
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

INVITATION_S = 86400.0
"""One day: the slowest rank of a save or load arrives within its process group's time-out, at most hours."""


class Right(IntEnum):
    """The right of a request's sender, by its token. Each right includes those before it."""

    PEER = 1
    """Another node of a job, or one that was: it has the agent's token, which travels with the agent's address."""
    JOB = 2
    """The coordinator of a job with ranks on this node: it has an invitation, which those ranks have posted for it."""
    OWNER = 3
    """The agent's own user on its own host: it has read ROOT/.agent."""


@dataclass(frozen=True)
class Tokens:
    """The tokens of one agent. Neither appears in `repr`, logs or errors.

    `_boot_unix_s`: the wall clock minus the monotonic clock, at the start. An invitation ends only when both clocks have
    passed its end, so a wall clock that jumps during a save does not end it.
    """

    peer: str = field(repr=False)
    owner: str = field(repr=False)
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
        now_unix_s = min(time.time(), self._boot_unix_s + time.monotonic())
        return Right.JOB if _is_invitation(given, self.owner, now_unix_s) else None


def invite(owner_token: str, now_unix_s: float) -> str:
    """A token that allows the coordinator of a job to open saves here and introduce the job's nodes, for INVITATION_S.

    It is signed with the owner's token, which it does not reveal. So a rank makes it alone, and no agent has to store it.
    """
    until = str(int(now_unix_s + INVITATION_S))
    return f"{until}.{_signature(owner_token, until)}"


def _is_invitation(given: str, owner_token: str, now_unix_s: float) -> bool:
    until, _, signature = given.partition(".")
    return _are_same(signature, _signature(owner_token, until)) and now_unix_s < int(until)


def _signature(owner_token: str, until: str) -> str:
    return hmac.new(owner_token.encode(), f"invitation {until}".encode(errors="replace"), hashlib.sha256).hexdigest()


def _are_same(given: str, known: str) -> bool:
    # An empty token opens nothing; and in constant time, so that none is guessed byte by byte.
    return bool(known) and hmac.compare_digest(given.encode(errors="replace"), known.encode())


def needed_right(method: str, parts: Sequence[str]) -> Right:  # noqa: PLR0911 - one return a kind of verb
    """The least right that a request for this path needs. SECURITY.md says why."""
    match (method, *parts):
        case ("GET", "metrics") | ("GET", "v1", "holdings" | "status"):
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
