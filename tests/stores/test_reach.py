"""What is said of an agent that does not answer can be done: the question names the scheme that it speaks."""

import pytest

from replicated_ckpt.stores.peer.client import AgentAddress
from replicated_ckpt.stores.peer.reach import reach_hint


@pytest.mark.parametrize(("fingerprint", "scheme"), [("", "http"), ("ab" * 32, "https")])
def test_an_agent_is_asked_in_the_way_that_it_speaks(fingerprint: str, scheme: str) -> None:
    """On one host, or with REPLICATED_CKPT_PLAIN, it has no certificate: https fails there although it runs."""
    address = AgentAddress("ab12", "10.0.0.7", 29600, "", tls_sha256=fingerprint)
    assert f"`curl -k {scheme}://10.0.0.7:29600/v1/status` must return 401" in reach_hint(
        address, ConnectionRefusedError()
    )
