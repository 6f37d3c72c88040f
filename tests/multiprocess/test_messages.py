"""What a save says to the agents when nothing disturbs it: each message more is paid by every save of every node."""

from collections import Counter

from tests.multiprocess.cluster import call
from tests.multiprocess.conftest import ClusterOf


def test_an_undisturbed_save_says_no_more_than_it_has_to(cluster_of: ClusterOf) -> None:
    """Three nodes, one rank each: open, the copies, the decision, commit; as many as before there were saves in doubt."""
    cluster = cluster_of(3)
    calls = [
        call("saving.count_messages", kinds=["plain"], checkpoint_id="last", times=3),
        call("state.load", kinds=["plain"], checkpoint_id="last"),
    ]
    results = cluster.launch(calls, nodes=[0, 1, 2])
    counted = sum((Counter(found) for found in results.of(0)), Counter[str]())
    assert counted == {
        "GET /v1/status?brief=1": 6,
        "POST /v1/saves/SAVE": 3,
        "PUT /v1/saves/SAVE/__0_0.distcp": 1,
        "PUT /v1/saves/SAVE/__1_0.distcp": 1,
        "PUT /v1/saves/SAVE/__2_0.distcp": 1,
        "PUT /v1/saves/SAVE/.metadata": 2,
        "PUT /v1/saves/SAVE/.manifest.json": 2,
        "POST /v1/saves/SAVE/commit": 3,
    }
    assert results.digests(1)[0] == results.digests(1)[1] == results.digests(1)[2]
