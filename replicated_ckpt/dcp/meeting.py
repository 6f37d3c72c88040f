"""The meeting before a load: every rank learns the same survey, or every rank raises the same error."""

import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from replicated_ckpt.agent.peers import PeerBook
from replicated_ckpt.core.layout import LATEST, checkpoint_id_under
from replicated_ckpt.dcp.node import NodePost, node_post
from replicated_ckpt.dcp.survey import Survey, Surveyor, seen_sequence
from replicated_ckpt.dcp.world import Blackboard, World
from replicated_ckpt.errors import CheckpointIdMismatch, ConfigInvalid, PeerProtocolError, ReplicatedCkptError
from replicated_ckpt.stores.agent_client import AgentAddress, AgentClient
from replicated_ckpt.stores.bucket import Bucket
from replicated_ckpt.stores.fanout import FanOut
from replicated_ckpt.stores.local import LocalStore, is_nowhere

MEETING_TIMEOUT_S = 300.0
"""How long a load waits for the slowest rank; DCP's own first collective would wait as long or longer."""

_consumed: dict[tuple[str, int], list[str | None]] = {}
"""Nonces of the last load that this process coordinated, by process group: an equal one is a post of that load."""


class AgreedError(Exception):
    """Carries an error that every rank of the meeting raises."""

    def __init__(self, error: ReplicatedCkptError) -> None:
        super().__init__(error)
        self.error = error


def met(
    store: LocalStore,
    world: World,
    given_id: str | None,
    bucket: Bucket | None = None,
    prepared: Callable[[Survey], Survey] = lambda survey: survey,
) -> Survey:
    """The survey for a load of `given_id`, the same on every rank; only the coordinator looks into the bucket.

    `prepared`: what the coordinator alone does for all ranks, with the survey that they get then. One process alone
    does not.

    Raises:
        AgreedError: with the error that every rank raises. ReplicatedCkptError: this rank's alone.
    """
    if world.blackboard is None:
        return _alone(store, given_id, bucket)
    try:
        node = None if is_nowhere(store) else node_post(store, None).to_json()
        post: dict[str, Any] = {"checkpoint_id": _resolved(store, given_id), "node": node}
    except ReplicatedCkptError as exc:
        post = {"error": _packed(exc)}
    nonce = world.blackboard.post("load", post)
    if world.is_coordinator:
        _coordinate(store, world, world.blackboard, bucket, prepared)
    decision = world.blackboard.decision("load", nonce, MEETING_TIMEOUT_S)
    if "error" in decision:
        raise AgreedError(_unpacked(decision["error"]))
    return Survey.from_json(decision["survey"])


def _alone(store: LocalStore, given_id: str | None, bucket: Bucket | None) -> Survey:
    peers = PeerBook(store.root_agent_directory()).known()
    return Surveyor(store, store.known_node_id(), peers, bucket).surveyed(_resolved(store, given_id))


def _resolved(store: LocalStore, given_id: str | None) -> str:
    if given_id is None:
        raise ConfigInvalid("The load was given no checkpoint_id.", 'Pass checkpoint_id="step-10" or "latest", say.')
    return LATEST if given_id == LATEST else checkpoint_id_under(str(store.root), given_id)


def _coordinate(
    store: LocalStore, world: World, board: Blackboard, bucket: Bucket | None, prepared: Callable[[Survey], Survey]
) -> None:
    key = (world.group_name, world.size)
    posts = board.posts("load", MEETING_TIMEOUT_S, _consumed.get(key, ()))
    _consumed[key] = [post["nonce"] for post in posts]
    try:
        outcome: Mapping[str, Any] = {"survey": prepared(_surveyed(store, world, posts, bucket)).to_json()}
    except ReplicatedCkptError as exc:
        outcome = {"error": _packed(exc)}
    board.decide("load", posts, outcome)


def _surveyed(
    store: LocalStore, world: World, posts: Sequence[Mapping[str, Any]], bucket: Bucket | None = None
) -> Survey:
    for post in posts:
        if "error" in post:
            raise _unpacked(post["error"])
    ids = {rank: post["checkpoint_id"] for rank, post in enumerate(posts)}
    if len(set(ids.values())) > 1:
        raise CheckpointIdMismatch(ids)
    nodes = {post["node"]["node_id"]: NodePost.from_json(post["node"]) for post in posts if post["node"] is not None}
    if is_nowhere(store):
        agents = [node.address for node in nodes.values()]
        return Surveyor(store, store.known_node_id(), agents, bucket, nodes).surveyed(ids[0])
    own = posts[world.rank]["node"]["node_id"]
    addresses = [node.address for node in nodes.values()]
    _introduced(addresses, world.session)
    absent = [peer for peer in PeerBook(store.agent_directory()).known() if peer.node_id not in nodes]
    survey = Surveyor(store, own, [*addresses, *absent], bucket, nodes).surveyed(ids[0])
    _tell_sequence(addresses, survey, seen_sequence(store))
    return survey


def _tell_sequence(addresses: Sequence[AgentAddress], survey: Survey, sequence: int) -> None:
    """Tells the agents that do not hold the newest checkpoint that there is one: what they save next must be newer."""
    knowing = {holding.node_id for holding in survey.holdings if holding.sequence >= sequence}

    def told(address: AgentAddress) -> None:
        with AgentClient(address) as client:
            client.call("POST", "/v1/hear", {"sequence": sequence})

    FanOut[AgentAddress, None]().run([address for address in addresses if address.node_id not in knowing], told)


def _introduced(addresses: Sequence[AgentAddress], session: str) -> None:
    """Tells every agent who takes part, upon which each settles what earlier saves left behind."""
    body = json.dumps({"peers": [address.to_json() for address in addresses], "session": session}).encode()

    def told(address: AgentAddress) -> None:
        with AgentClient(address) as client:
            client.put("POST", "/v1/peers", body)

    FanOut[AgentAddress, None]().run(addresses, told)


def _packed(error: ReplicatedCkptError) -> str:
    return pickle.dumps(error).hex()


def _unpacked(packed: str) -> ReplicatedCkptError:
    """An error that a rank of this very job packed; the c10d store is as trusted as DCP's own pickled collectives."""
    error = pickle.loads(bytes.fromhex(packed))  # noqa: S301
    if not isinstance(error, ReplicatedCkptError):
        raise PeerProtocolError(f"A rank posted {type(error).__name__} as its error.")
    return error
