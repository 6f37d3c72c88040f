"""Every valid checkpoint id, however deep, is found again by the listings of nodes and buckets."""

from pathlib import Path

import pytest

from replicated_ckpt.core.layout import PARTS_MAX, is_checkpoint_id
from replicated_ckpt.stores.bucket.bucket import Bucket
from replicated_ckpt.stores.bucket_client.url import ObjectTarget
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.testing import MemoryClient
from tests.stores.local.test_order_of_commits import open_save

IDS = ["/".join("abcdefghijklmnop"[:parts]) for parts in range(1, 17)]
TAKEN = [name for name in IDS if is_checkpoint_id(name)]


@pytest.mark.parametrize("name", TAKEN)
def test_a_node_finds_saves_under_every_id(tmp_path: Path, name: str) -> None:
    """A node's catalog finds a save under any valid id. Otherwise the node would report it as absent, and others would
    drop their parts.
    """
    store = LocalStore(tmp_path)
    saved = open_save(store, 1, checkpoint_id=name)
    store.commit(saved.save_id)
    assert store.catalog.checkpoint_of(saved.save_id) == name
    assert list(store.catalog.directories()) == [name]


@pytest.mark.parametrize("name", TAKEN)
def test_a_bucket_finds_checkpoints_under_every_id(name: str) -> None:
    """A bucket's listing finds a checkpoint under any valid id."""
    client = MemoryClient(ObjectTarget("memory://bucket"))
    client.put(f"{name}/.metadata", b"metadata")
    assert [found.checkpoint_id for found in Bucket(client).saves()] == [name]


def test_ids_have_a_maximum_depth() -> None:
    """Ids of up to `PARTS_MAX` parts are valid, the depth of the listings."""
    assert IDS[:PARTS_MAX] == TAKEN
