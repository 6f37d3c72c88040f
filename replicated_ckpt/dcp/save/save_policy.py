"""The retention of a writer. With each save it submits the run's policies to this node's agent, which removes
checkpoints.
"""

import logging

from replicated_ckpt.config import WriterConfig
from replicated_ckpt.core.upkeep.policy import NODES, Policy, find_series_name, scope_of
from replicated_ckpt.dcp.agreement.decision import SaveDecision
from replicated_ckpt.dcp.agreement.node_post import ask_agent
from replicated_ckpt.errors import ReplicatedCkptError
from replicated_ckpt.node.state.policies import NAME
from replicated_ckpt.stores.bucket_client.url import ObjectTarget
from replicated_ckpt.stores.files.existence import is_there
from replicated_ckpt.stores.local.store import LocalStore

log = logging.getLogger(__name__)


class Retaining:
    """One writer's policies. A policy of None replaces a policy of an earlier run."""

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
        told = (
            f"retention counts the checkpoints of one directory of ids. With {checkpoint_id!r} each step has its own "
            f"directory, so retention removes nothing. Give each series a directory: {better!r}."
        )
        return [told]

    def submit(self, decision: SaveDecision, rank: int) -> list[str]:
        """Submits the policies to this node's agent, once for each node of the save. Returns descriptions of problems.
        Cheap.

        Does nothing without a policy and without an earlier policy to replace, or if no agent answers.
        """
        node = decision.node_of(rank).node_id
        # A silent agent would cost its time-out again.
        if rank != decision.ranks_of(node)[0] or node in decision.unreached or not self._is_used:
            return []
        return self._tell(decision, is_committed=False)

    def note_committed(self, decision: SaveDecision, *, has_agents: bool) -> None:
        """Called after the commit. Agents that committed the save apply the policies themselves. If no agent did, one
        is asked to.
        """
        if not has_agents and self._is_used:
            for problem in self._tell(decision, is_committed=True):
                log.warning("%s", problem)

    @property
    def _is_wanted(self) -> bool:
        return self._config.retention is not None or self._config.object_retention is not None

    @property
    def _is_used(self) -> bool:
        # A policy file of an earlier run still removes checkpoints: this run's None must reach the agent.
        return self._is_wanted or is_there(self._store.root_agent_directory() / NAME)

    def _tell(self, decision: SaveDecision, *, is_committed: bool) -> list[str]:
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
