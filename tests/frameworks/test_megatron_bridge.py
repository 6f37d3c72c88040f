"""Megatron-Bridge's own save and load over our storage: after a node loss, a run ends as an undisturbed one."""

import importlib.metadata
from functools import partial
from pathlib import Path

import pytest
from packaging.version import Version

from tests.agent.agents import wait_for
from tests.frameworks.jobs import check_same, run_both

pytestmark = [pytest.mark.multiprocess, pytest.mark.long, pytest.mark.timeout(900)]


def test_megatron_bridge_resumes_after_a_node_loss(tmp_path: Path) -> None:
    """Weights, optimizer, schedule, step, counts and generators are restored. Every node keeps two checkpoints."""
    if not has_custom_manager():
        pytest.skip("megatron-bridge 0.6 is not installed")
    with run_both("megatron_bridge_program.py", tmp_path, 7) as (undisturbed, disturbed):
        check_same(undisturbed, disturbed, ("step",), {"step": 7})
        for node in (0, 1):  # agents, which outlive the ranks, remove the others
            store = undisturbed.root(node) / "replicated"
            wait_for(partial(keeps, store, {"iter_0000010", "iter_0000012"}), 45, f"two are kept in {store}")
        for node in (0, 1):  # a checkpoint that a load read from another node stays for five minutes
            store = disturbed.root(node) / "replicated"
            wait_for(partial(keeps_at_most, store), 45, f"older checkpoints are removed from {store}")
        assert (
            disturbed.root(1) / "latest_train_state.pt"
        ).exists()  # restored on the blank node; Bridge writes it only on the first node
        assert not (undisturbed.root(1) / "latest_train_state.pt").exists()


def keeps(store: Path, names: set[str]) -> bool:
    return names_in(store) == names


def keeps_at_most(store: Path) -> bool:
    return names_in(store) <= {"iter_0000006", "iter_0000010", "iter_0000012"}


def names_in(store: Path) -> set[str]:
    return {path.name for path in store.glob("iter_*")}


def has_custom_manager() -> bool:
    """0.4 added `custom_manager_class`, 0.5 the functions that the manager replaces."""
    try:
        return Version(importlib.metadata.version("megatron-bridge")) >= Version("0.6")
    except importlib.metadata.PackageNotFoundError:
        return False
