"""A peer's store, through its agent: a sink for copies, a source of verified ranges, and reports of bad files."""

import logging
import time
from collections.abc import Callable

from replicated_ckpt.core.integrity.checksum import BlockTable
from replicated_ckpt.errors import ObjectCorrupt, PeerProtocolError, ReplicatedCkptError, StoreUnavailable
from replicated_ckpt.stores.peer.answer import CutOff, file_path
from replicated_ckpt.stores.peer.client import AgentAddress, AgentClient, Upload
from replicated_ckpt.stores.peer.reach import SLOW
from replicated_ckpt.stores.verified import Expected, VerifiedShard

log = logging.getLogger(__name__)

_SENT_WRONG = "The save sends it again, or to another node. Check the memory of both nodes, and their network."
_CUT_OFF = (
    "Loads use another copy if there is one. That node's disk may fail to read those bytes: see its agent's "
    "log, and `dmesg`."
)
BEHIND_HEADER = "X-Rckpt-Behind"
"""Header of a shard of an asynchronous save, for which no training waits."""
SLOW_WINDOW_S = 10.0
SLOW_BYTES_PER_S = 1 << 20

SLOW_READ_S = 10.0
SLOWDOWN_ALLOWED = 12
"""Factor on the time limit of a range if there is no other source to turn to, and in re-protection."""


class PeerSink:
    """Sends one shard into a peer's staging area, and compares the checksum that the peer computed with our own.

    `durable`: `finish` returns after the peer's fsync; else once the peer has the shard in memory. `is_behind`: it is
    a shard of an asynchronous save, and the peer may write it at a lower priority.
    """

    def __init__(
        self, address: AgentAddress, save_id: str, name: str, *, durable: bool, is_behind: bool = False
    ) -> None:
        self.address = address
        self._client = AgentClient(address)
        self._path = f"/v1/saves/{save_id}/{name}"
        self._headers = {"X-Rckpt-Ack": "durable" if durable else "memory"}
        if is_behind:
            self._headers[BEHIND_HEADER] = "1"
        self._upload: Upload | None = None
        self._blocked_s = 0.0
        self._taken_bytes = 0

    @property
    def label(self) -> str:
        return self.address.label

    def write(self, *pieces: memoryview) -> None:
        if self._upload is None:
            self._upload = self._client.start_upload(self._path, self._headers)
        started = time.monotonic()
        self._upload.send(*pieces)
        self._check_rate(time.monotonic() - started, sum(map(len, pieces)))

    def _check_rate(self, blocked_s: float, size_bytes: int) -> None:
        """Aborts a copy to a peer that is too slow, as if the peer were down: it would delay the whole save."""
        # Only time spent in sends: the rank itself may be slow to produce bytes.
        self._blocked_s += blocked_s
        self._taken_bytes += size_bytes
        if self._blocked_s < SLOW_WINDOW_S:
            return
        if self._taken_bytes < SLOW_BYTES_PER_S * self._blocked_s:
            rate = self._taken_bytes / self._blocked_s / 1024
            slow = TimeoutError(f"too slow: {rate:.0f} KiB/s over the last {self._blocked_s:.0f} s")
            raise StoreUnavailable(self.label, "PUT", self._path, str(slow), SLOW) from slow
        self._blocked_s, self._taken_bytes = 0.0, 0

    def finish(self, table: BlockTable) -> None:
        if self._upload is None:
            raise PeerProtocolError(f"Nothing was sent to {self.label}.")
        answer = self._upload.finish_upload()
        size_bytes, crc = answer.get("size_bytes"), answer.get("crc32c")
        # TCP's checksum and the peer's memory both let flipped bits pass.
        if (size_bytes, crc) != (table.file_bytes, table.file_crc()):
            found = f"{size_bytes} bytes of CRC32C {crc:08x}" if isinstance(crc, int) else "something else"
            detail = f"expected {table.file_bytes} bytes of CRC32C {table.file_crc():08x}, the peer received {found}"
            raise ObjectCorrupt(self.label, "PUT", self._path, detail, _SENT_WRONG)
        self._client.close()

    def discard(self) -> None:
        """Closes the connection: the agent drops an incomplete body."""
        self._client.close()


class PeerShard(VerifiedShard):
    """Reads one shard from a peer by verified ranges. For one thread. It closes the client.

    While it `is_preferred` to other sources, a range must arrive within SLOW_READ_S plus its time at SLOW_BYTES_PER_S.
    """

    def __init__(
        self,
        client: AgentClient,
        checkpoint_id: str,
        save_id: str,
        name: str,
        expected: Expected,
        is_preferred: Callable[[], bool] = lambda: False,
    ) -> None:
        self._client = client
        self._is_preferred = is_preferred
        self._path = file_path(checkpoint_id, save_id, name)
        super().__init__(client.address.label, f"{checkpoint_id}/{name}", expected)

    def _fill(self, target: memoryview, offset: int) -> None:
        """Fills `target`, in two tries. If the connection ends in the middle twice, the peer's disk has lost bytes."""
        within_s = SLOW_READ_S + len(target) / SLOW_BYTES_PER_S
        within_s *= 1 if self._is_preferred() else SLOWDOWN_ALLOWED
        for is_last in (False, True):
            try:
                self._client.read_range(self._path, offset, target, within_s)
            except StoreUnavailable as exc:
                if not isinstance(exc.__cause__, CutOff):
                    raise
                if is_last:
                    where = f"in the middle of bytes {offset} to {offset + len(target)}"
                    raise ObjectCorrupt(
                        self._store, "read", self._name, f"the peer closed the connection twice {where}", _CUT_OFF
                    ) from exc.__cause__
            else:
                return

    def close(self) -> None:
        self._client.close()


def report_suspect(address: AgentAddress, checkpoint_id: str, save_id: str, name: str, why: str) -> bool:
    """Reports a bad file to its node, whose agent reads it again and repairs it. False, and logged: the report failed."""
    document = {"checkpoint_id": checkpoint_id, "save_id": save_id, "name": name, "why": why[:500]}
    try:
        with AgentClient(address) as client:
            client.call("POST", "/v1/suspects", document)
    except ReplicatedCkptError as exc:
        log.warning("could not report to %s that its %s/%s seems bad: %s", address.label, checkpoint_id, name, exc)
        return False
    return True
