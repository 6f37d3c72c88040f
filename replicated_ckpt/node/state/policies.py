"""The retention policies that this node's own ranks have set, kept across restarts."""

import logging
import threading
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from replicated_ckpt.core.upkeep.policy import Policy, merge_policies
from replicated_ckpt.node.state.state_file import StateFile

log = logging.getLogger(__name__)

NAME = "retention.json"
_POLICIES_MAX = 256


class PolicyBook:
    """The latest policy of each scope and tier. Safe for concurrent use.

    A damaged file counts as empty: nothing is removed until a save brings a policy again. The file has a checksum, as one
    flipped bit could turn a policy that keeps nine checkpoints into one that keeps one.
    """

    def __init__(self, directory: Path) -> None:
        self._file = StateFile(directory / NAME)
        self._lock = threading.Lock()
        policies = self._file.read_checked("policies", _parse) or []
        self._by_key = {policy.key: policy for policy in policies}

    def read_all(self) -> tuple[Policy, ...]:
        with self._lock:
            return tuple(self._by_key.values())

    def of(self, scope: str, tier: str, lineage: str) -> Policy | None:
        with self._lock:
            return self._by_key.get((scope, tier, lineage))

    def learn(self, policies: Iterable[Policy]) -> bool:
        """Stores policies that are later than the known ones; returns whether any retention has changed.

        Raises:
            StoreError: the file cannot be written. The policies apply until this agent ends; the next call writes them.
        """
        changed = []
        with self._lock:
            for policy in policies:
                before = self._by_key.pop(policy.key, replace(policy, revision=-1, retention=None))
                after = self._by_key[policy.key] = merge_policies(before, policy)
                if before.retention != after.retention:
                    changed.append(after)
            # The policy that was set longest ago goes: each new one was put at the end.
            while len(self._by_key) > _POLICIES_MAX:
                del self._by_key[next(iter(self._by_key))]
            if self._by_key:
                self._file.write_checked("policies", [policy.to_json() for policy in self._by_key.values()])
        for policy in changed:
            log.info("retention of %r in %s: %s", policy.scope or "*", policy.tier or "the nodes", policy.retention)
        return bool(changed)


def _parse(told: Any) -> list[Policy]:
    return [Policy.from_json(fields) for fields in told]
