"""With a job secret, what lies on the c10d store is believed only from processes of the job."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from replicated_ckpt.dcp.c10d import waiting
from replicated_ckpt.dcp.c10d.blackboard import Blackboard, all_present
from replicated_ckpt.dcp.c10d.job_secret import Seal
from replicated_ckpt.dcp.c10d.posted_error import pack_error, unpack_error
from replicated_ckpt.environment import JOB_SECRET_ENV, JOB_SECRET_FILE_ENV
from replicated_ckpt.errors import ConfigInvalid, JobSecretMismatch, MeetingFailed, PeerProtocolError
from tests.stopwatch import Stopwatch

SECRET, OTHER = b"s" * 32, b"o" * 32
LARGE = {"what": "x" * 10_000}


class Job:
    """Three ranks on one store, each with a secret or none."""

    def __init__(self, *secrets: bytes | None, scope: str = "world") -> None:
        self.store: Any = dist.HashStore()
        self.boards = [self.board(rank, secret, scope) for rank, secret in enumerate(secrets)]

    def board(self, rank: int, secret: bytes | None, scope: str = "world") -> Blackboard:
        return Blackboard(self.store, rank, 3, seal=Seal(secret, scope))

    def call(self, topic: str = "load", fields: dict[str, Any] = LARGE) -> list[Any]:
        """What each rank gets of one call, or its error."""
        nonces = [board.post(topic, {"rank": rank}) for rank, board in enumerate(self.boards)]
        return self.answered(topic, nonces, fields)

    def answered(self, topic: str, nonces: list[str], fields: dict[str, Any] = LARGE) -> list[Any]:
        posts, problem = self.boards[0].collect(topic, 5.0)
        try:
            all_present(posts, problem)
        except (JobSecretMismatch, ConfigInvalid, PeerProtocolError) as exc:
            self.boards[0].decide(topic, posts, {"error": pack_error(exc)})
            return [exc]
        self.boards[0].decide(topic, posts, fields)
        return [self.got(rank, topic, nonces[rank]) for rank in range(3)]

    def got(self, rank: int, topic: str, nonce: str) -> Any:
        try:
            decision = self.boards[rank].decision(topic, nonce, 5.0)
        except (JobSecretMismatch, ConfigInvalid, PeerProtocolError) as exc:
            return exc
        return unpack_error(decision["error"]) if "error" in decision else decision

    def everybodys_error(self, topic: str, nonces: list[str]) -> list[Any]:
        """After a refusal: what the coordinator raised, and what the other ranks are told."""
        (raised,) = self.answered(topic, nonces)
        return [raised, *(self.got(rank, topic, nonces[rank]) for rank in (1, 2))]


@pytest.mark.parametrize("secret", [None, SECRET])
def test_ranks_with_one_secret_agree(secret: bytes | None) -> None:
    """With the same secret, and with none, each call gets its own decision, small or large."""
    job = Job(secret, secret, secret)
    for number in range(3):
        assert job.call(fields={**LARGE, "number": number}) == [{**LARGE, "number": number}] * 3
        assert job.call("save", {"number": number}) == [{"number": number}] * 3


@pytest.mark.parametrize("odd", [None, OTHER])
@pytest.mark.parametrize("usual", [SECRET, None])
def test_a_rank_without_the_secret_is_not_believed(usual: bytes | None, odd: bytes | None) -> None:
    """Missing or another one: every rank raises an error that says so and what to do, none of them waits."""
    if usual == odd:
        return
    job = Job(usual, usual, odd)
    nonces = [board.post("load", {}) for board in job.boards]
    errors = job.everybodys_error("load", nonces)
    assert [type(error) for error in errors] == [JobSecretMismatch] * 3
    assert JOB_SECRET_ENV in errors[0].hint
    assert "'load/2'" in str(errors[0])
    assert str(errors[1]) == str(errors[0])
    assert "'load/decided/2'" in str(errors[2])


def no_mark(raw: bytes) -> bytes:
    return raw.partition(b"{")[2].join((b"{", b""))


def changed(raw: bytes) -> bytes:
    return raw.replace(b'"rank": 2', b'"rank": 7')


FORGERIES: dict[str, Callable[[Job], tuple[str, bytes]]] = {
    "no mark": lambda job: ("load/2", no_mark(job.store.get("load/2"))),
    "changed": lambda job: ("load/2", changed(job.store.get("load/2"))),
    "another rank's": lambda job: ("load/2", job.store.get("load/1")),
    "another group's": lambda job: ("load/2", posted(job.board(2, SECRET, "other"), job.store, "load")),
    "another topic's": lambda job: ("load/2", posted(job.board(2, SECRET), job.store, "save")),
    "another job's": lambda job: ("load/2", posted(job.board(2, OTHER), job.store, "load")),
}


def posted(board: Blackboard, store: Any, topic: str) -> bytes:
    board.post(topic, {})
    raw: bytes = store.get(f"{topic}/2")
    return raw


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_post_fails_the_call_on_every_rank(forgery: str) -> None:
    """What was written by another process, or moved from elsewhere on the store, is refused, and all ranks learn of it."""
    job = Job(SECRET, SECRET, SECRET)
    nonces = [board.post("load", {"rank": rank}) for rank, board in enumerate(job.boards)]
    key, raw = FORGERIES[forgery](job)
    job.store.set(key, raw)
    (raised,) = job.answered("load", nonces)
    told = job.got(1, "load", nonces[1])
    assert [type(raised), type(told)] == [JobSecretMismatch] * 2
    assert "'load/2'" in str(told)


@pytest.mark.parametrize("what", ["decision", "note", "older decision"])
def test_a_forged_decision_is_not_acted_on(what: str) -> None:
    """Neither one that was written by another process, nor an earlier one of the job itself under a new note."""
    job = Job(SECRET, SECRET, SECRET)
    job.call(fields={"call": 1})
    older = job.store.get("load/decision")
    nonces = [board.post("load", {}) for board in job.boards]
    assert job.answered("load", nonces, {"call": 2}) == [{"call": 2}] * 3
    forged = {"decision": b'{"call": 3}', "older decision": older}
    job.store.set("load/decided/1" if what == "note" else "load/decision", forged.get(what, nonces[1].encode()))
    found = job.got(1, "load", nonces[1])
    assert isinstance(found, JobSecretMismatch)


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b"\x80\x04.", b'{"no": 1}', b"[" * 3000, b"x\x9c"])
def test_what_is_no_post_is_an_error_of_all_ranks(raw: bytes) -> None:
    """Also without a secret: bytes that are no post end a call soon, with a typed error on every rank."""
    job = Job(None, None, None)
    nonces = [board.post("load", {}) for board in job.boards]
    job.store.set("load/2", raw)
    (raised,) = job.answered("load", nonces)
    assert isinstance(raised, PeerProtocolError)
    assert str(job.got(1, "load", nonces[1])) == str(raised)


def seal_of(monkeypatch: pytest.MonkeyPatch, secret: str | None, path: Path | None) -> Seal:
    for name, value in ((JOB_SECRET_ENV, secret), (JOB_SECRET_FILE_ENV, None if path is None else str(path))):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    return Seal.of_job("world")


def test_a_secret_comes_from_the_environment_or_a_private_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both give the same mark, a line's end is no part of it, and without either nothing is marked."""
    path = tmp_path / "secret"
    path.write_text("s" * 32 + "\n")
    path.chmod(0o600)
    marks = {seal_of(monkeypatch, "s" * 32, None).mark("k", b"x"), seal_of(monkeypatch, None, path).mark("k", b"x")}
    assert marks == {Seal(SECRET, "world").mark("k", b"x")}
    assert seal_of(monkeypatch, None, None).mark("k", b"x") == b""
    if os.geteuid() == 0:
        path.chmod(0o440)  # as Kubernetes mounts it, with a group of its own
        assert seal_of(monkeypatch, None, path).mark("k", b"x") in marks


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o620])
def test_a_secret_that_others_can_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int) -> None:
    """The error names file, mode and the next step; nothing is marked with it, and nothing believed."""
    path = tmp_path / "secret"
    path.write_text("s" * 32)
    path.chmod(mode)
    seal = seal_of(monkeypatch, None, path)
    assert seal.mark("k", b"x") == b""
    with pytest.raises(ConfigInvalid, match=f"{mode:04o}.*chmod 600"):
        seal.check("k", b"x", Seal(SECRET, "world").mark("k", b"x"))


