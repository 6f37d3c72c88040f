"""How a rank registers its node with the other ranks of a save or load."""

from pathlib import Path

import pytest

from replicated_ckpt import StoreError
from replicated_ckpt.agent.state.endpoint import Endpoint
from replicated_ckpt.dcp.agreement import node_post
from replicated_ckpt.stores.local.store import LocalStore


def test_a_system_error_becomes_a_store_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An OSError in `register_node` becomes a StoreError, which nobody can mistake for an error of a planner."""
    store = LocalStore(tmp_path)
    endpoint = Endpoint(store.node_id(), "127.0.0.1", 1, "", 1, "")
    monkeypatch.setattr(node_post, "ensure_agent", lambda *_, **__: endpoint)
    assert node_post.register_node(store, None).node_id == endpoint.node_id
    monkeypatch.setattr(node_post, "_BOOT_ID", tmp_path)  # a directory, which cannot be read
    with pytest.raises(StoreError, match=str(tmp_path)):
        node_post.register_node(store, None)
