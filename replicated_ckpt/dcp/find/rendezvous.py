"""The rendezvous before a load: every rank gets the same survey, or every rank raises the same error."""

import contextlib
import json
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from replicated_ckpt.agent.launch import can_hold_agent, is_only_read
from replicated_ckpt.agent.state.endpoint import listening_endpoint
from replicated_ckpt.config import NEWEST_LINEAGE
from replicated_ckpt.core.inventory import Holding
from replicated_ckpt.core.lineage import accept_sequence
from replicated_ckpt.core.reading.newest import Newest, is_newest
from replicated_ckpt.core.upkeep.marks import Marks
from replicated_ckpt.core.upkeep.policy import scope_of
from replicated_ckpt.core.upkeep.unclaimed_files import UnclaimedFiles
from replicated_ckpt.dcp.agreement.node_post import NodePost, SeenStore, id_under, register_for_load, remember
from replicated_ckpt.dcp.c10d.blackboard import Blackboard, check_all_posted
from replicated_ckpt.dcp.c10d.picklable_error import pack_error, unpack_error
from replicated_ckpt.dcp.c10d.waiting import LINGER_S
from replicated_ckpt.dcp.c10d.world import World
from replicated_ckpt.dcp.find.keeping import Silence, count_restore, survey_and_keep
from replicated_ckpt.dcp.find.survey import SURVEY_TIMEOUT_S, Survey, Surveyor
from replicated_ckpt.errors import (
    CheckpointIdMismatch,
    ConfigInvalid,
    RankFailed,
    RendezvousFailed,
    ReplicatedCkptError,
)
from replicated_ckpt.node.peers.address_book import PeerBook
from replicated_ckpt.node.state.mark_book import MarkBook
from replicated_ckpt.stores.bucket.bucket import Bucket
from replicated_ckpt.stores.files.durable import translate_errors
from replicated_ckpt.stores.local.store import EmptyStore, LocalStore
from replicated_ckpt.stores.local.unclaimed import UnclaimedFilesReader
from replicated_ckpt.stores.peer.client import AgentAddress, AgentClient
from replicated_ckpt.stores.peer.reach import is_time_out
from replicated_ckpt.stores.threads import FanOut

RENDEZVOUS_TIMEOUT_S = 300.0
"""How long a load waits for the slowest rank; DCP's own first collective would wait as long or longer."""

INTERRUPTED_WAIT_S = 2 * LINGER_S
"""How long a rank that was interrupted waits for the decision, to find out whether the others got its error."""

_consumed: dict[tuple[str, int], list[str | None]] = {}
"""By process group and size, the ranks' nonces in the last load that this process coordinated. A post with such a nonce
is of that load."""
_posted: dict[str, str] = {}
"""Nonce of this process's last post in a load, by process group."""

_NAME_IT = (
    'Pass an id: dcp.load(..., checkpoint_id="step-10"), or "latest". If other code calls dcp.load, as '
    'load_state_dict or _Checkpointer does, call reader.reset("step-10") first.'
)


class AgreedError(Exception):
    """Carries the error that ended a rendezvous. Every rank raises one; with `in_step`, in a step in which DCP
    gathers errors.

    An error of this package is the same on all ranks. For any other error, the other ranks raise RankFailed.
    """

    def __init__(self, error: BaseException, *, in_step: bool = False) -> None:
        super().__init__(error)
        self.error, self.in_step = error, in_step


def meet(
    store: LocalStore,
    world: World,
    given_id: str | os.PathLike[str] | None,
    opened_bucket: Callable[[], Bucket | None] = lambda: None,
    *,
    lineage: str = NEWEST_LINEAGE,
    in_step: bool = False,
    max_tries: int | None = None,
) -> Survey:
    """The survey for a load of `given_id`, the same on every rank. Only the coordinator searches the bucket.

    `max_tries`: as for Surveyor; only the coordinator's is used.
    `in_step`: this rank is in DCP's first step, and cannot leave it. Then no rank may raise before that step.

    Raises:
        AgreedError: carries this rank's error; every other rank raises one, too. Any other: an error of this rank alone.
    """
    if world.blackboard is None:
        return _remember(store, _survey_alone(store, world, given_id, opened_bucket(), lineage, max_tries))

    def survey(posts: Sequence[Mapping[str, Any]]) -> Survey:
        with translate_errors(str(store.root), "look for", "checkpoints"):
            found = _survey(store, world, posts, opened_bucket(), lineage, max_tries)
            return replace(found, load_id=posts[0]["nonce"])

    post, failure = _register(store, world, given_id)
    post["in_step"] = in_step
    world.blackboard.share_in(None if isinstance(store, EmptyStore) else store.root_agent_directory())
    decision = _agree(world, world.blackboard, post, failure, survey)
    return _remember(store, _with_own_store(store, Survey.from_json(decision["survey"])))


