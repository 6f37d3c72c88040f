"""A save warns of a node whose advertised address is wrong."""

from replicated_ckpt.environment import HOST_ENV
from tests.harness.cluster import call
from tests.multiprocess.conftest import ClusterOf
from tests.steps import state

WRONG = "no-such-host.invalid"


def test_a_save_warns_of_a_wrong_address(cluster_of: ClusterOf) -> None:
    """The save succeeds. One warning names the address, the variable that set it, and the node on which to correct it."""
    cluster = cluster_of(2)
    cluster.nodes[1].environment[HOST_ENV] = WRONG
    results = cluster.launch([call(state.save, kinds=["plain"], checkpoint_id="step-1")], nodes=[0, 1])
    (warning,) = [text for text in results.all_warnings if "did not answer when the save began" in text]
    assert f"This host cannot resolve the name '{WRONG}'" in warning
    assert f"comes from {HOST_ENV} on " in warning
    assert f"set {HOST_ENV} to that address there" in warning
    assert f"{WRONG}:" in warning
    assert "/v1/status` must return 401" in warning
    assert len([text for text in results.all_warnings if HOST_ENV in text]) == 1
