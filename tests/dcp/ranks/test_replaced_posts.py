"""Foreign or replayed values on the c10d store fail a call with a named error, and never answer a rank."""

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
        """What each rank gets from one call, or its error."""
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
    """Each call of a save or load gets its own decision, small or large."""
    job = Job()
    for number in range(3):
        assert job.call(fields={**LARGE, "number": number}) == [{**LARGE, "number": number}] * 3
        assert job.call("save", {"number": number}) == [{"number": number}] * 3


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b"\x80\x04.", b'{"no": 1}', b"[" * 3000, b"x\x9c"])
def test_bytes_that_are_no_post_fail_all_ranks(raw: bytes) -> None:
    """Bytes that are no post raise PeerProtocolError on every rank without waiting for the time-out."""
    job = Job()
    nonces = [board.post("load", {}) for board in job.boards]
    job.store.set("load/2", raw)
    (raised,) = job.answered("load", nonces)
    assert isinstance(raised, PeerProtocolError)
    assert str(job.got(1, "load", nonces[1])) == str(raised)


def replayed(job: Job, values: dict[str, bytes]) -> None:
    """Writes values of an earlier run into the job's store."""
    for key, value in values.items():
        job.store.set(key, value)


@pytest.mark.parametrize("outcome", [{"survey": "old"}, {"error": pack_error(RendezvousFailed("too late"))}])
def test_a_replayed_note_is_no_decision_of_this_run(outcome: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A replayed note for a late rank can make one call fail. It cannot supply a decision, and the next call succeeds."""
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


def test_a_replayed_decision_answers_no_post_of_this_run() -> None:
    """A replayed decision is ignored, as it refers to the nonces of the earlier run's posts."""
    earlier, job = Job(), Job()
    earlier.call(fields={"survey": "old"})
    replayed(job, {key: earlier.store.get(key) for key in ("load/decided/1", "load/decision")})
    with pytest.raises(RendezvousFailed):
        job.boards[1].decision("load", job.boards[1].post("load", {"rank": 1}), 0.2)


def test_a_replayed_post_fails_its_rank_soon(stopwatch: Stopwatch) -> None:
    """A replayed post replaces a rank's own: that rank raises PeerProtocolError soon, and does not act on the decision."""
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


def test_a_deleted_post_fails_its_rank_soon() -> None:
    """A rank whose post was deleted raises PeerProtocolError before its time-out."""
    job = Job()
    nonce = job.boards[1].post("load", {"rank": 1})
    job.store.delete_key("load/1")
    with pytest.raises(PeerProtocolError, match="'load/1' on the c10d store was replaced"):
        job.boards[1].decision("load", nonce, 30.0)


def test_a_waiting_rank_checks_its_own_post_at_growing_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiting rank checks its own post at intervals that double, and recognizes a large one."""
    job = Job()
    monkeypatch.setattr(waiting, "LOOK_AFTER_S", 0.05)
    monkeypatch.setattr(waiting, "LOOK_EVERY_S", 0.01)
    nonce = job.boards[1].post("load", LARGE)
    check = mock.create_autospec(Blackboard._check_own, side_effect=Blackboard._check_own)
    monkeypatch.setattr(Blackboard, "_check_own", check)
    with pytest.raises(RendezvousFailed, match="the coordinator had not decided"):
        job.boards[1].decision("load", nonce, 1.0)
    assert 1 <= check.call_count <= 6
