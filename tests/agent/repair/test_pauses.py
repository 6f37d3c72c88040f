"""Pauses of re-protection: short ones after what woke it, long ones at rest."""

import pytest

from replicated_ckpt.agent.repair.pauses import IDLE_PAUSE_S, Pauses


def after(pauses: Pauses, rounds: int, nodes: int = 2) -> list[float]:
    return [pauses.after(nodes, is_active=True) for _ in range(rounds)]


def test_a_round_that_came_too_early_is_followed_by_another_soon() -> None:
    """A node that has published its part of a save looks for its peer's: at once, then less and less often."""
    pauses = Pauses(IDLE_PAUSE_S)
    assert after(pauses, 2) == [2.0, 2.0]
    pauses.begin(2)
    assert after(pauses, 7) == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    pauses.begin(2)
    assert after(pauses, 1) == [0.1]


@pytest.mark.parametrize(("nodes", "first_s"), [(50, 0.1), (500, 1.0), (5000, 2.0)])
def test_many_nodes_ask_each_other_less_often(nodes: int, first_s: float) -> None:
    """However many there are, an agent answers about as many questions a second."""
    pauses = Pauses(IDLE_PAUSE_S)
    pauses.begin(nodes)
    assert after(pauses, 1, nodes) == [first_s]
    assert pauses.after(nodes, is_active=False) == max(IDLE_PAUSE_S, 0.05 * nodes)


def test_no_pause_is_longer_than_the_one_at_rest() -> None:
    """With `--round-every-s 1` nothing waits for longer than that."""
    assert after(Pauses(1.0), 1) == [1.0]
    assert Pauses(1.0).after(2, is_active=False) == 1.0
