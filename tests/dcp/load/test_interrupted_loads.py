"""A rank is interrupted while the ranks of a load exchange posts: what that rank posts to the others."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from replicated_ckpt.dcp.c10d.picklable_error import pack_error
from replicated_ckpt.dcp.find.rendezvous import AgreedError, _agree
from replicated_ckpt.errors import RankFailed


class Board:
    """A blackboard on which this rank's wait is interrupted once."""

    def __init__(self) -> None:
        self.posted: Mapping[str, Any] = {}
        self._waits = 0

    def post(self, topic: str, fields: Mapping[str, Any]) -> str:
        self.repost(topic, fields, "nonce")
        return "nonce"

    def repost(self, topic: str, fields: Mapping[str, Any], nonce: str) -> None:
        del topic, nonce
        self.posted = fields

    def decision(self, *_: object) -> dict[str, Any]:
        self._waits += 1
        if self._waits == 1:
            raise KeyboardInterrupt
        return {"error": pack_error(RankFailed("Rank 1 failed.")), "in_step": self.posted.get("in_step")}


@pytest.mark.parametrize("in_step", [True, False])
def test_an_interrupted_rank_posts_where_it_waits(in_step: bool) -> None:
    """The interrupted rank posts its error and whether DCP's first step is under way. Inside that step it goes on to
    DCP's collective, which the others wait in.
    """
    board, world = Board(), SimpleNamespace(is_coordinator=False, group_name="an interrupted load", rank=1)
    with pytest.raises(AgreedError) as raised:
        _agree(world, board, {"checkpoint_id": "step-1", "in_step": in_step}, None, lambda _: None)  # type: ignore[arg-type, return-value]
    assert isinstance(raised.value.error, KeyboardInterrupt)
    assert "error" in board.posted
    assert (board.posted["in_step"], raised.value.in_step) == (in_step, in_step)
