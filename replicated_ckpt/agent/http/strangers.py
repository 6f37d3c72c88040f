"""Connections that have shown no valid token: what they do is counted, and said once a minute for each address."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

log = logging.getLogger(__name__)

INTERVAL_S = 60.0
ADDRESSES_MAX = 256
"""More addresses than these in a minute are counted together."""
_OTHERS = "other addresses"


@dataclass
class _Stranger:
    said_at: float
    count: int = 0
    last: str = ""


class Strangers:
    """Safe for concurrent use."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._by_address: dict[str, _Stranger] = {}
        self._next_look = 0.0

    def note(self, address: str, what: str) -> None:
        """One more connection or request from there came without a valid token; `what` says how it was noticed."""
        now = self._clock()
        with self._lock:
            lines = self._due(now) if now >= self._next_look else []
            if address not in self._by_address and len(self._by_address) >= ADDRESSES_MAX:
                address = _OTHERS
            found = self._by_address.get(address)
            if found is None:
                self._by_address[address] = _Stranger(now)
                lines.append(f"no valid token from {address}: {what}")
            else:
                found.count += 1
                found.last = what
        for line in lines:
            log.warning("%s", line)

    def _due(self, now: float) -> list[str]:
        """A line for each address that was counted for a minute; those of which nothing came meanwhile are forgotten."""
        lines = []
        for address, found in list(self._by_address.items()):
            if now - found.said_at < INTERVAL_S:
                continue
            if found.count:
                since_s = now - found.said_at
                lines.append(
                    f"no valid token from {address}: {found.count} times in {since_s:.0f} s, last: {found.last}"
                )
                self._by_address[address] = _Stranger(now)
            else:
                del self._by_address[address]
        self._next_look = min((found.said_at for found in self._by_address.values()), default=now) + INTERVAL_S
        return lines
