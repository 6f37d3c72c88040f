"""Settling what a crash left behind: a save that any node committed is completed here, any other is removed."""

import logging
from collections.abc import Sequence

from replicated_ckpt.agent.service import Leftover, NodeService
from replicated_ckpt.core.layout import MANIFEST_NAME, METADATA_NAME
from replicated_ckpt.errors import ReplicatedCkptError
from replicated_ckpt.stores.agent_client import AgentAddress, AgentClient, file_path

log = logging.getLogger(__name__)


def settle(service: NodeService, leftovers: Sequence[Leftover], peers: Sequence[AgentAddress]) -> None:
    """Ends each save that is over. `peers` are the nodes of the save or load that found it, other than this one.

    Holds afterwards: it is committed here if it is on any peer that answered, or if its decision lies here; else nothing
    of it is left here, unless it may live. A save is acknowledged to the trainer only after agents committed it, so one
    that no node of the present world has committed was never acknowledged, or is beyond the failures that its copies cover.
    """
    for leftover in leftovers:
        save_id = leftover.intent.save_id
        try:
            if not service.store.is_decided(save_id) and not _decision_fetched(service, save_id, peers):
                if leftover.may_live:
                    continue
                service.abort(save_id, leftover.why)
                log.warning(
                    "removed unfinished save %s of %r: %s", save_id, leftover.intent.checkpoint_id, leftover.why
                )
                continue
            service.complete(save_id)
            log.warning("completed save %s of %r, which a peer had committed", save_id, leftover.intent.checkpoint_id)
        except ReplicatedCkptError as exc:
            log.error("could not settle save %s: %s", save_id, exc)  # noqa: TRY400 - the error explains itself


def _decision_fetched(service: NodeService, save_id: str, peers: Sequence[AgentAddress]) -> bool:
    """Stages the manifest and the metadata of a save that a peer has committed; False if none has."""
    for peer in peers:
        try:
            with AgentClient(peer) as client:
                answer = client.call("GET", f"/v1/saves/{save_id}")
                if answer.get("state") != "committed":
                    continue
                for name in (METADATA_NAME, MANIFEST_NAME):
                    raw = client.fetch("GET", file_path(str(answer["checkpoint_id"]), save_id, name))
                    service.store.put_small(save_id, name, raw)
                return True
        except ReplicatedCkptError as exc:
            log.warning("asked %s about save %s: %s", peer.label, save_id, exc)
    return False
