"""Telling a node that one of its files seems bad."""

import logging

from replicated_ckpt.errors import ReplicatedCkptError
from replicated_ckpt.stores.peer.client import AgentAddress, AgentClient

log = logging.getLogger(__name__)


def tell_suspect(address: AgentAddress, checkpoint_id: str, save_id: str, name: str, why: str) -> None:
    """Tells a node that one of its files was found bad; its agent reads it again and mends it. Failing to is logged."""
    document = {"checkpoint_id": checkpoint_id, "save_id": save_id, "name": name, "why": why[:500]}
    try:
        with AgentClient(address) as client:
            client.call("POST", "/v1/suspects", document)
    except ReplicatedCkptError as exc:
        log.warning("could not tell %s that its %s/%s seems bad: %s", address.label, checkpoint_id, name, exc)
