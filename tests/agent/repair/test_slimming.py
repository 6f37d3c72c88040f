"""Agents drop the optimizer of older checkpoints, each on its own node by its own ranks' policy. The weights keep their
copies.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest

from replicated_ckpt import Retention
from replicated_ckpt.core.parts import Part
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.local.versions.remove import slim
from tests.agent.agents import running_agent, wait_for
from tests.agent.checkpoints import WEIGHTS, checkpointed, findings, held, quarantined, shard, with_optimizer
from tests.agent.repair.test_retention import PAIR, QUICK, SMALL, agents, assert_unchanged, meet, set_policy

pytestmark = [pytest.mark.fault, pytest.mark.timeout(120)]
WHOLE = with_optimizer(PAIR)
POLICY = Retention(keep_last=4, full_last=2)


def stored(folder: Path, numbers: Sequence[int]) -> list[LocalStore]:
    stores = [LocalStore(folder / f"node{index}") for index in range(2)]
    for number in numbers:
        checkpointed(stores, number, WHOLE, checkpoint_id=f"step-{number}", size_bytes=SMALL)
    return stores


def full(store: LocalStore) -> list[int]:
    """The steps whose optimizer this store holds."""
    return sorted(
        int(path.parent.name.removeprefix("step-")) for path in store.root.glob(f"step-*/{shard(0, Part.OPTIMIZER)}")
    )


def wait_until_full(stores: Sequence[LocalStore], numbers: Sequence[int]) -> None:
    """Waits until the stores hold the optimizer of these steps only."""
    wait_for(lambda: all(full(store) == list(numbers) for store in stores), 20, f"{numbers} full")


def check_weights(stores: Sequence[LocalStore], numbers: Sequence[int]) -> None:
    """Asserts that both nodes hold all weights intact, and the same slimmed manifest."""
    for number in numbers:
        for store in stores:
            assert held(store, f"step-{number}") == set(PAIR)
            assert (store.root / f"step-{number}" / ".metadata").read_bytes() == WEIGHTS
        first, second = ((store.root / f"step-{number}" / ".manifest.json").read_bytes() for store in stores)
        assert first == second
    assert [findings(store) for store in stores] == [[], []]
    assert not any(name.endswith(".distcp") for store in stores for name in quarantined(store))


def test_each_agent_slims_its_part(tmp_path: Path) -> None:
    """The newest two stay full. No agent restores an optimizer that was dropped."""
    stores = stored(tmp_path, range(1, 5))
    with agents(stores) as running:
        for agent in running:
            set_policy(agent, POLICY, revision=4)
        wait_until_full(stores, [3, 4])
        assert_unchanged(stores, *running)
        wait_until_full(stores, [3, 4])
        with running[0].client() as client:
            wait_for(lambda: client.call("GET", "/v1/status")["protection"]["is_complete"], 20, "nothing to do")
            assert client.call("GET", "/v1/status")["protection"]["retention"]["slimmed"] == 2
    check_weights(stores, [1, 2])
    log = (stores[0].root / "agent.out").read_text()
    assert "removed the optimizer of step-2 (save" in log
    assert "it keeps only its weights: its sequence is below 3, the lowest of the newest 2 full checkpoints" in log


def test_a_node_slims_only_by_its_own_ranks_policy(tmp_path: Path) -> None:
    """One node still has the optimizer, the other has dropped it: the optimizer is not copied, and lost weights are
    restored.
    """
    stores = stored(tmp_path, range(1, 4))
    manifest = stores[0].catalog.manifest("step-1")
    assert slim(stores[0].root, "step-1", manifest.save_id)
    with agents(stores) as running:
        set_policy(running[0], Retention(keep_last=3, full_last=1), revision=3)
        wait_until_full(stores[:1], [2, 3])  # the other node's ranks have no policy
        assert_unchanged(stores, *running)
        assert full(stores[1]) == [1, 2, 3]
        for store in stores:
            (store.root / "step-1" / shard(0)).unlink()
            wait_for(lambda store=store: held(store) >= {shard(0)}, 20, "the copy again")  # type: ignore[misc]
        (stores[0].root / "step-1" / ".metadata").write_bytes(b"damage")
        with running[0].client() as client:
            client.call("POST", "/v1/verify", {})
        wait_for(lambda: (stores[0].root / "step-1" / ".metadata").read_bytes() == WEIGHTS, 20, "the metadata again")
        meet(*running)
        set_policy(running[1], Retention(keep_last=3, full_last=1), revision=3)
        wait_until_full(stores, [3])
    check_weights(stores, [1, 2])


def test_a_blank_node_gets_the_weights(tmp_path: Path) -> None:
    """A node with an empty disk gets the weights from a slimmed node, and nothing is missing."""
    stores = stored(tmp_path, [1])
    manifest = stores[0].catalog.manifest("step-1")
    assert slim(stores[0].root, "step-1", manifest.save_id)
    blank = LocalStore(tmp_path / "blank")
    blank.node_id()
    with running_agent(stores[0].root, *QUICK) as one, running_agent(blank.root, *QUICK) as other:
        meet(one, other)
        wait_for((blank.root / "step-1" / shard(1)).exists, 20, "the weights")
        wait_for(lambda: held(blank) == set(PAIR), 20, "all of them")
    check_weights([stores[0], blank], [1])
