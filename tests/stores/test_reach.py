"""The hint for an agent that does not answer names a command with the agent's own scheme."""

import pytest

from replicated_ckpt.stores.peer.client import AgentAddress
from replicated_ckpt.stores.peer.reach import reach_hint


@pytest.mark.parametrize(("fingerprint", "scheme"), [("", "http"), ("ab" * 32, "https")])
def test_the_hint_uses_the_agents_scheme(fingerprint: str, scheme: str) -> None:
    """An agent without a certificate (on one host, or with REPLICATED_CKPT_PLAIN) is named with http, others with
    https.
    """
    address = AgentAddress("ab12", "10.0.0.7", 29600, "", tls_sha256=fingerprint)
    assert f"`curl -k {scheme}://10.0.0.7:29600/v1/status` must return 401" in reach_hint(
        address, ConnectionRefusedError()
    )
