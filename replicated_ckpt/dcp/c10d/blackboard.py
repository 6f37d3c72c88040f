"""The blackboard: a place in the c10d store where ranks post values, and their coordinator posts its decision.

The blackboard adds no collective: DCP's own collectives order the messages. In a save every rank posts before it sends its
local plan, and the coordinator decides before it sends the global one, so both exist when they are read. In a load the
ranks wait for each other until a deadline. Every post has a nonce, which the decision repeats, so no rank acts on the
decision of an earlier call.
"""

import contextlib
import hashlib
import json
import logging
import math
import uuid
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from replicated_ckpt.dcp.c10d.once_per_node import read_once_per_node
from replicated_ckpt.dcp.c10d.picklable_error import pack_error, unpack_error
from replicated_ckpt.dcp.c10d.waiting import (
    LINGER_S,
    LOG_AFTER_S,
    POLL_S,
    AnsweringStore,
    Wait,
    describe_ended,
    describe_stopped,
    reaching_store,
)
from replicated_ckpt.errors import PeerProtocolError, RendezvousFailed, ReplicatedCkptError
from replicated_ckpt.stores.peer.answer import check_rank
from replicated_ckpt.version import RELEASE
from replicated_ckpt.wording import list_some

log = logging.getLogger(__name__)

_KNOWS, _AS = "knows", "as"
STAYS = "stays"
"""The entry of a complete decision with the names of the fields that ranks cache."""
_LOST = "Save again: the coordinator then sends every rank the whole decision."


class CachedDecisions:
    """The fields of decisions that a rank caches for one process group: by topic, with the digest of their message.

    A shortened message refers to a complete one by that digest. One call at a time.
    """

    def __init__(self) -> None:
        self._kept: dict[str, tuple[str, Mapping[str, Any]]] = {}

    def describe_known(self, topic: str) -> Mapping[str, str]:
        """The entry of a rank's post that names the message in its cache."""
        return {_KNOWS: self._kept[topic][0]} if topic in self._kept else {}

    def shorten(
        self, topic: str, fields: Mapping[str, Any], stays: Collection[str], posts: Sequence[Mapping[str, Any] | None]
    ) -> Mapping[str, Any] | None:
        """Coordinator: the decision without the fields in `stays`. None: one of them has changed, or a rank lacks them."""
        digest, before = self._kept.get(topic, ("", {}))
        if before != {name: fields[name] for name in stays} or not before:
            return None
        # A rank that has just joined, or has missed a decision, has other fields or none: all get the whole decision.
        if not all(post is not None and post.get(_KNOWS) == digest for post in posts):
            return None
        return {**{name: value for name, value in fields.items() if name not in stays}, _AS: digest}

    def keep(self, topic: str, raw: bytes, fields: Mapping[str, Any], stays: Collection[str]) -> None:
        """Caches the fields that `stays` names, from the message `raw`."""
        self._kept[topic] = hashlib.sha256(raw).hexdigest()[:32], {name: fields[name] for name in stays}

    def complete(self, topic: str, raw: bytes, fields: dict[str, Any]) -> dict[str, Any]:
        """A rank: the complete decision, from the fields of the message `raw` and the cache.

        Raises:
            PeerProtocolError: `raw` refers to a message that is not in the cache, or lists fields that it does not have.
        """
        stays, digest = fields.pop(STAYS, None), fields.pop(_AS, None)
        if stays is not None:
            if not isinstance(stays, list) or not all(isinstance(name, str) and name in fields for name in stays):
                raise PeerProtocolError(f"The decision about this {topic} names unknown fields: {stays!r:.200}.")
            self.keep(topic, raw, fields, stays)
        if digest is not None:
            known, before = self._kept.get(topic, ("", {}))
            # With fields of another decision, this rank would send its copies to other nodes than the ranks expect.
            if digest != known:
                earlier = f"an earlier one, {digest!r:.80}, which this rank does not have"
                raise PeerProtocolError(f"The decision about this {topic} refers to {earlier}.", _LOST)
            fields = {**before, **fields}
        return fields