def _with_own_store(store: LocalStore, survey: Survey) -> Survey:
    """The survey, completed with this rank's own store, whose agent the coordinator may not have reached."""
    own = store.read_node_id()
    if (
        isinstance(store, EmptyStore)
        or survey.unmanaged_warning
        or any(held.node_id == own for held in survey.holdings)
    ):
        return survey
    save = survey.found
    found = [held for held in store.catalog.holdings(own, save.checkpoint_id) if held.save_id == save.save_id]
    return replace(survey, holdings=(*survey.holdings, *found)) if found else survey


def _agree(
    world: World,
    board: Blackboard,
    post: Mapping[str, Any],
    failure: BaseException | None,
    survey: Callable[[Sequence[Mapping[str, Any]]], Survey],
) -> dict[str, Any]:
    """The coordinator's decision, the same on all ranks. Only the coordinator calls `survey`. `failure`: this rank's own
    error, which its `post` contains.

    Raises:
        AgreedError: this rank failed, another did, or nothing is decided. Any other: an error that came too late for
            the decision, so the other ranks continue.
    """
    nonce, before = board.post("load", post), _posted.get(world.group_name)
    # Recorded even if this load fails: a late decision may still answer this post.
    _posted[world.group_name] = nonce
    try:
        try:
            if world.is_coordinator:
                failure = _coordinate(world, board, survey) or failure
            # A second Ctrl-C is likely: the rank that was interrupted waits seconds, not minutes.
            is_interrupted = failure is not None and not isinstance(failure, Exception)
            wait_s = INTERRUPTED_WAIT_S if is_interrupted else RENDEZVOUS_TIMEOUT_S
            decision = board.decision("load", nonce, wait_s, before)
        except ReplicatedCkptError:
            raise
        except BaseException as exc:  # noqa: BLE001 - a signal, as a rule; sent to the other ranks, then raised
            failure = exc
            # Replaces the post: the others would otherwise wait for this rank, or go on without it.
            board.repost("load", {**_failure_post(world, exc), "in_step": post["in_step"]}, nonce)
            decision = board.decision("load", nonce, INTERRUPTED_WAIT_S, before)
        error = unpack_error(decision["error"]) if "error" in decision else None
    except ReplicatedCkptError as exc:
        with contextlib.suppress(RendezvousFailed):  # the c10d store itself is gone, and the post with it
            board.withdraw("load")
        raise AgreedError(failure or exc) from exc
    if error is not None:
        raise AgreedError(failure or error, in_step=bool(decision.get("in_step")))
    # The decision did not wait for this rank's error: the other ranks go on, so it must not be reported as agreed.
    if failure is not None:
        raise failure
    return decision


def _register(
    store: LocalStore, world: World, given_id: str | os.PathLike[str] | None
) -> tuple[dict[str, Any], BaseException | None]:
    """This rank's post: its node, or its error if it cannot take part. Also returns the error, if it is not of this
    package.
    """
    try:
        with translate_errors(str(store.root), "present", "node"):
            checkpoint_id = _resolve_id(store, given_id, world)
            node = None if isinstance(store, EmptyStore) else register_for_load(store)
            post: dict[str, Any] = {"checkpoint_id": checkpoint_id, "node": node.to_json() if node else None}
            # No peer can ask a silent agent: this rank posts the contents of its node's disk.
            if node is not None and node.silence:
                wanted = None if is_newest(checkpoint_id) else checkpoint_id
                post["holdings"] = [each.to_json() for each in store.catalog.holdings(node.node_id, wanted)]
                post["unclaimed"] = [
                    each.to_json() for each in UnclaimedFilesReader(store, node.node_id).find_files(wanted)
                ]
                post["marks"] = MarkBook(store.root_agent_directory()).read().to_json()
            return post, None
    except ReplicatedCkptError as exc:
        return {"error": pack_error(exc)}, None
    except BaseException as exc:  # noqa: BLE001 - sent to the other ranks, then raised
        return _failure_post(world, exc), exc


