"""Settles saves that a crash left staged: each is completed or removed, or stays in doubt until more nodes answer.

`core.protocol.settlement` decides. This module asks the nodes, and carries the decision out.
"""

import logging
import time
import urllib.parse
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from replicated_ckpt.core.layout import MANIFEST_NAME, METADATA_NAME
from replicated_ckpt.core.protocol.settlement import Answer, Fate, Settlement, settle_staged
from replicated_ckpt.errors import (
    ConfigInvalid,
    ObjectMissing,
    PeerProtocolError,
    ReplicatedCkptError,
    StoreUnavailable,
)
from replicated_ckpt.node.peers.manifests import fetch_first, fetch_manifest, fetch_metadata
from replicated_ckpt.node.saves.in_doubt import StaleSave
from replicated_ckpt.node.saves.service import NodeService
from replicated_ckpt.stores.local.directories.intent import Intent
from replicated_ckpt.stores.peer.client import AgentAddress, AgentClient
from replicated_ckpt.stores.threads import FanOut

log = logging.getLogger(__name__)

SETTLE_TIMEOUT_S = 3.0
_END_JOB = "End the job that saves; then repair again."
_ENDED = "It has ended on this node: `replicated-ckpt status --root ROOT` shows the saves in doubt."


def settle(service: NodeService, stale_saves: Sequence[StaleSave], peers: Sequence[AgentAddress]) -> None:
    """Settles each save that has ended. `peers` are the other nodes that can be asked now.

    Afterwards a save is committed here if any node that answered has published it, or if it is decided here. It is
    removed only if it can never have been committed anywhere. Otherwise it is in doubt and stays staged; the next save
    or load, and re-protection, settle it again.
    """
    # For all saves together: a node that is down costs one time-out, not one for each save.
    silent: set[str] = set()
    for stale_save in stale_saves:
        try:
            with service.completing:
                _settle_one(service, stale_save, peers, silent)
        except ReplicatedCkptError as exc:
            is_news = service.in_doubt.record_in_doubt(stale_save.intent, failure=str(exc))
            if not _is_gone(service, stale_save.intent.save_id) and is_news:
                log.error("could not recover save %s: %s", stale_save.intent.save_id, exc)  # noqa: TRY400 - it explains itself


def abort_lost(service: NodeService, save_id: str, lost: Collection[str]) -> Sequence[str]:
    """Settles a save in doubt as if the nodes `lost`, which never come back, had answered that they did not publish it.

    Returns the nodes that it still waits for; empty if it is completed or removed. A node that answers is never treated
    as lost.

    Raises:
        ObjectMissing: no such save is staged here. ConfigInvalid: ranks still work on it.
    """
    intent = next((staged for staged in service.store.list_staged() if staged.save_id == save_id), None)
    if intent is None:
        raise ObjectMissing(f"node {service.node_id}", "abort", save_id, "it is not staged here", _ENDED)
    # Live ranks may still decide it, although the operator takes them for lost.
    if service.is_locked(save_id):
        raise ConfigInvalid(f"Save {save_id} is not aborted: ranks of this node still work on it.", _END_JOB)
    stale_save = StaleSave(intent, f"node {', '.join(sorted(lost))} is lost for good, according to the operator")
    with service.completing:
        _settle_one(service, stale_save, service.peers.read_all(), set(), frozenset(lost))
    waits_for = next((save.waits_for for save in service.in_doubt.read_all() if save.intent.save_id == save_id), ())
    # It stays for another reason than a silent node: the operator must learn why `--lost` cannot end it.
    if not waits_for and service.store.is_staged(save_id):
        raise _unsettled_error(service, intent)
    return waits_for


def _unsettled_error(service: NodeService, intent: Intent) -> ConfigInvalid:
    """The error for a save that stays staged although it waits for no node."""
    named, place = service.store.catalog.find_manifest(intent.checkpoint_id), service.store.final(intent.checkpoint_id)
    if named is not None and service.store.is_decided(intent.save_id):
        return ConfigInvalid(
            f"Save {intent.save_id} is not aborted: it is decided, but save {named.save_id} has its name, "
            f"{intent.checkpoint_id!r}, on this node.",
            f"This save is deleted once a newer save of its run is complete. To publish it instead, rename {place}: save "
            f"{named.save_id} then is a checkpoint under the new name.",
        )
    return ConfigInvalid(
        f"Save {intent.save_id} is not aborted: on another of its nodes, ranks work on it, or did a moment ago.",
        _END_JOB,
    )


