"""What a writer has its node's agent do: upload saves to the bucket, and remove checkpoints by retention policies."""

import logging
import threading
import time
from dataclasses import dataclass, field
from math import isnan
from numbers import Real

from replicated_ckpt.config import WriterConfig
from replicated_ckpt.core.lineage import Histories, histories_from_json
from replicated_ckpt.core.upkeep.policy import NODES, Policy, find_series_name, scope_of
from replicated_ckpt.core.upkeep.upload_plan import UploadPlan, UploadState
from replicated_ckpt.dcp.agreement.decision import SaveDecision
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
from replicated_ckpt.node.state.policies import NAME
from replicated_ckpt.node.state.upload_book import UploadBook
from replicated_ckpt.node.uploads.uploader import Uploader
from replicated_ckpt.stores.bucket_client.url import ObjectTarget
from replicated_ckpt.stores.files.existence import is_there
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.throttle import Pace

log = logging.getLogger(__name__)

_SHARED = "Name a bucket that all ranks reach: s3://bucket/prefix, or file:///a/shared/directory."
WAIT_TIMEOUT_S = 600.0
PROBE_S = 15.0
"""The time-out of an agent's look at the bucket. Only the first look takes long, and the agent may have just started."""
GIVE_UP_S = 120.0
"""`wait_for_upload` raises if every try of the bucket has failed for this long."""
_POLL_FIRST_S, _POLL_MAX_S, _POLL_SHARE = 0.02, 1.0, 0.05
"""The pause between two requests to the agent is this share of the wait so far: a wait ends at most 5 % late."""
_GONE = "this node no longer has it: it was aborted, replaced or removed."


def check_timeout(timeout_s: object) -> float:
    """The seconds, at most as many as a lock can wait. Raises ConfigInvalid: this is not a number."""
    if not isinstance(timeout_s, Real) or isnan(timeout_s):
        raise ConfigInvalid(f"timeout_s must be a number of seconds, not {timeout_s!r}.")
    return min(float(timeout_s), threading.TIMEOUT_MAX)


