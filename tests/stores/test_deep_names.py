"""Every id that is taken is looked for so deep: what a store has saved it also sees."""

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
def test_what_is_saved_under_an_id_is_seen(tmp_path: Path, name: str) -> None:
    """On a node; else it would answer that it has nothing of the save, and other nodes would drop their parts."""
    store = LocalStore(tmp_path)
    saved = open_save(store, 1, checkpoint_id=name)
    store.commit(saved.save_id)
    assert store.catalog.checkpoint_of(saved.save_id) == name
    assert list(store.catalog.directories()) == [name]


@pytest.mark.parametrize("name", TAKEN)
def test_what_lies_in_a_bucket_under_an_id_is_seen(name: str) -> None:
    """By a load of the newest one, and by a policy of retention."""
    client = MemoryClient(ObjectTarget("memory://bucket"))
    client.put(f"{name}/.metadata", b"metadata")
    assert [found.checkpoint_id for found in Bucket(client).saves()] == [name]


def test_ids_of_several_parts_are_taken() -> None:
    """As many as the search goes deep, and no more."""
    assert IDS[:PARTS_MAX] == TAKEN
