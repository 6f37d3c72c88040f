"""RankState over real ranks: each gets its own back, also on a blank node; other worlds meet the stated rule."""

from tests.harness.cluster import call
from tests.multiprocess.conftest import ClusterOf
from tests.steps import rank_state


def test_each_rank_gets_its_own_back_and_another_world_the_rule(cluster_of: ClusterOf) -> None:
    """Draws and batches go on as they would have, after a node is lost; four ranks' state is refused by two, and by six."""
    cluster = cluster_of(2)
    saved = cluster.run(call(rank_state.save_own, batches=3), nodes=[0, 1], ranks=2)
    assert len({str(value) for value in saved}) == 4
    cluster.nodes[1].lose()
    restored = cluster.run(call(rank_state.restore_own), nodes=[0, 1], ranks=2)
    assert restored == saved
    for ranks in (1, 3):
        refused, keeps = call(rank_state.restore_own), call(rank_state.restore_own, on_other_world="keep")
        others = cluster.launch([refused, keeps], nodes=[0, 1], ranks=ranks)
        assert others.of(refused).agreed() == {"saved": [4], "now": 2 * ranks, "x": [1.0] * 4}
        first, *silent = others.warnings_of(keeps)
        assert any("stay as they are" in told for told in first)
        assert silent == [[]] * (2 * ranks - 1)
