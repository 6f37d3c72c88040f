"""What the ranks wrote, posted by each and gathered by the coordinator before the commit."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from replicated_ckpt.dcp.agreement.decision import Receipt, SaveDecision
from replicated_ckpt.dcp.agreement.nodes import AgentCluster
from replicated_ckpt.dcp.node.node import NodePost
from replicated_ckpt.errors import SaveAborted
from replicated_ckpt.stores.peer.client import AgentAddress


def make_receipt_post(receipt: Receipt, save_id: str, node: NodePost) -> dict[str, Any]:
    """What a rank posts once it has written; `node` as it is by then."""
    where = {"address": node.address.to_json(), "silence": node.silence, "invitation": node.invitation}
    return {**receipt.to_json(), "save_id": save_id, **where}


def collect_receipts(
    posts: Sequence[Mapping[str, Any]], decision: SaveDecision, own_node: str
) -> tuple[list[Receipt], AgentCluster]:
    """The receipts of all ranks, and the nodes where their agents are now: one may have died and been started again.

    Raises:
        SaveAborted: a rank has not written for this save.
    """
    stale = [rank for rank, post in enumerate(posts) if post["save_id"] != decision.save_id]
    if stale:
        raise SaveAborted(f"Ranks {stale} have not written for save {decision.save_id}.")
    addresses = [AgentAddress.from_json(post["address"]) for post in posts]
    silence = {address.node_id: post["silence"] for address, post in zip(addresses, posts, strict=True)}
    silence = {node: why for node, why in silence.items() if why}
    invitations = [str(post["invitation"]) for post in posts]
    openers = [replace(at, token=given or at.token) for at, given in zip(addresses, invitations, strict=True)]
    cluster = AgentCluster(addresses, own_node, openers, silence, decision.unreached, decision.ticket)
    return [Receipt.from_json(post) for post in posts], cluster


def check_none_aborted(receipts: Sequence[Receipt], decision: SaveDecision) -> None:
    """Raises SaveAborted: a rank stopped because the save was given up."""
    aborted = [f"rank {rank}: {receipt.aborted}" for rank, receipt in enumerate(receipts) if receipt.aborted]
    if aborted:
        raise SaveAborted(f"Save {decision.save_id} was given up: {'; '.join(aborted)}")