def _failure_post(world: World, failure: BaseException) -> dict[str, Any]:
    """The post of a rank that ends with an error from outside this package."""
    what = "".join(traceback.format_exception_only(failure)).strip()
    return {"error": pack_error(RankFailed(f"Rank {world.rank} failed before the ranks agreed on the load: {what}"))}


def _remember(store: LocalStore, survey: Survey) -> Survey:
    """The process's next save takes the lineage that it loads now, and a larger sequence."""
    found = survey.found
    if survey.lineages and survey.lineages[0].lineage == found.version.lineage:
        # A damaged peer's huge sequence must not become this run's next one.
        newest = replace(
            found.version, sequence=max(found.sequence, accept_sequence(survey.sequence_max, found.sequence))
        )
        remember(store, found.checkpoint_id, newest)
    return survey


def _survey_alone(
    store: LocalStore,
    world: World,
    given_id: str | os.PathLike[str] | None,
    bucket: Bucket | None,
    lineage: str,
    max_tries: int | None,
) -> Survey:
    # EmptyStore has no root, and a root that is only read needs no claim.
    if not isinstance(store, EmptyStore) and can_hold_agent(store):
        store.check_claimable()  # a load of several ranks makes the same check: a later save would be refused
    own, peers, checkpoint_id = store.read_node_id(), _known_peers(store), _resolve_id(store, given_id, world)
    # Another user's agent directory is not trusted: it could name any address.
    agent = None if is_only_read(store) else listening_endpoint(store.root_agent_directory())

    def look(silent: Silence) -> Surveyor:
        return Surveyor(
            store, own, peers, bucket, lineage=lineage, silent=silent, max_tries=max_tries, is_restore=world.is_restore
        )

    survey = survey_and_keep(look, checkpoint_id, world, {}, () if agent is None else (agent.local_address(),))
    # Without an agent, this process counts the restore.
    if agent is None and survey.restores and not isinstance(store, EmptyStore) and can_hold_agent(store):
        count_restore(store, survey)
    return survey


def _known_peers(store: LocalStore) -> Sequence[AgentAddress]:
    """The nodes in the address book of this node's agent. Empty for a store that is only read: a
    directory of another user could name any address.
    """
    return () if is_only_read(store) else PeerBook(store.root_agent_directory()).read_all()


def _resolve_id(store: LocalStore, given_id: str | os.PathLike[str] | None, world: World) -> str:
    if not isinstance(given_id, str | os.PathLike):
        what = "no checkpoint_id" if given_id is None else f"{given_id!r} as its checkpoint_id"
        on_rank = "" if world.blackboard is None else f" on rank {world.rank}"
        raise ConfigInvalid(f"The load was given {what}{on_rank}.", _NAME_IT)
    newest = Newest.parse(os.fspath(given_id))
    if newest is None:
        return id_under(str(store.root), given_id)
    if newest.directory:  # spelled as the directory of any id; "step" stands for the last part
        directory = scope_of(id_under(str(store.root), f"{newest.directory}/step"))
        newest = replace(newest, directory=directory)
    return str(newest)


def _coordinate(
    world: World, board: Blackboard, survey: Callable[[Sequence[Mapping[str, Any]]], Survey]
) -> BaseException | None:
    """Decides for all ranks. Returns an error from outside this package, if one ended it; the other ranks get
    RankFailed.
    """
    # The size is in the key because a group may have the same name after a restart with fewer ranks.
    key = (world.group_name, world.size)
    stale = _consumed.get(key, [None] * world.size)
    posts: list[dict[str, Any] | None] = []
    failure: BaseException | None = None
    try:
        posts, problem = board.collect("load", RENDEZVOUS_TIMEOUT_S, stale)
        outcome: Mapping[str, Any] = {"survey": survey(check_all_posted(posts, problem)).to_json()}
    except ReplicatedCkptError as exc:
        outcome = {"error": pack_error(exc)}
    except BaseException as exc:  # noqa: BLE001 - sent to the other ranks, then raised
        failure, outcome = exc, _failure_post(world, exc)
    # The first collection was interrupted. The posts are collected once more, so that each rank gets an answer.
    posts = posts or board.collect("load", LINGER_S, stale)[0]
    _consumed[key] = [before if post is None else post["nonce"] for post, before in zip(posts, stale, strict=True)]
    in_step = any(post is not None and post.get("in_step") for post in posts)
    board.decide("load", posts, {**outcome, "in_step": in_step}, stale)
    return failure


