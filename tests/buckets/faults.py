"""What shall go wrong, with which requests, and what has passed: the proxy's orders and its log."""

import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal
from urllib.parse import unquote

TICK_S = 0.05  # a slow link moves this often

Kind = Literal[
    "reset",  # the connection breaks after `at` bytes of the request's body (0) went to the server
    "hang",  # after those bytes nothing happens any more, until the fault is removed; then it breaks
    "throttle",  # all such bodies together, both ways, pass at `bytes_per_s`
    "status",  # the server never sees the request; the answer is `status` with an S3 error `code`
    "lost_answer",  # the server does it, the client sees the connection break
    "flip_request",  # one bit of the request's body is changed on its way, in byte `at` (the middle one)
    "flip_answer",  # the same for the answer's body
    "short_answer",  # the answer ends after `at` bytes (half) of its body and its Content-Length agrees
    "cut_answer",  # the connection ends after `at` bytes (half) of it, short of its Content-Length
]


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong with every request that it matches, `times` at most, after `skip` were let through.

    `method` is compared, `key` is a part of the object's key, `query` a part of the decoded query ("partNumber=2");
    each matches all when empty. `probability` is drawn from a generator of this fault's own, seeded with `seed`. The
    kinds say what `at` counts; flips and cuts of a body leave an empty one as it is.
    """

    kind: Kind
    method: str = ""
    key: str = ""
    query: str = ""
    times: int | None = None
    skip: int = 0
    probability: float = 1.0
    seed: int = 0
    at: int | None = None
    bytes_per_s: float = 1e6
    status: int = 503
    code: str = "SlowDown"

    def matches(self, request: "Request") -> bool:
        return self.method in {"", request.method} and self.key in request.key and self.query in request.query


@dataclass
class Request:
    """One request that arrived: what it asked, what became of it. Bodies are counted as they pass the proxy.

    `fault` is what was done to it; `status` is the server's answer, or None as long as there is none, even if the client
    never sees it.
    """

    method: str
    bucket: str
    key: str
    query: str
    status: int | None = None
    bytes_up: int = 0
    bytes_down: int = 0
    fault: Fault | None = None

    @classmethod
    def of(cls, method: str, target: str) -> "Request":
        path, _, query = target.partition("?")
        bucket, _, key = unquote(path).lstrip("/").partition("/")
        return cls(method, bucket, key, unquote(query))


class Armed:
    """A fault that waits for its requests. Safe to call from any thread."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.fired = 0
        self.over = threading.Event()  # set when the fault is removed
        self._skipped = 0
        self._random = random.Random(fault.seed)
        self._free_at = 0.0
        self._lock = threading.Lock()

    def strikes(self, request: Request) -> bool:
        """Whether this request is hit; counts it then."""
        if not self.fault.matches(request):
            return False
        with self._lock:
            if self.fault.times is not None and self.fired >= self.fault.times:
                return False
            if self._skipped < self.fault.skip:
                self._skipped += 1
                return False
            if self._random.random() >= self.fault.probability:
                return False
            self.fired += 1
            return True

    def paced(self, block: bytes) -> Iterator[bytes]:
        """The block in pieces, each when the link of a `throttle` has carried it, or at once when the fault is over."""
        size_bytes = max(1, int(self.fault.bytes_per_s * TICK_S)) if self.fault.kind == "throttle" else len(block)
        for start in range(0, len(block), size_bytes):
            piece = block[start : start + size_bytes]
            if self.fault.kind == "throttle":
                self._wait_turn(len(piece))
            yield piece

    def _wait_turn(self, size_bytes: int) -> None:
        with self._lock:
            self._free_at = max(time.monotonic(), self._free_at) + size_bytes / self.fault.bytes_per_s
            wait_s = self._free_at - time.monotonic()
        self.over.wait(wait_s)


class FaultPlan:
    """The faults in force and the log of what came. Safe to call from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._armed: list[Armed] = []
        self._requests: list[Request] = []

    def add(self, fault: Fault) -> Armed:
        """From now on; of several that would hit a request, the one added first does."""
        armed = Armed(fault)
        with self._lock:
            self._armed.append(armed)
        return armed

    def clear(self) -> None:
        """Ends every fault; what hangs is let go."""
        with self._lock:
            ended, self._armed = self._armed, []
        for armed in ended:
            armed.over.set()

    def note(self, request: Request) -> Armed | None:
        """Writes the request down; returns what is to be done to it."""
        with self._lock:
            self._requests.append(request)
            armed = next((armed for armed in self._armed if armed.strikes(request)), None)
        request.fault = armed.fault if armed else None
        return armed

    def requests(self, method: str = "", *, key: str = "", query: str = "") -> list[Request]:
        """What arrived so far, in order, filtered like a fault."""
        wanted = Fault("reset", method=method, key=key, query=query)
        with self._lock:
            return [request for request in self._requests if wanted.matches(request)]

    def forget(self) -> None:
        """Empties the log."""
        with self._lock:
            self._requests.clear()