@pytest.mark.parametrize("given", ["short", "   " * 10, "both", "missing"])
def test_a_secret_that_cannot_work_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    """Too short, given twice, or not there: an error, never a job without one."""
    path = tmp_path / "secret"
    secret = None if given == "missing" else "s" * 32 if given == "both" else given
    seal = seal_of(monkeypatch, secret, path if given in ("both", "missing") else None)
    with pytest.raises(ConfigInvalid, match=JOB_SECRET_ENV):
        seal.check("k", b"x", b"")


def test_a_coordinator_with_a_bad_secret_tells_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It raises what is wrong with it, and the others learn at once that its word cannot be believed."""
    job = Job(SECRET, SECRET, SECRET)
    job.boards[0] = Blackboard(job.store, 0, 3, seal=seal_of(monkeypatch, "short", None))
    nonces = [board.post("load", {}) for board in job.boards]
    raised, *others = job.everybodys_error("load", nonces)
    assert isinstance(raised, ConfigInvalid)
    assert [type(error) for error in others] == [JobSecretMismatch] * 2


def replayed(job: Job, values: dict[str, bytes]) -> None:
    """What was on the store of an earlier run of the job is put back."""
    for key, value in values.items():
        job.store.set(key, value)


@pytest.mark.parametrize("outcome", [{"survey": "old"}, {"error": pack_error(MeetingFailed("too late"))}])
def test_an_old_note_is_no_decision_of_this_run(outcome: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Put back, what an earlier run of the same secret told a rank that came late makes the call fail, and no more."""
    monkeypatch.setattr(waiting, "LINGER_S", 0.1)
    earlier, keys = Job(SECRET, SECRET, SECRET), ("load/absent/1", "load/decision")
    for rank in (0, 2):
        earlier.boards[rank].post("load", {"rank": rank})
    posts, _ = earlier.boards[0].collect("load", 0.1)
    earlier.boards[0].decide("load", posts, outcome)
    job = Job(SECRET, SECRET, SECRET)
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
    earlier, job = Job(SECRET, SECRET, SECRET), Job(SECRET, SECRET, SECRET)
    earlier.call(fields={"survey": "old"})
    replayed(job, {key: earlier.store.get(key) for key in ("load/decided/1", "load/decision")})
    with pytest.raises(MeetingFailed):
        job.boards[1].decision("load", job.boards[1].post("load", {"rank": 1}), 0.2)


