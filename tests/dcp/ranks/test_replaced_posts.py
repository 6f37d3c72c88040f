"""What something else writes to the c10d store, or puts back there, ends a call by name and answers no rank."""

from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from replicated_ckpt.dcp.c10d import waiting
from replicated_ckpt.dcp.c10d.blackboard import Blackboard, check_all_posted
from replicated_ckpt.dcp.c10d.picklable_error import pack_error, unpack_error
from replicated_ckpt.errors import ConfigInvalid, PeerProtocolError, RendezvousFailed
from tests.stopwatch import Stopwatch

LARGE = {"what": "x" * 10_000}


class Job:
    """Three ranks on one store."""

    def __init__(self) -> None:
        self.store: Any = dist.HashStore()
        self.boards = [Blackboard(self.store, rank, 3) for rank in range(3)]

    def call(self, topic: str = "load", fields: dict[str, Any] = LARGE) -> list[Any]:
        """What each rank gets of one call, or its error."""
        nonces = [board.post(topic, {"rank": rank}) for rank, board in enumerate(self.boards)]
        return self.answered(topic, nonces, fields)

    def answered(self, topic: str, nonces: list[str], fields: dict[str, Any] = LARGE) -> list[Any]:
        posts, problem = self.boards[0].collect(topic, 5.0)
        try:
            check_all_posted(posts, problem)
        except (ConfigInvalid, PeerProtocolError) as exc:
            self.boards[0].decide(topic, posts, {"error": pack_error(exc)})
            return [exc]
        self.boards[0].decide(topic, posts, fields)
        return [self.got(rank, topic, nonces[rank]) for rank in range(3)]

    def got(self, rank: int, topic: str, nonce: str) -> Any:
        try:
            decision = self.boards[rank].decision(topic, nonce, 5.0)
        except (ConfigInvalid, PeerProtocolError) as exc:
            return exc
        return unpack_error(decision["error"]) if "error" in decision else decision


def test_each_call_gets_its_own_decision() -> None:
    """Small or large, in saves and loads."""
    job = Job()
    for number in range(3):
        assert job.call(fields={**LARGE, "number": number}) == [{**LARGE, "number": number}] * 3
        assert job.call("save", {"number": number}) == [{"number": number}] * 3


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b"\x80\x04.", b'{"no": 1}', b"[" * 3000, b"x\x9c"])
def test_what_is_no_post_is_an_error_of_all_ranks(raw: bytes) -> None:
    """Bytes that are no post end a call soon, with a typed error on every rank."""
    job = Job()
    nonces = [board.post("load", {}) for board in job.boards]
    job.store.set("load/2", raw)
    (raised,) = job.answered("load", nonces)
    assert isinstance(raised, PeerProtocolError)
    assert str(job.got(1, "load", nonces[1])) == str(raised)


def replayed(job: Job, values: dict[str, bytes]) -> None:
    """What was on the store of an earlier run of the job is put back."""
    for key, value in values.items():
        job.store.set(key, value)


@pytest.mark.parametrize("outcome", [{"survey": "old"}, {"error": pack_error(RendezvousFailed("too late"))}])
def test_an_old_note_is_no_decision_of_this_run(outcome: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Put back, what an earlier run told a rank that came late makes the call fail, and no more."""
    monkeypatch.setattr(waiting, "LINGER_S", 0.1)
    earlier, keys = Job(), ("load/absent/1", "load/decision")
    for rank in (0, 2):
        earlier.boards[rank].post("load", {"rank": rank})
    posts, _ = earlier.boards[0].collect("load", 0.1)
    earlier.boards[0].decide("load", posts, outcome)
    job = Job()
    replayed(job, {key: earlier.store.get(key) for key in keys})
    nonce = job.boards[1].post("load", {"rank": 1})
    if "error" in outcome:
        assert job.boards[1].decision("load", nonce, 5.0) == outcome
    else:
        with pytest.raises(PeerProtocolError, match="load/absent/1"):
            job.boards[1].decision("load", nonce, 5.0)
    nonces = [job.boards[0].post("load", {"rank": 0}), nonce, job.boards[2].post("load", {"rank": 2})]
    assert job.answered("load", nonces, {"survey": "new"}) == [{"survey": "new"}] * 3


def test_an_old_decision_answers_no_post_of_this_run() -> None:
    """The notes of an earlier run are about its nonces, and each post draws one."""
    earlier, job = Job(), Job()
    earlier.call(fields={"survey": "old"})
    replayed(job, {key: earlier.store.get(key) for key in ("load/decided/1", "load/decision")})
    with pytest.raises(RendezvousFailed):
        job.boards[1].decision("load", job.boards[1].post("load", {"rank": 1}), 0.2)


def test_an_old_post_takes_part_in_no_decision_that_its_rank_acts_on(stopwatch: Stopwatch) -> None:
    """Put back, it is read in the place of the rank's own post; the rank sees that soon, and its call fails by name."""
    earlier, job = Job(), Job()
    earlier.call("save")
    nonces = [board.post("save", {"rank": rank}) for rank, board in enumerate(job.boards)]
    replayed(job, {"save/1": earlier.store.get("save/1")})
    job.boards[0].decide("save", job.boards[0].posts("save", 1.0), {"save_id": "new"})
    assert job.got(2, "save", nonces[2]) == {"save_id": "new"}
    began = stopwatch.now()
    with pytest.raises(PeerProtocolError, match="'save/1' on the c10d store was replaced"):
        job.boards[1].decision("save", nonces[1], 30.0)
    assert stopwatch.now() - began < 10


def test_a_post_that_was_taken_away_fails_its_rank_soon() -> None:
    """Before a decision and without one: who can write the store makes a call fail, and by no wait to its time-out."""
    job = Job()
    nonce = job.boards[1].post("load", {"rank": 1})
    job.store.delete_key("load/1")
    with pytest.raises(PeerProtocolError, match="'load/1' on the c10d store was replaced"):
        job.boards[1].decision("load", nonce, 30.0)


def test_a_rank_that_waits_long_reads_its_own_post_ever_more_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow coordinator is waited for; a large post is known again, and is looked at after twice the time each."""
    job = Job()
    monkeypatch.setattr(waiting, "LOOK_AFTER_S", 0.05)
    monkeypatch.setattr(waiting, "LOOK_EVERY_S", 0.01)
    nonce = job.boards[1].post("load", LARGE)
    check = mock.create_autospec(Blackboard._check_own, side_effect=Blackboard._check_own)
    monkeypatch.setattr(Blackboard, "_check_own", check)
    with pytest.raises(RendezvousFailed, match="the coordinator had not decided"):
        job.boards[1].decision("load", nonce, 1.0)
    assert 1 <= check.call_count <= 6
