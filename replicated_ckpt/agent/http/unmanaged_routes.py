"""The agent's verbs for checkpoints without a manifest, as stock torch leaves them: list, open, check."""

import json
from collections.abc import Mapping

from replicated_ckpt.agent.requests.checks import Checks
from replicated_ckpt.agent.requests.request import Answer, Request, json_answer
from replicated_ckpt.agent.saves.service import NodeService
from replicated_ckpt.core.layout import check_checkpoint_id, is_checkpoint_file
from replicated_ckpt.core.reading.source_order import ByteRange
from replicated_ckpt.core.unmanaged.metadata_places import ranges_from_json
from replicated_ckpt.errors import ObjectMissing
from replicated_ckpt.stores.peer.answer import parsing
from replicated_ckpt.stores.unmanaged.directory import UnmanagedDirectory
from replicated_ckpt.stores.unmanaged.inspection import UnmanagedInspector

ITEMS_BYTES_MAX = 16 << 20
"""As JSON; some 800,000 items on one node fit, and take ten times as much memory for as long as they are checked."""


class UnmanagedRoutes:
    """Maps requests to what lies there. Nothing is written. Safe for concurrent use."""

    def __init__(self, service: NodeService, checks: Checks) -> None:
        self._service = service
        self._checks = checks
        self._unmanaged = UnmanagedDirectory(service.store.root)

    def list(self, checkpoint_id: str | None) -> Answer:
        """What lies here, or of one checkpoint."""
        if checkpoint_id is not None:
            check_checkpoint_id(checkpoint_id)
        found = self._unmanaged.holdings(self._service.node_id, checkpoint_id)
        return json_answer(node_id=self._service.node_id, unmanaged=[holding.to_json() for holding in found])

    def open(self, checkpoint_id: str, name: str, size_bytes: str) -> int:
        """A file descriptor of a file of this size; the caller closes it."""
        is_size = size_bytes.isascii() and size_bytes.isdigit() and len(size_bytes) <= 18
        if not is_checkpoint_file(name) or not is_size:
            raise ObjectMissing("this agent", "GET", name[:200], "no such file")
        return self._unmanaged.open(check_checkpoint_id(checkpoint_id), name, int(size_bytes))

    def verify(self, request: Request, checkpoint_id: str) -> Answer:
        """Reads what lies here of one checkpoint; the body says where the items are: `.metadata` may lie elsewhere."""
        check_checkpoint_id(checkpoint_id)
        inspector = UnmanagedInspector(self._service.store, self._service.node_id)
        with self._checks.in_turn(request, ITEMS_BYTES_MAX) as raw:
            ranges = _ranges(raw)
            findings = [finding.to_json() for finding in inspector.inspect(checkpoint_id, ranges)]
        return json_answer(findings=findings, bytes_read=inspector.bytes_read, unchecked=inspector.unchecked)


def _ranges(raw: bytes) -> Mapping[str, tuple[ByteRange, ...]]:
    with parsing("Items cannot be checked"):
        return ranges_from_json(json.loads(raw)["items"])