def _settle_one(
    service: NodeService,
    stale_save: StaleSave,
    peers: Sequence[AgentAddress],
    silent: set[str],
    lost: frozenset[str] = frozenset(),
) -> None:
    """Settles one save. `silent`: nodes that did not answer before, and are not asked again. Nodes that do not answer
    now are added.
    """
    intent = stale_save.intent
    answer = service.answer_of(intent.save_id)
    if answer is Answer.PUBLISHED:
        service.store.abort(intent.save_id)  # the published files stay: only its staging is removed
        service.in_doubt.settle(intent.save_id)
        return
    # A crash left the intent alone, without staging: nothing can be completed.
    if answer is Answer.ABSENT and not stale_save.may_live:
        service.abort(intent.save_id, stale_save.why, unless_decided=True)
        return
    # A newer save blocks it: it is removed once that one is whole, or once its coordinator's node has removed it.
    if answer is Answer.DECIDED:
        if _is_aborted(service, intent, silent):
            service.abort(intent.save_id, stale_save.why)
            log.warning(
                "removed save %s of %r, because its coordinator's node has removed it",
                intent.save_id,
                intent.checkpoint_id,
            )
        else:
            service.in_doubt.record_in_doubt(intent)
        return
    _settle_by_others(service, stale_save, peers, silent, lost)


def _is_aborted(service: NodeService, intent: Intent, silent: set[str]) -> bool:
    """Whether the coordinator's node has ended a decided save, because no node published it or a policy retired it."""
    # Not asked if it is this node, or if it is silent, which would cost another time-out.
    if intent.coordinator in silent | {service.node_id}:
        return False
    asked = [peer for peer in service.peers.read_all() if peer.node_id == intent.coordinator]
    return Answer.ABORTED in _answers(intent, "working", asked, silent).values()


def _settle_by_others(
    service: NodeService,
    stale_save: StaleSave,
    peers: Sequence[AgentAddress],
    silent: set[str],
    lost: frozenset[str],
) -> None:
    """Settles a save by the answers of `peers`. Before it is removed, all nodes in the address book are asked, too.

    A node of another job may have got a copy of the save from a node that has lost it since.
    """
    intent, known = stale_save.intent, service.peers.read_all()
    how = "left" if stale_save.is_left else "over" if stale_save.is_over else "working"
    nodes = intent.nodes or {peer.node_id for peer in (*peers, *known)}
    is_decision_bad = service.store.is_decision_damaged(intent.save_id)
    # This node's own decision cannot be read: it must not conclude that no node has published the save.
    coordinator = "" if is_decision_bad and intent.coordinator == service.node_id else intent.coordinator
    addresses: dict[str, AgentAddress] = {}
    answers: dict[str, Answer] = {}
    for group in (peers, known):
        asked = [peer for peer in group if peer.node_id not in addresses.keys() | silent]
        addresses |= {peer.node_id: peer for peer in asked}
        answers |= _answers(intent, how, asked, silent)
        settlement = settle_staged(
            own=service.node_id,
            nodes=tuple(node for node in nodes if node not in lost or node in answers),
            coordinator=coordinator,
            is_worked_on=stale_save.may_live,
            answers=answers,
        )
        if settlement.fate is not Fate.DROP or coordinator == service.node_id:
            break
    _carry_out(service, stale_save, settlement, addresses)


def _answers(intent: Intent, how: str, addresses: Sequence[AgentAddress], silent: set[str]) -> dict[str, Answer]:
    """By node, its answer about the save. Nodes without a valid answer are left out.

    Only nodes of the save get the question that may abort it, with the save's ticket. The others get the plain
    question.
    """
    by_node = {address.node_id: address for address in addresses}
    settled = f"{intent.save_id}?{urllib.parse.urlencode({'settle': how, 'ticket': intent.ticket})}"
    asked = {node: settled if node in intent.nodes or not intent.nodes else intent.save_id for node in by_node}
    outcome = FanOut.run(by_node, lambda node: _ask(by_node[node], asked[node]))
    for node, error in outcome.errors.items():
        log.info("asked %s about save %s: %s", by_node[node].label, intent.save_id, error)
        # A node that answers with an error is not down: it is asked again for the next save.
        if isinstance(error, StoreUnavailable):
            silent.add(node)
    return outcome.results


def _ask(address: AgentAddress, query: str) -> Answer:
    with AgentClient(address, SETTLE_TIMEOUT_S) as client:
        state = client.call("GET", f"/v1/saves/{query}").get("state")
    try:
        return Answer(state)
    except ValueError as exc:
        save_id = query.partition("?")[0]
        raise PeerProtocolError(
            f"{address.label} reports an unknown state of save {save_id}: {str(state)[:80]!r}."
        ) from exc


