"""The world of one save or load: which ranks take part, and the c10d store as their blackboard.

No collective of ours is added: DCP's own order the messages. On a save every rank writes its post before it hands in its
local plan, and the coordinator decides before it hands out the global one, so what is read is there. On a load the ranks
meet with a deadline. A nonce in every post, repeated in the decision, makes sure that nobody acts on an earlier call's.
With a job secret each post, and each note of a decision, carries a mark that only the job's processes can make.
"""

import hashlib
import json
import os
import time
import uuid
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from replicated_ckpt.dcp.job_secret import Seal, split
from replicated_ckpt.dcp.posted_error import pack_error, unpack_error
from replicated_ckpt.dcp.torch_private import calling, default_store
from replicated_ckpt.errors import MeetingFailed, PeerProtocolError, ReplicatedCkptError

_POLL_S = 0.005
_POLL_MAX_S = 0.1
_POLL_PER_RANK_S = 0.001
"""All ranks together ask the store some thousand times in a second, however many they are."""
_PACKED_FROM_BYTES = 4096
_PREFIX = "replicated_ckpt"
_REFUSED = "refused"


class _Session:
    """Names this process. A process that is forked from it is another one and draws a name of its own."""

    def __init__(self) -> None:
        self._draw()
        os.register_at_fork(after_in_child=self._draw)

    def _draw(self) -> None:
        self.name = uuid.uuid4().hex


_SESSION = _Session()


@dataclass(frozen=True)
class World:
    """The ranks of one DCP call. `blackboard` is None for a call on one process alone."""

    rank: int
    size: int
    blackboard: "Blackboard | None"
    group_name: str = "alone"

    @property
    def session(self) -> str:
        """Names the saves that this process coordinates on this group: one that is not committed is over with the next."""
        return f"{_SESSION.name}/{self.group_name}"

    @property
    def is_coordinator(self) -> bool:
        return self.rank == 0


def world_of_call(process_group: Any, no_dist: bool | None) -> World:
    """The world of the DCP call under way; arguments given to the writer or reader win over what the call says."""
    call = calling()
    if no_dist is None:
        no_dist = call.no_dist if call is not None else False
    if no_dist or not dist.is_available() or not dist.is_initialized():
        return World(0, 1, None)
    group: Any = process_group or (call.process_group if call is not None else None) or dist.group.WORLD
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    name = str(group.group_name)
    store = dist.PrefixStore(f"{_PREFIX}/{name}", default_store())
    return World(rank, size, Blackboard(store, rank, size, Seal.of_job(name)), name)


@dataclass(frozen=True)
class _Post:
    """What a rank posted, or why it is not believed; then its nonce is only good for telling that rank."""

    fields: dict[str, Any]
    nonce: str
    error: ReplicatedCkptError | None = None


