"""Errors that ranks post: they travel as JSON, arrive equal, and no posted code is run."""

import json
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from replicated_ckpt import errors
from replicated_ckpt.dcp.c10d.blackboard import Blackboard
from replicated_ckpt.dcp.c10d.picklable_error import pack_error, unpack_error
from replicated_ckpt.dcp.c10d.world import World
from replicated_ckpt.dcp.find.rendezvous import AgreedError, meet
from replicated_ckpt.errors import PeerProtocolError, ReplicatedCkptError, StoreDenied, StoreUnavailable
from replicated_ckpt.stores.local.store import EmptyStore

ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "CheckpointIdMismatch": ({0: "step-1", 11: "step-2"},),
    "CheckpointNotFound": ("not there", None, ("node a", "s3://b")),
    "CheckpointNotCommitted": ("half", "a hint", ()),
    "CheckpointRejected": (("step-1", "step-2"),),
    "CheckpointAmbiguous": ("step-1", "__0_0.distcp", {"a": "10 bytes", "b": "11 bytes"}),
    "AckNotReached": (2, {"__0_0.distcp": 1}, "node b is gone"),
    "ShardLost": ("step-1", {"__0_0.distcp": "a", "__1_0.distcp": "b"}, ("node a: not reached", "node b")),
    "LatestAmbiguous": (("run-a/latest", "./latest"),),
    "LineagesMet": ("latest", ("a: step-1", "b: step-2"), "two runs"),
    "ObjectUnsafe": ("optimizer.extra", "__0_0.distcp", (("datetime", "date"), ("a", "B"))),
    "UploadFailed": ("step-1", "s3://bucket/x", "denied"),
}
STORE_ERROR = ("node a at h:1", "PUT", "/v1/x", "no \u2028 room", "Make room.")


def kinds() -> Iterator[type[ReplicatedCkptError]]:
    """Every error class in `replicated_ckpt.errors`."""
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, ReplicatedCkptError):
            yield kind


def made(kind: type[ReplicatedCkptError]) -> ReplicatedCkptError:
    usual = STORE_ERROR if issubclass(kind, errors.StoreError) else ("it failed", "Do this.")
    return kind(*ARGUMENTS.get(kind.__name__, usual))


@pytest.mark.parametrize("kind", list(kinds()))
def test_every_error_arrives_as_it_was_raised(kind: type[ReplicatedCkptError]) -> None:
    """The class, text, hint and attributes of each error are the same after JSON."""
    sent = made(kind)
    found = unpack_error(json.loads(json.dumps(pack_error(sent))))
    assert type(found) is kind
    assert (str(found), found.args, vars(found)) == (str(sent), sent.args, vars(sent))


class Narrow(StoreDenied):
    """A subclass outside `replicated_ckpt.errors`, as the agent's `TokenInvalid`."""


class Odd(StoreUnavailable):
    def __init__(self, number: complex) -> None:
        super().__init__("a", "b", "c", f"{number}")
        self.args = (number,)


def test_other_classes_arrive_as_the_nearest_public_one() -> None:
    """An error of an unlisted subclass arrives with the same text, as the nearest class in `replicated_ckpt.errors`."""
    sent = Narrow(*STORE_ERROR)
    found = unpack_error(pack_error(sent))
    assert type(found) is StoreDenied
    assert found.hint == "Make room."
    odd = Odd(1j)
    assert str(unpack_error(pack_error(odd))) == str(odd)


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "AgreedError", "args": []}, {"kind": "Mapping", "args": []}, {"kind": "Exception", "args": ["x"]},
        {"kind": "StoreDenied", "args": []}, {"kind": "ConfigInvalid", "args": [1]}, {"kind": ["x"], "args": []},
        {"kind": "ConfigInvalid"}, {"args": []}, [], "x", None, 7, {"kind": "ShardLost", "args": ["a", {"b": 1}, []]},
        {"kind": "ShardLost", "args": ["a", {"map": [[["n"], "b"]]}, []]}, {"kind": "ConfigInvalid", "args": 7},
        {"kind": "ConfigInvalid", "args": ["x", [[[[[["deep"]]]]]]]},
        {"kind": "CheckpointIdMismatch", "args": [{"map": [[0, "a"], ["b", "c"]]}]},
    ],
)  # fmt: skip
def test_other_errors_and_arguments_are_refused(fields: Any) -> None:
    """Other classes, and arguments that a class does not take, raise PeerProtocolError."""
    with pytest.raises(PeerProtocolError, match="A rank posted"):
        unpack_error(fields)


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, ("raise SystemExit('ran')",))


@pytest.mark.parametrize("where", ["post", "decision"])
def test_a_pickle_on_the_blackboard_is_not_opened(where: str) -> None:
    """A pickle in a post or decision fails the load with PeerProtocolError, and is not executed."""
    store: Any = dist.HashStore()
    hostile = pickle.dumps(Bomb()).hex()
    own, other = (World(rank, 2, Blackboard(store, rank, 2), "pickles") for rank in (0, 1))
    assert other.blackboard is not None
    if where == "post":
        other.blackboard.post("load", {"error": hostile})
        reader = own
    else:
        board, post, reader = other.blackboard, other.blackboard.post, other

        def answered(topic: str, fields: Any) -> str:
            nonce = post(topic, fields)
            board.decide("load", [{"nonce": "0"}, {"nonce": nonce}], {"error": hostile})
            return nonce

        board.post = answered  # type: ignore[method-assign]  # an attacker's answer
    with pytest.raises(AgreedError) as caught:
        meet(EmptyStore(), reader, "step-1")
    assert isinstance(caught.value.error, PeerProtocolError)