def test_an_old_post_takes_part_in_no_decision_that_its_rank_acts_on(stopwatch: Stopwatch) -> None:
    """Put back, it is read in the place of the rank's own post; the rank sees that soon, and its call fails by name."""
    earlier, job = Job(SECRET, SECRET, SECRET), Job(SECRET, SECRET, SECRET)
    earlier.call("save")
    nonces = [board.post("save", {"rank": rank}) for rank, board in enumerate(job.boards)]
    replayed(job, {"save/1": earlier.store.get("save/1")})
    job.boards[0].decide("save", job.boards[0].posts("save", 1.0), {"save_id": "new"})
    assert job.got(2, "save", nonces[2]) == {"save_id": "new"}
    began = stopwatch.now()
    with pytest.raises(PeerProtocolError, match="'save/1' on the c10d store was replaced"):
        job.boards[1].decision("save", nonces[1], 30.0)
    assert stopwatch.now() - began < 10


@pytest.mark.parametrize("secret", [None, SECRET])
def test_a_post_that_was_taken_away_fails_its_rank_soon(secret: bytes | None) -> None:
    """Before a decision and without one: who can write the store makes a call fail, and by no wait to its time-out."""
    job = Job(secret, secret, secret)
    nonce = job.boards[1].post("load", {"rank": 1})
    job.store.delete_key("load/1")
    with pytest.raises(PeerProtocolError, match="'load/1' on the c10d store was replaced"):
        job.boards[1].decision("load", nonce, 30.0)


def test_a_rank_that_waits_long_reads_its_own_post_ever_more_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow coordinator is waited for; a large post is known again, and is looked at after twice the time each."""
    job = Job(SECRET, SECRET, SECRET)
    monkeypatch.setattr(waiting, "LOOK_AFTER_S", 0.05)
    monkeypatch.setattr(waiting, "LOOK_EVERY_S", 0.01)
    nonce = job.boards[1].post("load", LARGE)
    check = mock.create_autospec(Blackboard._check_own, side_effect=Blackboard._check_own)
    monkeypatch.setattr(Blackboard, "_check_own", check)
    with pytest.raises(MeetingFailed, match="the coordinator had not decided"):
        job.boards[1].decision("load", nonce, 1.0)
    assert 1 <= check.call_count <= 6


def test_the_secret_is_in_no_post() -> None:
    """Nor in what a seal shows of itself."""
    job = Job(SECRET, SECRET, SECRET)
    job.call()
    raw = b"".join(job.store.get(key) for key in ("load/0", "load/decision", "load/decided/1"))
    assert SECRET not in raw
    assert SECRET.hex().encode() not in raw
    assert json.loads(job.store.get("load/0").partition(b"{")[2].join((b"{", b"")))["rank"] == 0
    assert "sss" not in repr(Seal(SECRET))