class Blackboard:
    """Posts of every rank and decisions of the coordinator, overwritten by each call, so it does not grow.

    `topic` keeps saves and loads apart. One call at a time on one process group, as DCP itself demands.
    """

    def __init__(self, store: "dist.Store", rank: int, size: int, seal: Seal | None = None) -> None:
        self._store: Any = store  # its stub lacks methods that are there since torch 2.7, and that values may be bytes
        self._rank = rank
        self._size = size
        self._seal = seal or Seal()
        self._pause_max_s = max(_POLL_S, min(_POLL_PER_RANK_S * size, _POLL_MAX_S))

    def post(self, topic: str, fields: Mapping[str, Any]) -> str:
        """Writes this rank's post; it is visible to all when this returns. Returns its nonce."""
        nonce = uuid.uuid4().hex
        key, raw = f"{topic}/{self._rank}", _encoded({**fields, "nonce": nonce})
        self._write(key, self._seal.mark(key, raw) + raw)
        return nonce

    def posts(self, topic: str, deadline_s: float, stale: Sequence[str | None] = ()) -> list[dict[str, Any]]:
        """Every rank's post, in rank order; one with the rank's `stale` nonce is an earlier call's and waited out.

        Raises:
            MeetingFailed: naming the ranks that did not post within `deadline_s`.
            JobSecretMismatch, ConfigInvalid, PeerProtocolError: a post is not believed; `decision` tells all ranks.
        """
        until = time.monotonic() + deadline_s
        found: dict[int, _Post] = {}
        pause = _POLL_S
        while True:
            missing = [rank for rank in range(self._size) if rank not in found]
            is_late = time.monotonic() > until
            present = self._present(topic, missing, one_by_one=is_late)
            found |= {rank: post for rank, post in present if not stale or post.nonce != stale[rank]}
            if len(found) == self._size:
                return self._believed(topic, [found[rank] for rank in range(self._size)])
            if is_late:
                absent = [rank for rank in missing if rank not in found]
                raise MeetingFailed(f"After {deadline_s:.0f} s ranks {absent} had not joined this {topic}.")
            time.sleep(pause)
            pause = min(2 * pause, self._pause_max_s)

    def _present(self, topic: str, ranks: Sequence[int], *, one_by_one: bool) -> Iterator[tuple[int, "_Post"]]:
        """The posts of these ranks if all are there, in two round trips; or `one_by_one` those that are."""
        keys = [f"{topic}/{rank}" for rank in ranks]
        if self._store.check(keys):
            yield from zip(ranks, map(self._read, keys, self._all_of(keys)), strict=True)
        elif one_by_one:
            for rank, key in zip(ranks, keys, strict=True):
                if self._store.check([key]):
                    yield rank, self._read(key, self._store.get(key))

    def _read(self, key: str, sealed: bytes) -> "_Post":
        mark, raw = split(sealed)
        try:
            self._seal.check(key, raw, mark)
            fields = _decoded(key, raw)
            if not isinstance(fields.get("nonce"), str):
                raise PeerProtocolError(f"{key!r} on the c10d store is no post.")
        except ReplicatedCkptError as exc:
            return _Post({}, _claimed_nonce(raw), exc)
        return _Post(fields, fields["nonce"])

    def _believed(self, topic: str, posts: Sequence["_Post"]) -> list[dict[str, Any]]:
        error = next((post.error for post in posts if post.error is not None), None)
        if error is not None:
            self.decide(topic, [{"nonce": post.nonce} for post in posts], {_REFUSED: pack_error(error)})
            raise error
        return [post.fields for post in posts]

    def decide(self, topic: str, posts: Sequence[Mapping[str, Any]], fields: Mapping[str, Any]) -> None:
        """Writes the coordinator's decision about these posts; it is visible to all when this returns.

        Each rank then gets a note of its own that the decision is there, the nonce that it waits for: what is looked at
        again and again is small, and the decision, which may be large, is read once. The note's mark is that of both.
        """
        raw = _encoded(fields)
        self._write(f"{topic}/decision", raw)
        digest = hashlib.sha256(raw).hexdigest()
        notes = {
            f"{topic}/decided/{rank}": self._note(f"{topic}/decided/{rank}", str(post["nonce"]), digest)
            for rank, post in enumerate(posts)
        }
        if self._store.has_extended_api():
            self._store.multi_set(list(notes), list(notes.values()))
        else:
            for key, nonce in notes.items():
                self._store.set(key, nonce)
        self._store.check(list(notes)[-1:])

    def decision(self, topic: str, nonce: str, deadline_s: float) -> dict[str, Any]:
        """The decision that answers this rank's post.

        Raises:
            MeetingFailed: the coordinator has not decided within `deadline_s`.
            JobSecretMismatch, ConfigInvalid, PeerProtocolError: it is not believed, or some rank's post is not.
        """
        until = time.monotonic() + deadline_s
        pause = _POLL_S
        note = f"{topic}/decided/{self._rank}"
        while True:
            if self._store.check([note]) and (found := self._store.get(note)).startswith(nonce.encode()):
                raw = self._store.get(f"{topic}/decision")
                signed = f"{nonce} {hashlib.sha256(raw).hexdigest()}".encode()
                self._seal.check(note, signed, found[len(nonce) :])
                fields = _decoded(f"{topic}/decision", raw)
                if _REFUSED in fields:
                    raise unpack_error(fields[_REFUSED])
                return fields
            if time.monotonic() > until:
                raise MeetingFailed(f"After {deadline_s:.0f} s the coordinator had not decided about this {topic}.")
            time.sleep(pause)
            pause = min(2 * pause, self._pause_max_s)

    def _note(self, key: str, nonce: str, digest: str) -> str:
        return nonce + self._seal.mark(key, f"{nonce} {digest}".encode()).decode()

    def _write(self, key: str, raw: bytes) -> None:
        self._store.set(key, raw)
        self._store.check([key])  # a round trip on the same connection: the store has it before we go on

    def _all_of(self, keys: Sequence[str]) -> Sequence[bytes]:
        if self._store.has_extended_api():
            values: list[bytes] = self._store.multi_get(list(keys))
            return values
        return [self._store.get(key) for key in keys]


def _encoded(fields: Mapping[str, Any]) -> bytes:
    """What every rank reads is packed where it is large: the coordinator's link carries it once for each of them."""
    raw = json.dumps(fields).encode()
    return raw if len(raw) < _PACKED_FROM_BYTES else zlib.compress(raw, 1)


def _claimed_nonce(raw: bytes) -> str:
    """The nonce in a post that is not believed; nothing large is opened for it."""
    try:
        return str(json.loads(raw[:_PACKED_FROM_BYTES])["nonce"])
    except (ValueError, RecursionError, LookupError, TypeError):
        return ""


def _decoded(key: str, raw: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(raw if raw[:1] == b"{" else zlib.decompress(raw))
    except (ValueError, RecursionError, zlib.error) as exc:
        raise PeerProtocolError(f"{key!r} on the c10d store is no JSON: {type(exc).__name__}.") from exc
    if not isinstance(fields, dict):
        raise PeerProtocolError(f"{key!r} on the c10d store is no JSON object.")
    return fields