def _survey(
    store: LocalStore,
    world: World,
    posts: Sequence[Mapping[str, Any]],
    bucket: Bucket | None = None,
    lineage: str = NEWEST_LINEAGE,
    max_tries: int | None = None,
) -> Survey:
    ids = {rank: post["checkpoint_id"] for rank, post in enumerate(posts)}
    if len(set(ids.values())) > 1:
        raise CheckpointIdMismatch(ids)
    nodes, seen = _nodes_of(posts)
    addresses = [node.address for node in nodes.values() if not node.silence]
    own = posts[world.rank]["node"]["node_id"] if posts[world.rank]["node"] else store.read_node_id()
    absent: list[AgentAddress] = []
    silent: Silence = {}
    # Without a store this rank has no node, and has met no peers.
    if not isinstance(store, EmptyStore):
        # Port 0 is a node whose agent never listened: no peer could reach it.
        known = [node.address for node in nodes.values() if node.address.port]
        openers = [node.opener() for node in nodes.values() if not node.silence]
        absent = [peer for peer in _known_peers(store) if peer.node_id not in nodes]
        silent = _introduce(known, openers, world.session, absent)

    def look(silent: Silence) -> Surveyor:
        found_by = store, own, [*addresses, *absent], bucket, nodes, lineage, seen, silent, max_tries
        return Surveyor(*found_by, is_restore=world.is_restore)

    return survey_and_keep(look, ids[0], world, silent)


def _nodes_of(posts: Sequence[Mapping[str, Any]]) -> tuple[dict[str, NodePost], dict[str, SeenStore]]:
    """The nodes of the load; and of each node with a silent agent, its store as its ranks posted it."""
    nodes: dict[str, NodePost] = {}
    seen: dict[str, SeenStore] = {}
    for post in posts:
        if post["node"] is not None:
            node = NodePost.from_json(post["node"])
            # One rank's agent call may time out while another rank of the node got its answer: the answer counts.
            if node.node_id not in nodes or nodes[node.node_id].silence:
                nodes[node.node_id] = node
            if node.silence:
                holdings = tuple(map(Holding.from_json, post["holdings"]))
                unclaimed = tuple(map(UnclaimedFiles.from_json, post["unclaimed"]))
                seen[node.node_id] = SeenStore(node.silence, holdings, unclaimed, Marks.from_json(post["marks"]))
    return nodes, {node: store for node, store in seen.items() if nodes[node].silence}


def _introduce(
    known: Sequence[AgentAddress], openers: Sequence[AgentAddress], session: str, absent: Sequence[AgentAddress]
) -> Mapping[str, ReplicatedCkptError]:
    """Introduces all nodes of the load to every agent that answers. Each agent then settles saves that were
    interrupted.

    Meanwhile the agents of `absent` nodes are asked for their status, so that all silent nodes together cost one
    time-out. They list their holdings later, because settling may have an absent node publish a decided save. Returns
    the nodes of the load that timed out, and the absent ones without an answer, with their errors.
    """
    body = json.dumps({"peers": [address.to_json() for address in known], "session": session}).encode()
    away = {address.node_id for address in absent}

    def introduce_to(address: AgentAddress) -> None:
        if address.node_id in away:
            with AgentClient(address, SURVEY_TIMEOUT_S) as client:
                client.call("GET", "/v1/status?brief=1")
            return
        with AgentClient(address) as client:
            client.put("POST", "/v1/peers", body)

    errors = FanOut.run([*openers, *absent], introduce_to).errors
    return {node.node_id: error for node, error in errors.items() if node.node_id in away or is_time_out(error)}
