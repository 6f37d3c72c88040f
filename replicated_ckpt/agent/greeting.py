"""Greetings: an agent that starts tells its peers where it is, one that leaves that its disk is intact."""

import logging
import threading
from collections.abc import Mapping
from typing import Any

from replicated_ckpt.agent.endpoint import Endpoint
from replicated_ckpt.agent.service import NodeService
from replicated_ckpt.errors import PeerProtocolError
from replicated_ckpt.stores.agent_client import AgentAddress, AgentClient
from replicated_ckpt.stores.fanout import FanOut

log = logging.getLogger(__name__)

GREETING_TIMEOUT_S = 2.0


def saying_hello(service: NodeService, endpoint: Endpoint) -> threading.Thread:
    """Greets every known peer, in the background, and learns from each whom it knows; returns the thread that does."""
    thread = threading.Thread(target=_greet, args=(service, endpoint), name="rckpt-hello", daemon=True)
    thread.start()
    return thread


def _greet(service: NodeService, endpoint: Endpoint) -> None:
    document = {"peer": {**endpoint.address().to_json(), "host": ""}}

    def greeted(address: AgentAddress) -> list[AgentAddress]:
        with AgentClient(address, GREETING_TIMEOUT_S) as client:
            return addresses_in(client.call("POST", "/v1/hello", document))

    outcome = FanOut[AgentAddress, list[AgentAddress]]().run(service.peers.known(), greeted)
    for heard in outcome.results.values():
        service.peers.hear([peer for peer in heard if peer.node_id != service.node_id])
    for address, error in outcome.errors.items():
        log.info("could not greet %s: %s", address.label, error.message)


def addresses_in(answer: Mapping[str, Any]) -> list[AgentAddress]:
    """The addresses that an agent answered with.

    Raises:
        PeerProtocolError: it did not.
    """
    try:
        return [AgentAddress.from_json(fields) for fields in answer["peers"]]
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise PeerProtocolError(f"An agent listed its peers wrongly: {type(exc).__name__}: {exc}.") from exc


def said_goodbye(service: NodeService) -> None:
    """Tells every known peer that this agent leaves in good order; one that cannot be told finds out by itself."""

    def told(address: AgentAddress) -> None:
        with AgentClient(address, GREETING_TIMEOUT_S) as client:
            client.call("POST", "/v1/bye", {"node_id": service.node_id})

    FanOut[AgentAddress, None]().run(service.peers.known(), told)
