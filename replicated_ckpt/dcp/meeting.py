"""The meeting before a load: every rank learns the same survey, or every rank raises the same error."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from replicated_ckpt.agent.endpoint import read_endpoint
from replicated_ckpt.agent.peers import PeerBook
from replicated_ckpt.config import NEWEST_LINEAGE
from replicated_ckpt.core.layout import HEARD_SEQUENCE_MAX, LATEST, checkpoint_id_under
from replicated_ckpt.dcp.node import NodePost, node_post
from replicated_ckpt.dcp.posted_error import pack_error, unpack_error
from replicated_ckpt.dcp.seen_lineage import remember
from replicated_ckpt.dcp.survey import Survey, Surveyor
from replicated_ckpt.dcp.world import Blackboard, World
from replicated_ckpt.errors import (
    CheckpointIdMismatch,
    ConfigInvalid,
    JobSecretMismatch,
    PeerProtocolError,
    ReplicatedCkptError,
)
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
    *,
    lineage: str = NEWEST_LINEAGE,
) -> Survey:
    """The survey for a load of `given_id`, the same on every rank; only the coordinator looks into the bucket.

    `prepared`: what the coordinator alone does for all ranks, with the survey that they get then. One process alone
    does not.

    Raises:
        AgreedError: with the error that every rank raises. ReplicatedCkptError: this rank's alone.
    """
    if world.blackboard is None:
        return _remembered(store, _alone(store, given_id, bucket, lineage))
    try:
        node = None if is_nowhere(store) else node_post(store, None).to_json()
        post: dict[str, Any] = {"checkpoint_id": _resolved(store, given_id), "node": node}
    except ReplicatedCkptError as exc:
        post = {"error": pack_error(exc)}
    nonce = world.blackboard.post("load", post)
    look = partial(_surveyed, store, world, bucket=bucket, lineage=lineage)
    decision = _decision(world, world.blackboard, nonce, lambda posts: prepared(look(posts)))
    return _remembered(store, Survey.from_json(decision["survey"]))


def _decision(
    world: World, board: Blackboard, nonce: str, surveyed: Callable[[Sequence[Mapping[str, Any]]], Survey]
) -> dict[str, Any]:
    """What the coordinator found, for all ranks; only the coordinator looks.

    Raises:
        AgreedError: it found an error, or what is on the blackboard is not believed: then the others are told, or read it.
    """
    try:
        if world.is_coordinator:
            _coordinate(world, board, surveyed)
        decision = board.decision("load", nonce, MEETING_TIMEOUT_S)
        error = unpack_error(decision["error"]) if "error" in decision else None
    except (JobSecretMismatch, ConfigInvalid, PeerProtocolError) as exc:
        error = exc
    if error is not None:
        raise AgreedError(error)
    return decision


def _remembered(store: LocalStore, survey: Survey) -> Survey:
    """What this process saves next is of the lineage that it loads now, and newer."""
    found = survey.found
    if survey.lineages and survey.lineages[0].lineage == found.version.lineage:
        newest = replace(found.version, sequence=max(found.sequence, survey.sequence_max))
        remember(store, found.checkpoint_id, newest)
    return survey


def _alone(store: LocalStore, given_id: str | None, bucket: Bucket | None, lineage: str) -> Survey:
    peers = PeerBook(store.root_agent_directory()).known()
    look = Surveyor(store, store.known_node_id(), peers, bucket, lineage=lineage)
    survey = look.surveyed(_resolved(store, given_id))
    own = read_endpoint(store.root_agent_directory())
    _tell_load([*survey.addresses, *([] if own is None else [own.local_address()])], survey)
    return survey


def _resolved(store: LocalStore, given_id: str | None) -> str:
    if given_id is None:
        raise ConfigInvalid("The load was given no checkpoint_id.", 'Pass checkpoint_id="step-10" or "latest", say.')
    return LATEST if given_id == LATEST else checkpoint_id_under(str(store.root), given_id)


def _coordinate(world: World, board: Blackboard, surveyed: Callable[[Sequence[Mapping[str, Any]]], Survey]) -> None:
    key = (world.group_name, world.size)
    posts = board.posts("load", MEETING_TIMEOUT_S, _consumed.get(key, ()))
    _consumed[key] = [post["nonce"] for post in posts]
    try:
        outcome: Mapping[str, Any] = {"survey": surveyed(posts).to_json()}
    except ReplicatedCkptError as exc:
        outcome = {"error": pack_error(exc)}
    board.decide("load", posts, outcome)


def _surveyed(
    store: LocalStore,
    world: World,
    posts: Sequence[Mapping[str, Any]],
    bucket: Bucket | None = None,
    lineage: str = NEWEST_LINEAGE,
) -> Survey:
    for post in posts:
        if "error" in post:
            raise unpack_error(post["error"])
    ids = {rank: post["checkpoint_id"] for rank, post in enumerate(posts)}
    if len(set(ids.values())) > 1:
        raise CheckpointIdMismatch(ids)
    nodes = {post["node"]["node_id"]: NodePost.from_json(post["node"]) for post in posts if post["node"] is not None}
    if is_nowhere(store):
        agents = [node.address for node in nodes.values()]
        return Surveyor(store, store.known_node_id(), agents, bucket, nodes, lineage).surveyed(ids[0])
    own = posts[world.rank]["node"]["node_id"]
    addresses = [node.address for node in nodes.values()]
    openers = [node.opener() for node in nodes.values()]
    _introduced(addresses, openers, world.session)
    absent = [peer for peer in PeerBook(store.agent_directory()).known() if peer.node_id not in nodes]
    survey = Surveyor(store, own, [*addresses, *absent], bucket, nodes, lineage).surveyed(ids[0])
    _tell_load({address.node_id: address for address in (*survey.addresses, *addresses)}.values(), survey)
    return survey


def _tell_load(addresses: Iterable[AgentAddress], survey: Survey) -> None:
    """Tells the agents which save is read, so that it stays, and how far its lineage has come: later saves are newer.

    One that does not answer is left out: it holds nothing that this load was told to read from it.
    """
    if not survey.lineages:
        return
    lineage, sequence = survey.lineages[0].lineage, min(survey.sequence_max, HEARD_SEQUENCE_MAX)
    document = {"lineage": lineage, "sequence": sequence, "save_id": survey.found.save_id}

    def tell(address: AgentAddress) -> None:
        with AgentClient(address) as client:
            client.call("POST", "/v1/hear", document)

    FanOut[AgentAddress, None]().run(addresses, tell)


def _introduced(addresses: Sequence[AgentAddress], openers: Sequence[AgentAddress], session: str) -> None:
    """Tells every agent who takes part, upon which each settles what earlier saves left behind."""
    body = json.dumps({"peers": [address.to_json() for address in addresses], "session": session}).encode()

    def told(address: AgentAddress) -> None:
        with AgentClient(address) as client:
            client.put("POST", "/v1/peers", body)

    FanOut[AgentAddress, None]().run(openers, told)
