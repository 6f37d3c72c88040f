"""The peers that this node has met, kept across restarts so that a node alone still finds the others."""

import json
import threading
from collections.abc import Sequence
from pathlib import Path

from replicated_ckpt.stores.agent_client import AgentAddress
from replicated_ckpt.stores.durable import translated, write_file

_PEERS_NAME = "peers.json"
_PEERS_MAX = 8192


class PeerBook:
    """Addresses by node, the latest one known. The file is readable by this user only, as it holds tokens."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / _PEERS_NAME
        self._lock = threading.Lock()

    def learn(self, peers: Sequence[AgentAddress]) -> None:
        with self._lock:
            known = {peer.node_id: peer for peer in self.known()}
            merged = {**known, **{peer.node_id: peer for peer in peers}}
            if merged == known:
                return
            latest = list(merged.values())[-_PEERS_MAX:]
            with translated(str(self._path.parent), "write", _PEERS_NAME):
                write_file(self._path, json.dumps([peer.to_json() for peer in latest]).encode(), mode=0o600)

    def known(self) -> tuple[AgentAddress, ...]:
        """The peers met so far. An unreadable file counts as none: it only saves looking for them."""
        try:
            return tuple(AgentAddress.from_json(fields) for fields in json.loads(self._path.read_bytes()))
        except (OSError, ValueError, KeyError, TypeError):
            return ()