def _carry_out(
    service: NodeService, stale_save: StaleSave, settlement: Settlement, addresses: Mapping[str, AgentAddress]
) -> None:
    save_id, checkpoint_id = stale_save.intent.save_id, stale_save.intent.checkpoint_id
    if settlement.fate is Fate.COMPLETE:
        _stage_decision(service, stale_save.intent, [addresses[node] for node in settlement.sources])
        service.commit(save_id)
        log.warning("completed save %s of %r, which a peer has committed", save_id, checkpoint_id)
    elif settlement.fate is Fate.DROP:
        service.abort(save_id, stale_save.why, unless_decided=True)
        log.warning("removed the staged files of save %s of %r: %s", save_id, checkpoint_id, stale_save.why)
    if settlement.fate is Fate.IN_DOUBT:
        is_news = service.in_doubt.record_in_doubt(stale_save.intent, settlement.waits_for)
        if not _is_gone(service, save_id) and is_news:
            waits = ", ".join(settlement.waits_for)
            log.warning("save %s of %r is in doubt: node %s did not answer", save_id, checkpoint_id, waits)
    else:
        service.in_doubt.settle(save_id)


def _is_gone(service: NodeService, save_id: str) -> bool:
    """Whether the save was aborted or published while nodes were asked. Then it is no longer in doubt."""
    if service.store.has_intent(save_id):
        return False
    service.in_doubt.settle(save_id)
    return True


def _stage_decision(service: NodeService, intent: Intent, sources: Sequence[AgentAddress]) -> None:
    """Stages manifest and metadata of a save, from the nodes that published it. Each comes from the first intact source.

    Raises:
        ReplicatedCkptError: no source has it; the staging is unchanged.
    """
    checkpoint_id = intent.checkpoint_id or _ask_name(intent.save_id, sources)
    try:
        manifest, raw = fetch_manifest(checkpoint_id, intent.save_id, sources)
    except ObjectMissing:
        # A user may have renamed it there: this node then publishes its part under the new name.
        renamed = _ask_name(intent.save_id, sources)
        if renamed == checkpoint_id:
            raise
        service.store.begin(replace(intent, checkpoint_id=renamed, overwrite=False))  # refused where that name is taken
        checkpoint_id = renamed
        manifest, raw = fetch_manifest(checkpoint_id, intent.save_id, sources)
    metadata = fetch_metadata(checkpoint_id, manifest, sources)
    # The manifest last: with it the save counts as decided, and must be complete.
    service.store.put_small(intent.save_id, METADATA_NAME, metadata)
    service.store.put_small(intent.save_id, MANIFEST_NAME, raw)


def _ask_name(save_id: str, sources: Sequence[AgentAddress]) -> str:
    """The checkpoint id of a save on the nodes that published it."""

    def ask(client: AgentClient) -> str | None:
        name = client.call("GET", f"/v1/saves/{save_id}").get("checkpoint_id")
        return name if isinstance(name, str) and name else None

    return fetch_first(sources, ask, f"the name of save {save_id}")


_PAUSE_FIRST_S, _PAUSE_MAX_S = 0.3, 3.0
"""Pause between two looks at a save. Each look asks all nodes of the save, once for each submitted shard."""
FOLLOW_S = 60.0
"""How long a save is followed after the last sign of life from its coordinator's node. Then re-protection settles it."""
STAY_S = 90.0
"""How long an agent that ranks started stays after it opened a save: by then re-protection has settled the save."""


def awaits_settling(service: NodeService) -> bool:
    """Whether a save is staged here that is too young for re-protection to settle.

    Raises:
        StoreError: the node's own store cannot be read.
    """
    staged = service.store.list_staged()
    return any(service.was_opened_within(STAY_S, each) and not service.in_doubt.has(each.save_id) for each in staged)


def follow_stale_save(service: NodeService, save_id: str) -> None:
    """Waits until the save is published or aborted here, or has been in doubt for FOLLOW_S.

    While a rank or a finishing agent has locked the save, no node is asked. While the coordinator's node answers that
    it works on the save, the wait continues, however long other nodes write. An agent that ranks started does not exit
    meanwhile.
    """
    with service.submissions.following():
        until, pause_s = time.monotonic() + FOLLOW_S, _PAUSE_FIRST_S
        while time.monotonic() < until:
            try:
                if not service.store.is_staged(save_id):
                    return
                if service.is_locked(save_id) or not _is_in_doubt(service, save_id):
                    # A slow node still writes: the save is not stale while its coordinator works on it.
                    until = time.monotonic() + FOLLOW_S
            except (ReplicatedCkptError, OSError) as exc:  # it was published or aborted, or the disk refuses
                log.info("recovery of save %s is tried again soon: %s", save_id, exc)
            time.sleep(pause_s)
            # Longer each time: a node with many shards follows one save in as many threads.
            pause_s = min(_PAUSE_MAX_S, 1.3 * pause_s)


def _is_in_doubt(service: NodeService, save_id: str) -> bool:
    """Tries to settle the save; returns whether it is in doubt afterwards."""
    intent = service.store.intent_of(save_id)
    settle(service, [StaleSave(intent, "its ranks have ended")], service.peers.read_all())
    return service.in_doubt.has(save_id)
