"""Settling what a crash left behind: a save that any node committed is completed here, any other is removed."""

import logging
from collections.abc import Sequence

from replicated_ckpt.agent.service import Leftover, NodeService
from replicated_ckpt.core.layout import MANIFEST_NAME, METADATA_NAME
from replicated_ckpt.core.manifest import decoded_manifest
from replicated_ckpt.errors import ReplicatedCkptError, StoreUnavailable
from replicated_ckpt.stores.agent_client import AgentAddress, AgentClient, file_path

log = logging.getLogger(__name__)


def settle(service: NodeService, leftovers: Sequence[Leftover], peers: Sequence[AgentAddress]) -> None:
    """Ends each save that is over. `peers` are the nodes of the save or load that found it, other than this one.

    Holds afterwards: it is committed here if it is on any peer that answered, or if its decision lies here; else nothing
    of it is left here, unless it may live. A save is acknowledged to the trainer only after agents committed it, so one
    that no node of the present world has committed was never acknowledged, or is beyond the failures that its copies cover.
    """
    for leftover in leftovers:
        try:
            with service.completing:
                _settle_one(service, leftover, peers)
        except ReplicatedCkptError as exc:
            log.error("could not settle save %s: %s", leftover.intent.save_id, exc)  # noqa: TRY400 - it explains itself


def _settle_one(service: NodeService, leftover: Leftover, peers: Sequence[AgentAddress]) -> None:
    save_id, checkpoint_id = leftover.intent.save_id, leftover.intent.checkpoint_id
    if service.state_of(save_id)["state"] == "committed":
        service.store.abort(save_id)  # it is in place, and stays: only what surrounded it is left
    elif _decision_fetched(service, save_id, peers):
        service.complete(save_id)
        log.warning("completed save %s of %r, which a peer had committed", save_id, checkpoint_id)
    elif not leftover.may_live:
        service.abort(save_id, leftover.why)
        log.warning("removed unfinished save %s of %r: %s", save_id, checkpoint_id, leftover.why)


def _decision_fetched(service: NodeService, save_id: str, peers: Sequence[AgentAddress]) -> bool:
    """Stages the manifest and the metadata of a save that a peer has committed; False if none has.

    Raises:
        ReplicatedCkptError: a peer answered that it cannot tell. It may have committed the save, so nothing is removed.
    """
    unclear: ReplicatedCkptError | None = None
    for peer in peers:
        try:
            decision = _fetched_from(peer, save_id)
        except StoreUnavailable as exc:
            log.warning("asked %s about save %s: %s", peer.label, save_id, exc)
        except ReplicatedCkptError as exc:
            log.warning("asked %s about save %s: %s", peer.label, save_id, exc)
            unclear = exc
        else:
            if decision is not None and service.store.staging(save_id).is_dir():
                for name, raw in decision.items():
                    service.store.put_small(save_id, name, raw)
                return True
    if unclear is not None:
        raise unclear
    return False


def _fetched_from(peer: AgentAddress, save_id: str) -> dict[str, bytes] | None:
    """Metadata and manifest of a save that the peer has committed; None if it has not."""
    with AgentClient(peer) as client:
        answer = client.call("GET", f"/v1/saves/{save_id}")
        if answer.get("state") != "committed":
            return None
        checkpoint_id = str(answer.get("checkpoint_id"))
        raw = client.fetch("GET", file_path(checkpoint_id, save_id, MANIFEST_NAME))
        size = decoded_manifest(raw, peer.label).metadata_bytes
        metadata = client.fetch_file(file_path(checkpoint_id, save_id, METADATA_NAME), size)
        return {METADATA_NAME: metadata, MANIFEST_NAME: raw}
