"""Finds the save that a load reads, and has the agents pin it, so that no node removes it."""

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from replicated_ckpt.agent.launch import can_hold_agent, is_only_read, running_agent
from replicated_ckpt.core.inventory import SaveFound
from replicated_ckpt.core.layout import SEQUENCE_FLOOR_MAX
from replicated_ckpt.dcp.c10d.world import World
from replicated_ckpt.dcp.find.survey import Survey, Surveyor
from replicated_ckpt.errors import (
    CheckpointNotFound,
    ManifestVersionUnknown,
    ReplicatedCkptError,
    ShardLost,
    StoreError,
)
from replicated_ckpt.node.state.damage import DamageBook
from replicated_ckpt.node.state.mark_book import MarkBook
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.peer.client import AgentAddress, AgentClient
from replicated_ckpt.stores.peer.copy import report_suspect
from replicated_ckpt.stores.peer.reach import is_time_out
from replicated_ckpt.stores.threads import FanOut

log = logging.getLogger(__name__)

SURVEYS_MAX = 3
"""The most surveys in one load, if another job replaces or removes checkpoints meanwhile."""

Silence = Mapping[str, ReplicatedCkptError]
"""The peers that did not answer a moment ago, with their errors. They are not asked again."""


def survey_and_keep(
    look: Callable[[Silence], Surveyor],
    checkpoint_id: str,
    world: World,
    silent: Silence,
    own: Iterable[AgentAddress] = (),
) -> Survey:
    """The survey for a load, of a save that its nodes still had when they pinned it.

    If another job has replaced or removed the save in between, this surveys again. There may be a newer save by then,
    and an older one must not be taken instead. `own`: agents that pin, too, but are not asked for their holdings.

    Raises:
        ReplicatedCkptError: as Surveyor.survey.
    """
    known: set[tuple[str, str]] = set()
    for number in range(1, SURVEYS_MAX + 1):
        surveyor = look(silent)
        try:
            survey = surveyor.survey(checkpoint_id)
        except (CheckpointNotFound, ManifestVersionUnknown, ShardLost):
            # Only a new disappearance is worth another survey: a stale listing would repeat the same ones for ever.
            if number == SURVEYS_MAX or surveyor.moved <= known:
                raise
            gone = surveyor.moved
        else:
            without, late = announce_load([*survey.addresses, *own], survey, world)
            survey = replace(survey, silent=tuple(sorted(late)))
            # Only nodes that listed the save count: the load's other nodes never had it.
            gone = surveyor.moved | {(node, survey.found.save_id) for node in without} & surveyor.listed
            if number == SURVEYS_MAX or gone <= known:
                break
        known |= gone
        # A silent peer costs its time-out once, not once for each survey.
        silent = {**silent, **surveyor.unanswered}
    return survey


def announce_load(addresses: Iterable[AgentAddress], survey: Survey, world: World) -> tuple[set[str], set[str]]:
    """Has the agents pin the save that is read, and reports its lineage's largest sequence, so that later saves are
    newer.

    The agents also record the number of this restore, if the load asked for "latest". The number is the same in each call
    of one load. This load reads nothing from an agent that does not answer.

    Returns two sets of nodes: first those without the save (in a mere search, all nodes), or whose copy has lost its
    optimizer since they listed it; then the silent ones.
    """
    silent = {*survey.silent}
    # Stock torch wrote it: without a lineage there is nothing that agents could pin.
    if not survey.lineages:
        return set(), silent
    reader = f"{world.session}/{threading.get_ident()}"  # a thread has one load at a time
    # Bounded: agents could not count on from a huge number that a peer made up.
    lineage, sequence = survey.lineages[0].lineage, min(survey.sequence_max, SEQUENCE_FLOOR_MAX)
    document = {"lineage": lineage, "sequence": sequence, "save_id": survey.found.save_id, "reader": reader}
    document |= {"is_load": world.is_load, "restores": survey.restores}

    full = {holding.node_id for holding in survey.found.holdings if not holding.is_slim}

    def announce(address: AgentAddress) -> bool:
        with AgentClient(address) as client:
            answer = client.call("POST", "/v1/sequence", document)
        is_slimmed = answer.get("is_slim") is True and address.node_id in full
        return answer.get("is_here") is not False and not is_slimmed

    outcome = FanOut.run((address for address in addresses if address.node_id not in silent), announce)
    silent |= {address.node_id for address, error in outcome.errors.items() if is_time_out(error)}
    return {address.node_id for address, is_here in outcome.results.items() if not is_here}, silent


def count_restore(store: LocalStore, survey: Survey) -> None:
    """Records a restore on this node if no agent runs that `announce_load` could ask. Only logs an error."""
    if not survey.lineages:
        return
    newest = min(survey.sequence_max, SEQUENCE_FLOOR_MAX)
    try:
        book = MarkBook(store.agent_directory())
        book.note_restores(survey.lineages[0].lineage, newest, survey.found.save_id, survey.restores)
    except StoreError as exc:
        log.warning("this restore is not counted: %s", exc)


def note_own_suspect(store: LocalStore, save: SaveFound, name: str, why: str) -> None:
    """Has this node's agent read a bad file again and repair it. Without an agent, records the damage in its place, so
    that the next load for "latest" skips the save. Only logs an error.
    """
    try:
        agent = None if is_only_read(store) else running_agent(store)
        if agent is not None:
            report_suspect(agent.local_address(), save.checkpoint_id, save.save_id, name, why)
        elif can_hold_agent(store):
            store.agent_directory()  # creates it
            DamageBook(store).mark(save.checkpoint_id, save.save_id, name)
    except ReplicatedCkptError as exc:
        log.warning("the damage of %s/%s on this node is not recorded: %s", save.checkpoint_id, name, exc)
