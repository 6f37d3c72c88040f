"""Requests of a rank to its own node's agent, which is started for them if none runs."""

import time
from typing import Any

from replicated_ckpt.agent.start.launch import ensure_agent
from replicated_ckpt.errors import StoreUnavailable
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.peer.client import AgentClient

ANSWER_WITHIN_S = 30.0
_TRIES = 2
_PAUSE_S = 0.2


def ask_agent(
    store: LocalStore, method: str, path: str, document: Any = None, within_s: float = ANSWER_WITHIN_S
) -> dict[str, Any]:
    """The answer of this node's agent, within so many seconds; an agent that has died meanwhile is started again.

    Raises:
        AgentUnavailable, StoreError: it does not answer. Its refusals, by class.
    """
    deadline = time.monotonic() + within_s
    for tries_left in reversed(range(_TRIES)):
        try:
            endpoint = ensure_agent(store)
            with AgentClient(endpoint.local_address()) as client, client.within(within_s):
                return client.call(method, path, document)
        # The agent may have ended between its endpoint file and the request, as an idle one does.
        except StoreUnavailable:
            if tries_left == 0 or time.monotonic() > deadline:
                raise
            time.sleep(_PAUSE_S)
    raise AssertionError("the last try returns or raises")
