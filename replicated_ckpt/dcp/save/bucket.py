"""The object tier of a writer. It names the bucket to this node's agent, which uploads, and asks the agent for the
state.
"""

import logging
import threading
import time
from dataclasses import dataclass, field
from math import isnan
from numbers import Real

from replicated_ckpt.core.lineage import Histories, histories_from_json
from replicated_ckpt.core.upkeep.upload_plan import UploadPlan, UploadState
from replicated_ckpt.dcp.agreement.node_post import ask_agent
from replicated_ckpt.errors import (
    CheckpointExists,
    ConfigInvalid,
    ObjectMissing,
    ReplicatedCkptError,
    UploadFailed,
)
from replicated_ckpt.node.peers.watch import SilenceTimeouts
from replicated_ckpt.node.saves.service import NodeService
from replicated_ckpt.node.state.upload_book import UploadBook
from replicated_ckpt.node.uploads.uploader import Uploader
from replicated_ckpt.stores.bucket_client.url import ObjectTarget
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.throttle import Pace

log = logging.getLogger(__name__)

_SHARED = "Name a bucket that all ranks reach: s3://bucket/prefix, or file:///a/shared/directory."
WAIT_TIMEOUT_S = 600.0
PROBE_S = 15.0
"""The agent's own look takes less. Only its first one takes long, and the agent may start after this process."""
GIVE_UP_S = 120.0
"""`wait_for_upload` ends for a bucket of which every try has failed for that long."""
_POLL_FIRST_S, _POLL_MAX_S, _POLL_SHARE = 0.02, 1.0, 0.05
"""The agent is asked again after this share of the time that was waited so far: so much longer a wait takes at most."""
_GONE = "this node no longer has it: it was aborted, replaced or removed."


def check_timeout(timeout_s: object) -> float:
    """The seconds, at most as many as a lock can wait. Raises ConfigInvalid: this is not a number."""
    if not isinstance(timeout_s, Real) or isnan(timeout_s):
        raise ConfigInvalid(f"timeout_s must be a number of seconds, not {timeout_s!r}.")
    return min(float(timeout_s), threading.TIMEOUT_MAX)


@dataclass(frozen=True)
class Probed:
    """The bucket's answer before a save: the plan, the lineages committed in the bucket, and a problem or "".

    `named` has the lineage of the save that has the checkpoint's name in the bucket, as `Opened` has it of nodes.
    `weakness`: the first use of the bucket has shown that its conditional writes do not exclude each other.
    """

    plan: UploadPlan
    histories: Histories = field(default_factory=dict)
    problem: str = ""
    named: frozenset[str] = frozenset()
    weakness: str = ""


