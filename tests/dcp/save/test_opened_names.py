"""What the nodes of a save say has its name counts where the user gave that up, and nowhere else."""

from typing import Any

import pytest

from replicated_ckpt.core.lineage import Named
from replicated_ckpt.dcp.agreement.nodes import AgentCluster
from replicated_ckpt.stores.local.directories.intent import Intent
from replicated_ckpt.stores.peer.client import AgentAddress, AgentClient

OTHER = Named("f" * 32, "b" * 16)


@pytest.mark.parametrize("overwrite", [True, False])
def test_a_save_that_may_not_overwrite_takes_no_place(monkeypatch: pytest.MonkeyPatch, *, overwrite: bool) -> None:
    """A node that lies, or on which another run has just published, names a save: it does not give way unasked."""
    named = {"save_id": OTHER.save_id, "lineage": OTHER.lineage, "replaces": []}

    def answer(*_: object) -> dict[str, Any]:
        return {"histories": {}, "replaces": False, "named": named}

    monkeypatch.setattr(AgentClient, "put", answer)
    cluster = AgentCluster([AgentAddress("a" * 12, "127.0.0.1", 9, "t")], "a" * 12)
    opened = cluster.begin(Intent("1" * 32, "last", "s", overwrite=overwrite))
    assert opened.named == ((OTHER,) if overwrite else ())