@dataclass(frozen=True)
class Probed:
    """The bucket's answer before a save: the plan, the lineages committed in the bucket, and a problem or "".

    `named` has the lineage of the save that has the checkpoint's name in the bucket, as `Opened.named` for nodes.
    `weakness`: a description, if the bucket's conditional writes do not exclude each other; else "".
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
        """Looks at the bucket before a save. A failing bucket does not fail the save on the nodes.

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
            # Unknown counts as not empty: objects that may exist there must not be overwritten.
            found = {"error": str(exc), "is_empty": False, "save_id": "", "lineage": "", "histories": {}}
        if found["save_id"] and not overwrite:
            raise CheckpointExists(f"Checkpoint already exists: {checkpoint_id!r} in {url}.")
        problem = f"object store {url}: {found['error']}" if found["error"] else ""
        # With a prefix of its own, a save never overwrites files of the old save that a load may be reading.
        plan = UploadPlan(url, has_own_prefix=is_on_nodes or not found["is_empty"], replaces=found["save_id"])
        named = frozenset({str(found["lineage"])} if found["save_id"] else ())
        weakness = str(found.get("weakness", ""))  # an older agent does not return it
        return Probed(plan, histories_from_json(found["histories"]), problem, named, weakness)

    def expect(self, save_id: str, checkpoint_id: str) -> None:
        """Records a save that goes to the bucket. From now on `wait_for_upload` waits for it, even before its commit."""
        with self._lock:
            self._awaited[save_id] = checkpoint_id

    def note_committed(self) -> None:
        """The save was committed on the nodes: the upload may begin."""
        if self._target is not None and self._target.is_process_local:
            self._bring_here()
            return
        for problem in self.submit():  # also wakes the uploader of an agent that has the bucket already
            log.warning("uploads are delayed: %s", problem)

    def _bring_here(self) -> None:
        """Uploads in this process. An agent would put the objects into its own memory."""
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
            UploadFailed: a save is not committed there, and waiting longer does not help, or the time is over. The next
                wait tries again. With `is_last_wanted` also if the last save can no longer be committed there.
        """
        deadline = time.monotonic() + timeout_s
        with self._lock:
            awaited = dict(self._awaited)
        arrived = []
        for number, (save_id, checkpoint_id) in enumerate(awaited.items(), 1):
            why_not = self._wait_for(save_id, checkpoint_id, deadline)
            with self._lock:
                # Only after the wait: after an UploadFailed, the next call waits for this save again.
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
        # `now=1` has the agent retry at once instead of waiting out its pause. Later polls must not repeat that.
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
            is_here = state.url == self._target.url  # else the upload goes to another bucket first, then to this one
            if state.state != "pending" and not state.is_denied and is_here:
                return "" if state.state == "committed" else state.error or _GONE
            # Bad credentials do not mend themselves; a bucket that fails for minutes may, but not within this wait.
            if state.is_denied or state.failing_s > GIVE_UP_S:
                if state.state != "pending":
                    with self._lock:  # this error reports it, and no later wait may fail because of it
                        self._awaited.pop(save_id, None)
                raise UploadFailed(checkpoint_id, state.url, state.error)
            if time.monotonic() > deadline:
                why = state.error or "the time-out expired; its upload continues."
                raise UploadFailed(checkpoint_id, state.url, why)
            waited_s = time.monotonic() - began
            time.sleep(min(_POLL_MAX_S, max(_POLL_FIRST_S, _POLL_SHARE * waited_s)))


class RetentionPolicies:
    """One writer's retention policies, which each save submits to this node's agent.

    A policy of None replaces a policy of an earlier run.
    """

    def __init__(self, store: LocalStore, config: WriterConfig, target: ObjectTarget | None) -> None:
        self._store = store
        self._config = config
        self._target = target
        self._last_scope, self._is_warned = "", False

    def warn_of_name(self, checkpoint_id: str) -> list[str]:
        """A warning if a policy would never remove checkpoints with such names; only at the first save into a
        directory.
        """
        is_first = scope_of(checkpoint_id) != self._last_scope
        self._last_scope, better = scope_of(checkpoint_id), find_series_name(checkpoint_id)
        if better is None or self._is_warned or not (is_first and self._is_wanted):
            return []
        self._is_warned = True
        warning = (
            f"retention counts the checkpoints of one directory of ids. With {checkpoint_id!r} each step has its own "
            f"directory, so retention removes nothing. Give each series a directory: {better!r}."
        )
        return [warning]

    def submit(self, decision: SaveDecision, rank: int) -> list[str]:
        """Submits the policies to this node's agent, once for each node of the save. Returns descriptions of problems.
        Cheap.

        Does nothing if there is neither a policy nor an earlier one to replace, or if the agent did not answer.
        """
        node = decision.node_of(rank).node_id
        # A silent agent would cost its time-out again.
        if rank != decision.ranks_of(node)[0] or node in decision.unreached or not self._is_used:
            return []
        return self._send(decision, is_committed=False)

    def note_committed(self, decision: SaveDecision, *, has_agents: bool) -> None:
        """Called after the commit. Agents that committed the save apply the policies. If none did, this node's agent is
        asked to.
        """
        if not has_agents and self._is_used:
            for problem in self._send(decision, is_committed=True):
                log.warning("%s", problem)

    @property
    def _is_wanted(self) -> bool:
        return self._config.retention is not None or self._config.object_retention is not None

    @property
    def _is_used(self) -> bool:
        # A policy file of an earlier run still removes checkpoints: this run's None must reach the agent.
        return self._is_wanted or is_there(self._store.root_agent_directory() / NAME)

    def _send(self, decision: SaveDecision, *, is_committed: bool) -> list[str]:
        scope, revision = scope_of(decision.checkpoint_id), decision.sequence
        lineage = decision.lineage
        policies = [Policy(scope, NODES, revision, self._config.retention, lineage)]
        if self._target is not None:
            policies.append(Policy(scope, self._target.url, revision, self._config.object_retention, lineage))
        document = {"policies": [policy.to_json() for policy in policies], "is_committed": is_committed}
        try:
            ask_agent(self._store, "POST", "/v1/retention", document)
        except ReplicatedCkptError as exc:
            return [f"this node's agent did not take the retention policy: {exc}"]
        return []
