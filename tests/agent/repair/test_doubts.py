"""What a node says is in doubt: no save that was given up while nodes were asked about it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from replicated_ckpt.agent.saves.leftover import Leftover
from replicated_ckpt.agent.saves.service import NodeService
from replicated_ckpt.agent.settling import settle as settling
from replicated_ckpt.agent.settling.settle import settle
from replicated_ckpt.core.protocol.settlement import Answer
from replicated_ckpt.errors import StoreUnavailable
from replicated_ckpt.stores.local.directories.intent import Intent
from replicated_ckpt.stores.local.store import LocalStore

SAVE, OTHER = "2" * 32, "0" * 11 + "a"


@pytest.mark.parametrize("was_known", [False, True], ids=["at once", "known before"])
@pytest.mark.parametrize("fails", [False, True], ids=["silent", "fails"])
def test_a_save_that_is_given_up_meanwhile_is_in_no_doubt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, was_known: bool, fails: bool
) -> None:
    """The next save of its name opens while a node of it is asked: `status` would name it until the agent's next start."""
    service = NodeService(LocalStore(tmp_path))
    intent = Intent(SAVE, "step-1", "s", overwrite=True, nodes=(service.node_id, OTHER), coordinator=OTHER)
    service.begin(intent)
    if was_known:
        settle(service, [Leftover(intent, "its processes are gone")], [])
        assert [doubt.intent.save_id for doubt in service.doubts.read_all()] == [SAVE]

    def ask(*_: Any) -> Mapping[str, Answer]:
        service.abort(SAVE, "a newer save overtook it")
        if fails:
            raise StoreUnavailable("node", "ask", SAVE, "on purpose")
        return {}

    monkeypatch.setattr(settling, "_answers", ask)
    settle(service, [Leftover(intent, "its processes are gone")], [])
    assert service.doubts.read_all() == ()
    assert not service.doubts.has(SAVE)
