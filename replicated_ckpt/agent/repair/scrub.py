"""The scrub: reads this node's disk at a set pace, so that damaged files are repaired before a load needs them."""

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace

from replicated_ckpt.core.upkeep.repair_plan import Finding, Problem
from replicated_ckpt.errors import ReplicatedCkptError, StoreError
from replicated_ckpt.node.state.damage import DamageBook
from replicated_ckpt.stores.files.durable import is_refusal
from replicated_ckpt.stores.local.inspection import Inspector
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.threads import start_thread
from replicated_ckpt.stores.throttle import Pace, Stopped

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 300.0
_BUSY_PAUSE_S = 0.5
_JOIN_S = 2.0
OnBad = Callable[[Finding], None]


@dataclass(frozen=True)
class Scrubbed:
    """The progress of the scrub since this agent started."""

    passes: int = 0
    bytes_read: int = 0
    findings: int = 0
    is_running: bool = False


class Scrubber:
    """One thread, which pauses while ranks write a save here. After a restart it continues with the next checkpoint.

    `on_bad` is called for each file whose checksum fails; re-protection finds missing files. `damage` records the result
    for each checkpoint, and the progress of the pass.
    """

    def __init__(
        self,
        store: LocalStore,
        node_id: str,
        pace: Pace,
        stopping: threading.Event,
        every_s: float,
        on_bad: OnBad,
        damage: DamageBook,
    ) -> None:
        self._store = store
        self._node_id = node_id
        self._pace = pace
        self._stopping = stopping
        self._every_s = every_s
        self._on_bad = on_bad
        self._damage = damage
        self.done = Scrubbed()
        self._thread = threading.Thread(target=self._run, name="rckpt-scrub", daemon=True)

    def start(self) -> None:
        start_thread(self._thread)

    def join(self) -> None:
        """Waits up to 2 s for the thread, after `stopping` was set. A read that hangs ends with the process."""
        self._thread.join(_JOIN_S)

    def status(self) -> Mapping[str, object]:
        return asdict(self.done)

    def _run(self) -> None:
        # Agents start with the job: a full read at once would compete with its first load.
        pause_s = min(self._every_s, FIRST_PAUSE_S)
        while not self._stopping.wait(pause_s):
            pause_s = self._every_s
            try:
                self.scrub()
            except Stopped:
                return
            except (ReplicatedCkptError, OSError) as exc:
                log.error("the scrub stopped early: %s", exc)  # noqa: TRY400 - it explains itself
            except Exception:
                log.exception("a defect in replicated_ckpt: the scrub stopped, and continues in %.0f s", pause_s)

    def scrub(self) -> Scrubbed:
        """One pass over all checkpoints, which begins after the last one read. Returns the totals of all passes."""
        self.done = replace(self.done, is_running=True)
        try:
            self._scrub_all()
        finally:
            self.done = replace(self.done, is_running=False)
        log.info("scrub: pass %d done, %d bytes read, %d bad files so far", *list(asdict(self.done).values())[:3])
        return self.done

    def _scrub_all(self) -> None:
        # An agent that is restarted often would otherwise read the same first checkpoints again and again.
        after = self._damage.scrubbed_to
        ids = sorted(self._store.catalog.directories())
        for checkpoint_id in [*(found for found in ids if found > after), *(found for found in ids if found <= after)]:
            # Recorded first: if this checkpoint ends the pass with an error, the next pass reads it last.
            self._damage.note_scrubbed_to(checkpoint_id)
            inspector, note = Inspector(self._store, self._node_id, self._wait_for_pace), self._damage.begin_reading()
            try:
                findings = [found for found in inspector.inspect(checkpoint_id) if found.problem is Problem.CORRUPT]
            except StoreError as exc:
                # Skipped only if the system refuses to read now, as without descriptors. A failing disk must be reported.
                if not is_refusal(exc):
                    raise
                log.error("scrub: %s is skipped: %s", checkpoint_id, exc)  # noqa: TRY400 - it explains itself
                continue
            for holding in inspector.holdings:
                note(holding)
            for finding in findings:
                log.warning("scrub: %s", finding)
                self._on_bad(finding)
            total, bad = self.done.bytes_read + inspector.bytes_read, self.done.findings + len(findings)
            self.done = replace(self.done, bytes_read=total, findings=bad)
        self.done = replace(self.done, passes=self.done.passes + 1)
        self._damage.note_scrubbed_to("")

    def _wait_for_pace(self, size_bytes: int) -> None:
        # A save comes first: the scrub would compete with it for the disk.
        while any(self._store.is_locked(intent.save_id) for intent in self._store.list_staged()):
            if self._stopping.wait(_BUSY_PAUSE_S):
                raise Stopped
        self._pace.take(size_bytes)