COORDINATOR = 0
_LEFT = "left"
_WAITING, _LOGGED = "waiting", "waiting/said"
_NAMED_MAX = 16
_POLL_MAX_S = 0.1
_POLL_PER_RANK_S = 0.001
"""All ranks together ask the store about a thousand times a second, however many they are."""
PACKED_FROM_BYTES = 4096
"""A message of this size or more is compressed. A decision that is still so large is read once per node."""
_LATE_COORDINATOR = "Read the log of rank 0, and check whether its process is stopped; then save or load again."
_LATE_RANK = (
    "This rank was too slow, and the others continued without it. Find out what delays it, then save or load again."
)
_REPLACED = (
    "Another program writes to this job's c10d store, and may have restored a post of an earlier run. Give "
    "each job its own store, which only its ranks reach."
)
_FOREIGN = "Another program writes to this job's c10d store, or its ranks run different versions of replicated_ckpt."


class Blackboard:
    """Posts of every rank and decisions of the coordinator. Each call overwrites the one before: the store does not grow.

    `topic` keeps saves and loads apart. One call at a time on one process group, as DCP itself demands.
    """

    def __init__(
        self,
        store: "dist.Store | AnsweringStore",
        rank: int,
        size: int,
        find_lost: Callable[[], Sequence[int]] = tuple,
        kept: CachedDecisions | None = None,
        find_stopped: Callable[[], Mapping[int, int]] = dict,
    ) -> None:
        """`find_lost`: returns the ranks whose processes are known to have ended.

        `kept`: what this rank has cached of earlier decisions on this process group. `find_stopped`: returns the ranks of
        this host whose processes are stopped.
        """
        self._kept = kept or CachedDecisions()
        self.find_lost, self.find_stopped = find_lost, find_stopped
        self._store: Any = store  # torch's stub lacks some methods, and allows no bytes as values
        self._rank = rank
        self._size = size
        self._posted: dict[str, bytes] = {}
        self._node: Path | None = None
        self._pause_max_s = max(POLL_S, min(_POLL_PER_RANK_S * size, _POLL_MAX_S))

    def share_in(self, directory: Path | None) -> None:
        """Ranks of this node share large decisions through this directory of their agent. None: each rank reads alone."""
        self._node = directory

    def post(self, topic: str, fields: Mapping[str, Any]) -> str:
        """Writes this rank's post, which is visible to all when this returns. Returns its nonce.

        An "error" in a post is the reason why this rank does not continue.
        """
        nonce = uuid.uuid4().hex
        self.repost(topic, fields, nonce)
        return nonce

    def repost(self, topic: str, fields: Mapping[str, Any], nonce: str) -> None:
        """Replaces this rank's post, under the same nonce. The coordinator may have read the earlier one already."""
        header = {**self._kept.describe_known(topic), "nonce": nonce, "release": RELEASE}
        key, raw = f"{topic}/{self._rank}", encode({**fields, **header})
        self._posted[topic] = raw
        self._write(key, raw)

    def withdraw(self, topic: str) -> None:
        """Deletes this rank's post: the rank has stopped waiting, and no later decision may answer it."""
        with reaching_store():
            self._store.delete_key(f"{topic}/{self._rank}")

    def read_post(self, topic: str, rank: int) -> dict[str, Any] | None:
        """A rank's last post; None if it has not posted yet. Does not wait for a post.

        Raises:
            RendezvousFailed: the c10d store does not answer.
        """
        return next((post for _, post in self._read_posts(topic, [rank], one_by_one=True)), None)

    def posts(self, topic: str, deadline_s: float, stale: Sequence[str | None] = ()) -> list[dict[str, Any]]:
        """Every rank's post, in rank order; `stale` as for `collect`.

        Raises:
            RankFailed: a rank that did not post has ended. RendezvousFailed: naming the ranks that did not post within
            `deadline_s`. ConfigInvalid, PeerProtocolError: a post fails its checks. Others: a rank posted that error.
        """
        return check_all_posted(*self.collect(topic, deadline_s, stale))

    def collect(
        self, topic: str, deadline_s: float, stale: Sequence[str | None] = ()
    ) -> tuple[list[dict[str, Any] | None], ReplicatedCkptError | None]:
        """Every rank's post in rank order, None for a missing one; and the error that explains the missing ones.

        A post with the rank's `stale` nonce is an earlier call's, and is ignored. A post that fails its checks becomes an
        error with the nonce that the post claims, which only serves to notify that rank. Once a rank is known to have
        failed, by its post or by the end of its process, the others are waited for at most LINGER_S.
        """
        with self.waiting(deadline_s) as wait:
            return self._collect(topic, wait, stale)

    def _collect(
        self, topic: str, wait: Wait, stale: Sequence[str | None]
    ) -> tuple[list[dict[str, Any] | None], ReplicatedCkptError | None]:
        found: dict[int, dict[str, Any]] = {}
        problem: ReplicatedCkptError | None = None
        while True:
            missing = [rank for rank in range(self._size) if rank not in found]
            is_look, is_over = wait.is_look_due(), wait.is_over
            # One by one costs a round trip per rank: only at looks, and at the end to name the ranks that are missing.
            present = self._read_posts(topic, missing, one_by_one=is_look or is_over)
            found |= {rank: post for rank, post in present if not stale or post["nonce"] != stale[rank]}
            absent = [rank for rank in missing if rank not in found]
            if is_look:
                # A dead rank will never post: the error names it as ended, not as late.
                lost = self.find_lost()
                problem = describe_ended(lost) if lost and problem is None else problem
                absent = [rank for rank in absent if rank not in lost]
                if problem is not None or any("error" in post for post in found.values()):
                    wait.end_within(LINGER_S)
                self.log_if_long(wait, f"this {topic}", absent)
            if not absent or is_over:
                if absent and problem is None:
                    problem = self._describe_late(topic, absent, wait.waited_s)
                return [found.get(rank) for rank in range(self._size)], problem
            wait.pause()

    def _describe_late(self, topic: str, absent: Sequence[int], waited_s: float) -> RendezvousFailed:
        stopped = {rank: pid for rank, pid in self.find_stopped().items() if rank in absent}
        why, hint = describe_stopped(stopped)
        what = f"After {waited_s:.0f} s ranks {absent} had not joined this {topic}."
        return (
            RendezvousFailed(f"{what} {why}", f"{hint} Then save or load again.") if stopped else RendezvousFailed(what)
        )

    def _read_posts(
        self, topic: str, ranks: Sequence[int], *, one_by_one: bool
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """The posts of these ranks, in two round trips, if all exist. Otherwise none or, with `one_by_one`, those there."""
        keys = [f"{topic}/{rank}" for rank in ranks]
        with reaching_store():
            if self._store.check(keys):
                for rank, raw in zip(ranks, self._read_all(keys), strict=True):
                    yield rank, self._open(topic, rank, raw)
            elif one_by_one:
                for rank, key in zip(ranks, keys, strict=True):
                    if self._store.check([key]):
                        yield rank, self._open(topic, rank, self._store.get(key))

    def _open(self, topic: str, rank: int, raw: bytes) -> dict[str, Any]:
        key = f"{topic}/{rank}"
        # A post of another release, or of another program, becomes that rank's error: raising here would strand the others.
        try:
            fields = _decode(key, raw)
            if not isinstance(fields.get("nonce"), str):
                raise PeerProtocolError(f"{key!r} on the c10d store is not a post of this package.", _FOREIGN)
            check_rank(fields.get("release"), rank, self._rank)
        except ReplicatedCkptError as exc:
            return {"nonce": _claimed_nonce(raw), "error": pack_error(exc)}
        return fields

    def decide(
        self,
        topic: str,
        posts: Sequence[Mapping[str, Any] | None],
        fields: Mapping[str, Any],
        stale: Sequence[str | None] = (),
        stays: Collection[str] = (),
    ) -> None:
        """Writes the coordinator's decision about these posts; it is visible to all when this returns.

        `stays`: fields that are likely to be the same in the next decision on this topic. Ranks cache them if they are
        large; later decisions omit them while they are unchanged and every rank has them.

        Each rank then gets a small note with the nonce of its post and the decision's digest. Polling stays cheap, and the
        decision, which may be large, is read once per rank, or once per node by ranks that `share_in` one directory. A
        rank whose post is missing gets a note with its `stale` nonce, which answers its next post.
        """
        raw = self._encode(topic, posts, fields, stays)
        # Before the notes: a rank that sees its note reads the decision at once.
        self._write(f"{topic}/decision", raw)
        digest, before = _digest(raw), stale or [None] * self._size
        notes: dict[str, str] = {}
        for rank, post in enumerate(posts):
            kind, nonce = ("absent", str(before[rank])) if post is None else ("decided", str(post["nonce"]))
            notes[f"{topic}/{kind}/{rank}"] = nonce + digest
        with reaching_store():
            if self._store.has_extended_api():
                self._store.multi_set(list(notes), list(notes.values()))
            else:
                for key, note in notes.items():
                    self._store.set(key, note)
            # A round trip on the same connection: the store has the notes before this returns.
            self._store.check(list(notes)[-1:])

    def _encode(
        self, topic: str, posts: Sequence[Mapping[str, Any] | None], fields: Mapping[str, Any], stays: Collection[str]
    ) -> bytes:
        short = self._kept.shorten(topic, fields, stays, posts)
        if short is not None:
            return encode(short)
        raw = encode(fields)
        if not stays or len(raw) < PACKED_FROM_BYTES:
            return raw
        raw = encode({**fields, STAYS: list(stays)})
        self._kept.keep(topic, raw, fields, stays)
        return raw

    def decision(self, topic: str, nonce: str, deadline_s: float, before: str | None = None) -> dict[str, Any]:
        """The decision that answers this rank's post, or the one that was made without this rank because it came late.

        `before`: the nonce of this rank's post in the call before.

        Raises:
            RankFailed: a rank's process has ended, and no decision comes. RendezvousFailed: none came within `deadline_s`.
            PeerProtocolError: the decision fails its checks, or this rank's post is gone.
        """
        with self.waiting(deadline_s) as wait:
            return self._await_decision(topic, nonce, wait, deadline_s, before)

    def _await_decision(
        self, topic: str, nonce: str, wait: Wait, deadline_s: float, before: str | None
    ) -> dict[str, Any]:
        check_own_at_s = 0.0
        while True:
            is_over, is_look = wait.is_over, wait.is_look_due()
            lost = self.find_lost() if is_look else ()  # before the answer: a coordinator may decide, then end
            if is_look:
                self.log_if_long(wait, f"this {topic}")
            found = self._find_answer(topic, "decided", nonce)
            if found is None and wait.is_long:
                # Only late: it costs one more round trip, and a coordinator leaves a rank out only after its own wait.
                found = self._find_answer(topic, "absent", str(before))
                _check_absent(found, topic, self._rank)
            if found is not None:
                return found
            # A restored store of an earlier run, or a foreign writer, may have replaced the post: no answer would come.
            if is_look and wait.waited_s >= check_own_at_s:
                self._check_own(topic)
                check_own_at_s = 2 * wait.waited_s  # rarely: each check reads a whole post, on every rank
            # If the coordinator has ended, no decision comes. If another rank has, the coordinator may still decide.
            if COORDINATOR in lost or (lost and wait.is_long):
                raise describe_ended(lost)
            if is_over:
                raise RendezvousFailed(
                    f"After {deadline_s:.0f} s the coordinator had not decided about this {topic}.", _LATE_COORDINATOR
                )
            wait.pause()

    def post_left(self, why: ReplicatedCkptError) -> None:
        """Posts that this rank has left a collective of the group. From then on the group's ranks are out of step."""
        self.post(_LEFT, {"error": pack_error(why)})
        # The post first: a rank that reads the mark then reads the post at once.
        with reaching_store():
            self._store.set(_LEFT, str(self._rank))

    def find_left(self) -> tuple[int, ReplicatedCkptError] | None:
        """The rank that last left a collective of the group, and why; None if no rank has left one."""
        with reaching_store():
            named = self._store.get(_LEFT) if self._store.check([_LEFT]) else b""
        # Other programs in the job's network can write to the store: an invalid value names no rank.
        if not named.isdigit() or not 0 <= int(named) < self._size:
            return None
        post = self.read_post(_LEFT, int(named)) or {}
        return (int(named), unpack_error(post["error"])) if "error" in post else None

    def has_left(self, rank: int) -> bool:
        """Whether this rank has posted that it left a collective of the group. If so, its end is not the cause."""
        return self.read_post(_LEFT, rank) is not None

    def await_all(self, name: str, deadline_s: float, what: str) -> Sequence[int]:
        """Waits until every rank has called this with this name, at most `deadline_s`. Returns the ranks that have ended.

        Call it before a collective, in which only the neighbours of an ended rank would notice its end. After the deadline
        it returns (), since the collective has a time-out of its own. No other call may use the name. `what`: as of
        `log_if_long`.
        """
        with reaching_store():
            here = self._store.add(name, 1)
        with self.waiting(deadline_s) as wait:
            while here < self._size and not wait.is_over:
                if wait.is_look_due():
                    if lost := self.find_lost():
                        return lost
                    self.log_if_long(wait, what)
                wait.pause()
                with reaching_store():
                    here = self._store.add(name, 0)
        return ()

    @contextlib.contextmanager
    def waiting(self, deadline_s: float = math.inf) -> Iterator[Wait]:
        """A wait for other ranks. Its end removes the marks that `log_if_long` has left on the store."""
        wait = Wait(deadline_s, self._pause_max_s)
        try:
            yield wait
        finally:
            if wait.is_noted:
                self.forget(f"{_WAITING}/{self._rank}")
            if wait.is_logged:
                self.forget(_LOGGED)

    def log_if_long(self, wait: Wait, what: str, absent: Sequence[int] = ()) -> None:
        """Marks this rank as waiting. Once the wait is long, one of the waiting ranks logs the ranks without a mark.

        Call it at each look of a wait. `what`: the awaited event, for the log. `absent`: the missing ranks, if the caller
        has found them itself.

        Raises:
            RendezvousFailed: the c10d store does not answer.
        """
        with reaching_store():
            if not wait.is_noted:
                self._store.set(f"{_WAITING}/{self._rank}", "")
                wait.is_noted = True
            if wait.is_logged or wait.waited_s < LOG_AFTER_S:
                return
            # add() is atomic: of all ranks that wait only one logs.
            wait.is_logged = True
            if self._store.add(_LOGGED, 1) > 1:
                return
            others = (rank for rank in range(self._size) if rank != self._rank)
            ranks = absent or [rank for rank in others if not self._store.check([f"{_WAITING}/{rank}"])]
        named = list_some([str(rank) for rank in ranks], _NAMED_MAX)
        whom = (
            f"for ranks {named}, which are busy or have not made this call" if ranks else "and so has every other rank"
        )
        log.warning("rank %d has waited %.0f s in %s %s", self._rank, wait.waited_s, what, whom)

    def forget(self, name: str) -> None:
        """Deletes a key, so that finished waits leave nothing on the store."""
        with contextlib.suppress(dist.DistError):  # the store is gone, and the key with it
            self._store.delete_key(name)

    def _check_own(self, topic: str) -> None:
        """Raises PeerProtocolError: this rank's post is missing or was changed, so no decision will answer it."""
        key = f"{topic}/{self._rank}"
        with reaching_store():
            is_own = self._store.check([key]) and self._store.get(key) == self._posted.get(topic)
        if not is_own:
            raise PeerProtocolError(
                f"The value that this rank posted as {key!r} on the c10d store was replaced.", _REPLACED
            )

    def _find_answer(self, topic: str, kind: str, nonce: str) -> dict[str, Any] | None:
        """The decision to which this rank's note of this kind refers. None without a note for the post with this nonce."""
        key = f"{topic}/{kind}/{self._rank}"
        with reaching_store():
            note = self._store.get(key) if self._store.check([key]) else b""
            # Another nonce answers an earlier call, or an earlier run of the job on the same store.
            if not note.startswith(nonce.encode()):
                return None
            sha256, size = _parse_digest(note[len(nonce) :])
            node = self._node if size >= PACKED_FROM_BYTES else None
            raw = read_once_per_node(node, sha256, lambda: bytes(self._store.get(f"{topic}/decision")))
        # The coordinator has replaced the decision since. Acting on the new one would put this rank out of step.
        if note != (nonce + _digest(raw)).encode():
            raise RendezvousFailed(f"This rank was too late to read the decision about this {topic}.", _LATE_RANK)
        return self._kept.complete(topic, raw, _decode(f"{topic}/decision", raw))

    def _write(self, key: str, raw: bytes) -> None:
        with reaching_store():
            self._store.set(key, raw)
            self._store.check([key])  # a round trip on the same connection: the store has the value before this returns

    def _read_all(self, keys: Sequence[str]) -> Sequence[bytes]:
        # FileStore has no multi_get.
        if self._store.has_extended_api():
            values: list[bytes] = self._store.multi_get(list(keys))
            return values
        return [self._store.get(key) for key in keys]


def _check_absent(decision: Mapping[str, Any] | None, topic: str, rank: int) -> None:
    """Raises PeerProtocolError: a decision without this rank is not an error, so this rank must not act on it.

    A coordinator leaves a rank out only if its decision is an error. A rank without an earlier post cannot check that the
    note is of this run of the job. An old note can therefore fail the rank's call, but has no other effect.
    """
    if decision is not None and "error" not in decision:
        raise PeerProtocolError(
            f"The value of '{topic}/absent/{rank}' on the c10d store is not the description of an error."
        )


def check_all_posted(
    posts: Sequence[Mapping[str, Any] | None], problem: ReplicatedCkptError | None
) -> list[dict[str, Any]]:
    """The posts of all ranks. Raises the error of the first rank that posted one, or the reason of a missing post."""
    here = [dict(post) for post in posts if post is not None]
    # A posted error is the cause; missing ranks are often its consequence.
    for post in here:
        if "error" in post:
            raise unpack_error(post["error"])
    if problem is not None:
        raise problem
    return here


def _digest(decision: bytes) -> str:
    return f"{hashlib.sha256(decision).hexdigest()}{len(decision):016x}"


def _parse_digest(note: bytes) -> tuple[str, int]:
    """SHA-256 and size of the decision that a note refers to; "" and 0, which match no decision, if it is malformed."""
    try:
        return note[:64].decode("ascii"), int(note[64:80], 16)
    except ValueError:
        return "", 0


def encode(fields: Mapping[Any, Any]) -> bytes:
    """JSON, compressed if it is large, because the coordinator sends it once for each rank."""
    raw = json.dumps(fields).encode()
    return raw if len(raw) < PACKED_FROM_BYTES else zlib.compress(raw, 1)


def _claimed_nonce(raw: bytes) -> str:
    """The nonce in a post that failed its checks. A compressed post is not unpacked for it."""
    try:
        # The post is untrusted: no decompression, and a bounded parse.
        return str(json.loads(raw[:PACKED_FROM_BYTES])["nonce"])
    except (ValueError, RecursionError, LookupError, TypeError):
        return ""


def _decode(key: str, raw: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(raw if raw[:1] == b"{" else zlib.decompress(raw))
    except (ValueError, RecursionError, zlib.error) as exc:  # RecursionError: nested too deep, by a foreign writer
        raise PeerProtocolError(f"{key!r} on the c10d store is not JSON: {type(exc).__name__}.", _FOREIGN) from exc
    if not isinstance(fields, dict):
        raise PeerProtocolError(f"{key!r} on the c10d store is not a JSON object.", _FOREIGN)
    return fields