class ObjectTier:
    """One writer's bucket. Used by one thread at a time, except `wait_for_upload`, which may run during a save."""

    def __init__(self, store: LocalStore, target: ObjectTarget | None, every: int) -> None:
        """Raises ConfigInvalid: the bucket is a directory that contains the store, or lies in the store."""
        if target is not None:
            # Uploads would go into the store itself, and be taken for checkpoints of it.
            target.check_is_apart(store.root)
        self._store = store
        self._target = target
        self._every = every
        self._lock = threading.Lock()
        self._awaited: dict[str, str] = {}

    def takes(self, sequence: int) -> bool:
        """Whether the save of this sequence goes to the bucket: every n-th of a run, whichever job continues the run."""
        return self._target is not None and sequence % self._every == 0

    def submit(self, world_size: int = 1) -> list[str]:
        """Names the bucket to this node's agent, and starts the agent if none runs. Cheap.

        Returns descriptions of problems; empty if there are none.

        Raises:
            ConfigInvalid: the bucket is in this process's memory, and there are other ranks.
        """
        if self._target is None:
            return []
        if self._target.is_process_local:
            if world_size > 1:
                raise ConfigInvalid(
                    f"{self._target.url} is in the memory of one process, but there are {world_size} ranks.", _SHARED
                )
            return []
        try:
            ask_agent(self._store, "POST", "/v1/object/target", self._target.to_json())
        except ReplicatedCkptError as exc:
            return [f"this node's agent has no access to the object store: {exc}"]
        return []

    def probe(self, checkpoint_id: str, *, is_on_nodes: bool, overwrite: bool) -> Probed:
        """Looks at the bucket before a save. A bucket that fails does not keep the save from the nodes.

        Raises:
            CheckpointExists: the bucket has this checkpoint, and the save may not overwrite it.
        """
        assert self._target is not None
        url = self._target.url
        # An agent is another process: it cannot see a bucket that is this process's memory.
        if self._target.is_process_local:
            return Probed(UploadPlan(url, has_own_prefix=True))
        document = {"url": url, "checkpoint_id": checkpoint_id}
        try:
            found = ask_agent(self._store, "POST", "/v1/object/probe", document, PROBE_S)
        except ReplicatedCkptError as exc:
            # Unknown counts as not empty: names that may be taken there must not be written over.
            found = {"error": str(exc), "is_empty": False, "save_id": "", "lineage": "", "histories": {}}
        if found["save_id"] and not overwrite:
            raise CheckpointExists(f"Checkpoint already exists: {checkpoint_id!r} in {url}.")
        problem = f"object store {url}: {found['error']}" if found["error"] else ""
        # Under a prefix of its own a save never overwrites files that a load of the old one may be reading.
        plan = UploadPlan(url, has_own_prefix=is_on_nodes or not found["is_empty"], replaces=found["save_id"])
        named = frozenset({str(found["lineage"])} if found["save_id"] else ())
        weakness = str(found.get("weakness", ""))  # an older agent tries no conditional writes
        return Probed(plan, histories_from_json(found["histories"]), problem, named, weakness)

    def expect(self, save_id: str, checkpoint_id: str) -> None:
        """Notes that a save for the bucket is written. `wait_for_upload` waits for that save, even before its commit."""
        with self._lock:
            self._awaited[save_id] = checkpoint_id

    def note_committed(self) -> None:
        """The save was committed on the nodes: the upload may begin."""
        if self._target is not None and self._target.is_process_local:
            self._bring_here()
            return
        for problem in self.submit():  # also wakes the uploader of an agent that has the bucket already
            log.warning("uploads wait: %s", problem)

    def _bring_here(self) -> None:
        """Uploads in this process: an agent would put the objects into its own memory, where no other process sees
        them.
        """
        assert self._target is not None
        stopping = threading.Event()
        service = NodeService(self._store)
        book = UploadBook(self._store.agent_directory())
        book.learn(self._target)
        Uploader(service, book, Pace(1e15, stopping), SilenceTimeouts(), stopping, lambda *_: None).round()

    def wait_for_upload(self, timeout_s: float, *, is_last_wanted: bool = False) -> tuple[str, ...]:
        """Waits until every expected save is committed in the bucket, or can no longer be committed there.

        Returns the checkpoint ids of the committed ones.

        Raises:
            UploadFailed: one is not committed, and waiting longer does not help, or the time is over. The next wait
                tries again. With `is_last_wanted` also if the last save can no longer be committed there.
        """
        deadline = time.monotonic() + timeout_s
        with self._lock:
            awaited = dict(self._awaited)
        arrived = []
        for number, (save_id, checkpoint_id) in enumerate(awaited.items(), 1):
            why_not = self._wait_for(save_id, checkpoint_id, deadline)
            with self._lock:
                # After the wait only: an UploadFailed leaves it for the next call.
                self._awaited.pop(save_id, None)
            if not why_not:
                arrived.append(checkpoint_id)
                continue
            assert self._target is not None
            if is_last_wanted and number == len(awaited):
                raise UploadFailed(checkpoint_id, self._target.url, why_not)
            log.warning("checkpoint %r is not in %s: %s", checkpoint_id, self._target.url, why_not)
        return tuple(arrived)

    def _wait_for(self, save_id: str, checkpoint_id: str, deadline: float) -> str:
        """Returns why a save can no longer be committed in the bucket, or "" once it is. Raises UploadFailed."""
        assert self._target is not None
        if self._target.is_process_local:
            return ""
        # Once: the agent retries at once instead of waiting out its pause, and later polls must not repeat that.
        began, how = time.monotonic(), "?now=1"
        while True:
            path, how = f"/v1/object/saves/{save_id}{how}", ""
            try:
                state = UploadState(**ask_agent(self._store, "GET", path))
            except ObjectMissing as exc:
                # No upload is ordered yet: the node may not have published the save so far.
                if ask_agent(self._store, "GET", f"/v1/saves/{save_id}")["state"] == "unknown":
                    return _GONE
                if time.monotonic() > deadline:
                    raise UploadFailed(checkpoint_id, self._target.url, "it is not committed on this node.") from exc
                time.sleep(_POLL_MAX_S / 4)
                continue
            is_here = state.url == self._target.url  # else it was ordered to another bucket, and comes here next
            if state.state != "pending" and not state.is_denied and is_here:
                return "" if state.state == "committed" else state.error or _GONE
            # Bad credentials do not mend themselves; a bucket that fails for minutes may, but not within this wait.
            if state.is_denied or state.failing_s > GIVE_UP_S:
                if state.state != "pending":
                    with self._lock:  # reported once: no later wait may fail for it
                        self._awaited.pop(save_id, None)
                raise UploadFailed(checkpoint_id, state.url, state.error)
            if time.monotonic() > deadline:
                why = state.error or "the time-out expired; its upload continues."
                raise UploadFailed(checkpoint_id, state.url, why)
            waited_s = time.monotonic() - began
            time.sleep(min(_POLL_MAX_S, max(_POLL_FIRST_S, _POLL_SHARE * waited_s)))
