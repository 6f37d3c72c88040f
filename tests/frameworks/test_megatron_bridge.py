"""Megatron-Bridge's own save and load over our storage: after the loss of a node the bits are the undisturbed run's."""

import importlib.metadata
from functools import partial
from pathlib import Path

import pytest
from packaging.version import Version

from tests.agent.agents import wait_for
from tests.frameworks.jobs import check_same, run_both

pytestmark = [pytest.mark.multiprocess, pytest.mark.long, pytest.mark.timeout(900)]


def test_megatron_bridge_goes_on_from_a_lost_node(tmp_path: Path) -> None:
    """Weights, optimizer, schedule, step, counts and generators come back; two checkpoints are kept everywhere."""
    if not has_seam():
        pytest.skip("megatron-bridge 0.6 is not installed")
    with run_both("megatron_bridge_program.py", tmp_path, 7) as (undisturbed, disturbed):
        check_same(undisturbed, disturbed, ("step",), {"step": 7})
        for node in (0, 1):  # agents, which outlive the ranks, remove the others
            store = undisturbed.root(node) / "replicated"
            wait_for(partial(keeps, store, {"iter_0000010", "iter_0000012"}), 45, f"two are kept in {store}")
        for node in (0, 1):  # what was loaded from another node is kept for its readers for five minutes
            store = disturbed.root(node) / "replicated"
            wait_for(partial(keeps_at_most, store), 45, f"older ones are gone from {store}")
        assert (
            disturbed.root(1) / "latest_train_state.pt"
        ).exists()  # on the blank node; Bridge writes it on the first
        assert not (undisturbed.root(1) / "latest_train_state.pt").exists()


def keeps(store: Path, names: set[str]) -> bool:
    return names_in(store) == names


def keeps_at_most(store: Path) -> bool:
    return names_in(store) <= {"iter_0000006", "iter_0000010", "iter_0000012"}


def names_in(store: Path) -> set[str]:
    return {path.name for path in store.glob("iter_*")}


def has_seam() -> bool:
    """`custom_manager_class` came with 0.4, the functions that the manager stands in for with 0.5."""
    try:
        return Version(importlib.metadata.version("megatron-bridge")) >= Version("0.6")
    except importlib.metadata.PackageNotFoundError:
        return False
