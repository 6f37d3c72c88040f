"""RankState over real ranks: each gets its own back, also on a blank node; other worlds meet the stated rule."""

from tests.harness.cluster import call
from tests.multiprocess.conftest import ClusterOf


def test_each_rank_gets_its_own_back_and_another_world_the_rule(cluster_of: ClusterOf) -> None:
    """Draws and batches go on as they would have, after a node is lost; four ranks' state is refused by two, and by six."""
    cluster = cluster_of(2)
    saved = cluster.launch([call("rank_state.save_own", batches=3)], nodes=[0, 1], ranks=2)
    assert len({str(value) for value in saved.of(0)}) == 4
    cluster.nodes[1].lose()
    restored = cluster.launch([call("rank_state.restore_own")], nodes=[0, 1], ranks=2)
    assert restored.of(0) == saved.of(0)
    for ranks in (1, 3):
        calls = [call("rank_state.restore_own"), call("rank_state.restore_own", on_other_world="keep")]
        others = cluster.launch(calls, nodes=[0, 1], ranks=ranks)
        assert others.agreed(0) == {"saved": [4], "now": 2 * ranks, "x": [1.0] * 4}
        assert [len([told for told in by[1] if "stay as they are" in told]) for by in others.warnings] == [1] + [0] * (
            2 * ranks - 1
        )
        assert [told for by in others.warnings for told in by[1] if "stay as they are" not in told] == []
