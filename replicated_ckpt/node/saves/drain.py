"""Draining: an agent that receives SIGTERM first finishes its part of the open saves."""

import logging
import threading
import time

from replicated_ckpt.core.protocol.settlement import Answer
from replicated_ckpt.errors import StoreUnavailable
from replicated_ckpt.node.saves.service import OPEN_GRACE_S, NodeService
from replicated_ckpt.stores.peer.client import AgentClient
from replicated_ckpt.stores.threads import FanOut

log = logging.getLogger(__name__)

SILENT_S = 5.0
"""The agent does not wait longer than this for a silent node."""
_ASK_TIMEOUT_S = 3.0
_PAUSE_S = 0.1
Debt = tuple[str, str]
"""An unfinished save, and the node where it is unfinished: this node, or one that needs this agent to publish it."""


class Draining:
    """The unfinished work of an agent that stops. Meanwhile the agent answers its peers, but opens no save. One thread."""

    def __init__(self, service: NodeService, hurry: threading.Event) -> None:
        """`hurry`: set once the agent receives a second signal to stop."""
        self._service, self._hurry = service, hurry
        self._own = service.node_id
        # From here on no save opens: else one after the other would keep the agent for ever.
        self._open = service.refuse_saves()
        self._silent_since: dict[Debt, float] = {}
        self._settled: set[Debt] = set()

    def run(self, within_s: float, told_at: float) -> None:
        """Returns once all work is done, `hurry` is set, or `within_s` have passed since `told_at`. Logs the work that
        is left.
        """
        deadline = told_at + within_s
        owed = self._find_owed()
        if owed:
            log.info("completes its open saves, for at most %.0f s: %s", within_s, _describe(owed))
        while owed and time.monotonic() < deadline and not self._hurry.wait(_PAUSE_S):
            owed = self._find_owed()
        if owed:
            why = (
                "received another signal to stop"
                if self._hurry.is_set()
                else f"received the signal to stop {within_s:.0f} s ago"
            )
            log.error("%s; exits with this unfinished: %s", why, _describe(owed))

    def _find_owed(self) -> dict[Debt, str]:
        """By debt, the reason why it is unfinished."""
        saves = self._open | self._find_taken()
        owed = {(save_id, self._own): why for save_id in saves if (why := self._find_own_part(save_id))}
        for save_id, nodes in self._service.finisher.read_published().items():
            owed |= {(save_id, node): f"node {node} has not published it" for node in nodes}
        others = [debt for debt in owed if debt[1] != self._own and debt not in self._settled]
        asked = FanOut.run(others, self._is_settled)
        for debt in others:
            is_silent = isinstance(asked.errors.get(debt), StoreUnavailable)
            # The agent waits only for silent nodes: a node that answers with an error needs nothing from it.
            if asked.results.get(debt, self._waits_in_vain(debt) if is_silent else True):
                self._settled.add(debt)
        return {debt: why for debt, why in owed.items() if debt not in self._settled}

    def _find_taken(self) -> frozenset[str]:
        """Staged saves with submitted shards. Ranks can open saves without the agent, even once it is stopping."""
        staged = (intent.save_id for intent in self._service.store.list_staged())
        return frozenset(filter(self._service.submissions.has, staged))

    def _find_own_part(self, save_id: str) -> str:
        """Why a save is not finished on this node; "" if it has ended here, or does not need this agent."""
        service = self._service
        unwritten = service.submissions.list_unwritten(save_id)
        if unwritten:
            return f"{', '.join(unwritten)} is not written"
        if service.finisher.is_finishing(save_id):
            return "it is not decided"
        # Its ranks may not have locked it yet: without the agent the save would fail.
        if service.was_opened_within(OPEN_GRACE_S, service.store.intent_of(save_id)):
            return "it was opened just now"
        # Its ranks need this agent to commit the save.
        if service.is_locked(save_id):
            return "ranks of this node work on it"
        return "it is not published" if self._is_followed(save_id) else ""

    def _is_followed(self, save_id: str) -> bool:
        """Whether this agent has shards of a save without ranks, and asks the coordinator's node for the outcome."""
        service = self._service
        if not service.submissions.has(save_id) or not service.store.is_staged(save_id):
            return False
        return not (service.in_doubt.has(save_id) and self._waits_in_vain((save_id, self._own)))

    def _is_settled(self, debt: Debt) -> bool:
        """Whether the other node no longer needs this node. A node that announced its exit needs nothing."""
        save_id, node = debt
        # Not asked: its agent has ended, and each question would cost a time-out.
        if self._service.peers.is_away(node):
            return True
        with AgentClient(self._service.peers.address_of(node), _ASK_TIMEOUT_S) as client:
            state = client.call("GET", f"/v1/saves/{save_id}").get("state")
        self._silent_since.pop(debt, None)
        return state not in {Answer.STAGED.value, Answer.WORKING.value}

    def _waits_in_vain(self, debt: Debt) -> bool:
        """Whether a node has been silent for SILENT_S. Its part of the save continues when both nodes are back."""
        return time.monotonic() > self._silent_since.setdefault(debt, time.monotonic()) + SILENT_S


def _describe(owed: dict[Debt, str]) -> str:
    return "; ".join(f"save {save_id}: {why}" for (save_id, _), why in sorted(owed.items()))
