"""The faults to inject, the requests that they apply to, and the log of all requests."""

import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal
from urllib.parse import unquote

TICK_S = 0.05  # a slow link sends this often

Kind = Literal[
    "reset",  # the connection breaks after `at` bytes of the request's body (default 0) reached the server
    "hang",  # after those bytes the connection stalls until the fault is removed, and then breaks
    "throttle",  # all matching bodies, up and down, share `bytes_per_s`
    "status",  # the proxy answers with `status` and the S3 error `code`; the server gets nothing
    "lost_answer",  # the server handles the request, and the client's connection breaks
    "flip_request",  # one bit in byte `at` (default the middle) of the request's body is flipped
    "flip_answer",  # one bit of the answer's body is flipped
    "short_answer",  # the answer has `at` bytes (default half) of its body, with a matching Content-Length
    "cut_answer",  # the connection ends after `at` bytes (default half), before the Content-Length
]


@dataclass(frozen=True)
class Fault:
    """A fault for every request that it matches: it lets the first `skip` pass, and then applies at most `times` times.

    `method` is compared, `key` is a part of the object's key, `query` a part of the decoded query ("partNumber=2").
    Each matches all requests when it is empty. `probability` uses a random generator of this fault, seeded with `seed`.
    The meaning of `at` depends on the kind. Empty bodies are never flipped or cut.
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
    """One request that arrived, and its outcome. Bodies are counted as they pass the proxy.

    `fault` is the fault that was applied. `status` is the status of the server's answer, or None until there is one. It
    is set even if the client never gets the answer.
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
    """A fault that is in force. Safe to call from any thread."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.fired = 0
        self.over = threading.Event()  # set when the fault is removed
        self._skipped = 0
        self._random = random.Random(fault.seed)
        self._free_at = 0.0
        self._lock = threading.Lock()

    def strikes(self, request: Request) -> bool:
        """Whether the fault applies to this request. If so, the request is counted."""
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
        """The block in pieces at the speed of a `throttle`. Once the fault is over, the rest follows at once."""
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
    """The faults in force, and the log of requests. Safe to call from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._armed: list[Armed] = []
        self._requests: list[Request] = []

    def add(self, fault: Fault) -> Armed:
        """Puts a fault in force. If several faults match a request, the one added first applies."""
        armed = Armed(fault)
        with self._lock:
            self._armed.append(armed)
        return armed

    def clear(self) -> None:
        """Ends every fault. Connections that hang are broken."""
        with self._lock:
            ended, self._armed = self._armed, []
        for armed in ended:
            armed.over.set()

    def note(self, request: Request) -> Armed | None:
        """Logs the request. Returns the fault to apply to it, if any."""
        with self._lock:
            self._requests.append(request)
            armed = next((armed for armed in self._armed if armed.strikes(request)), None)
        request.fault = armed.fault if armed else None
        return armed

    def requests(self, method: str = "", *, key: str = "", query: str = "") -> list[Request]:
        """The requests so far, in order, filtered like those of a fault."""
        wanted = Fault("reset", method=method, key=key, query=query)
        with self._lock:
            return [request for request in self._requests if wanted.matches(request)]

    def forget(self) -> None:
        """Empties the log."""
        with self._lock:
            self._requests.clear()
