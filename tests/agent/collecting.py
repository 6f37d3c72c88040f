"""Runs the collector of superseded checkpoints once."""

import threading
from collections.abc import Mapping, Sequence

from replicated_ckpt.agent.repair.mender import find_damaged
from replicated_ckpt.core.manifest import Manifest
from replicated_ckpt.core.upkeep.repair import NodeView
from replicated_ckpt.node.saves.collector import Collector
from replicated_ckpt.node.saves.service import NodeService


def drop_superseded(
    service: NodeService, manifests: Mapping[str, Manifest], views: Sequence[NodeView], *, is_done: bool = False
) -> None:
    """Like one round of re-protection. `is_done`: every checkpoint has all its copies."""
    damaged = find_damaged(service) if is_done else ()
    Collector(service, threading.Event()).drop_superseded(manifests, views, damaged)
