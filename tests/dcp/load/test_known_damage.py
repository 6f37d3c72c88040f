"""A copy that is known to be damaged: what "latest" gives where it is the only one."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from replicated_ckpt import ReplicatedReader, ReplicatedWriter
from replicated_ckpt.agent.state.damage import DamageBook
from replicated_ckpt.core.inventory import Holding, SaveFound
from replicated_ckpt.stores.local.store import LocalStore
from tests.damage import flip

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore::replicated_ckpt.errors.ReplicatedCkptWarning"),
]
SHARD = "__0_0.distcp"


def test_latest_is_an_older_checkpoint_where_the_newest_is_known_to_be_damaged(tmp_path: Path) -> None:
    """The agent of the node has found and noted it; a load that goes by sizes alone would fail each time again."""
    for step in (1, 2):
        saved = {"x": torch.full((1000,), float(step))}
        dcp.save(saved, checkpoint_id=f"step-{step}", storage_writer=ReplicatedWriter(tmp_path, copies=1))
    store = LocalStore(tmp_path)
    flip(tmp_path / "step-2" / SHARD, 100)
    DamageBook(store).mark("step-2", store.catalog.manifest("step-2").save_id, SHARD)
    found = {"x": torch.zeros(1000)}
    dcp.load(found, checkpoint_id="latest", storage_reader=ReplicatedReader(tmp_path))
    assert found["x"].eq(1.0).all()


@pytest.mark.parametrize(
    ("damaged", "footless", "others", "is_lacking"),
    [((SHARD,), (), 0, True), ((SHARD,), (SHARD,), 0, False), ((SHARD,), (), 1, False), ((), (), 0, False)],
    ids=["the-only-copy", "its-footer-alone", "one-of-two", "intact"],
)
def test_one_damaged_copy_alone_is_none(
    damaged: tuple[str, ...], footless: tuple[str, ...], others: int, *, is_lacking: bool
) -> None:
    """Several damaged ones may make up for each other, and data behind a bad footer is read."""
    holdings = [Holding("n0", "step-1", "1" * 32, 1, True, {SHARD: 9}, damaged, footless=footless)]
    holdings += [Holding("n1", "step-1", "1" * 32, 1, True, {SHARD: 9}, (SHARD,))] * others
    save = SaveFound("step-1", "1" * 32, 1, tuple(holdings))
    assert bool(save.list_missing({SHARD: 9}, save.damaged_copies)) is is_lacking
    assert save.list_missing({SHARD: 9}) == ()
