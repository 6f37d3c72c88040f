"""How a rank presents its node to the others of a save or load."""

from pathlib import Path

import pytest

from replicated_ckpt import StoreError
from replicated_ckpt.agent.state.endpoint import Endpoint
from replicated_ckpt.dcp.agreement import node_post
from replicated_ckpt.stores.local.store import LocalStore


def test_what_the_system_refuses_is_an_error_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a hook where a planner runs, whose bare OSError would be taken for the planner's own."""
    store = LocalStore(tmp_path)
    endpoint = Endpoint(store.node_id(), "127.0.0.1", 1, "", 1, "")
    monkeypatch.setattr(node_post, "ensure_agent", lambda *_, **__: endpoint)
    assert node_post.register_node(store, None).node_id == endpoint.node_id
    monkeypatch.setattr(node_post, "_BOOT_ID", tmp_path)  # it is there, and cannot be read
    with pytest.raises(StoreError, match=str(tmp_path)):
        node_post.register_node(store, None)
