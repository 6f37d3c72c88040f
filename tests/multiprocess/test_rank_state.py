"""RankState on real ranks: each rank restores its own state, also on a blank node. Other world sizes are refused."""

from tests.harness.cluster import call
from tests.multiprocess.conftest import ClusterOf
from tests.steps import rank_state


def test_rank_state_returns_to_its_rank_and_other_world_sizes_are_refused(cluster_of: ClusterOf) -> None:
    """After a node loss, random draws and batches continue as they would have without it.

    Two and six ranks refuse the state of four. With `on_other_world="keep"` rank 0 warns and every state stays as it
    is.
    """
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
        assert any("stay as they are" in text for text in first)
        assert silent == [[]] * (2 * ranks - 1)
