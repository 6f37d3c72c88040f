"""Checkpoints of FileSystemWriter on the nodes, for `ls`, `verify` and `repair`."""

from collections.abc import Iterable, Sequence

from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.cli.look.checkpoints import UNMANAGED, CheckpointSeen
from replicated_ckpt.cli.look.nodes import NodesSeen
from replicated_ckpt.core.layout import METADATA_NAME
from replicated_ckpt.core.reading.unmanaged_files import UnmanagedCheckpoint
from replicated_ckpt.errors import (
    CheckpointAmbiguous,
    MetadataUnsafe,
    PeerProtocolError,
    StoreError,
)
from replicated_ckpt.node.peers.unmanaged_audit import UnmanagedAudit, UnmanagedLook
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.wording import plural


def list_rows(store: LocalStore, seen: NodesSeen, without: Iterable[str]) -> list[CheckpointSeen]:
    """A row of `ls` for each of them."""
    look = UnmanagedLook(store, seen.own_node, seen.reached)
    return [_row(look, checkpoint) for checkpoint in look.checkpoints(None, without)]


def _row(look: UnmanagedLook, checkpoint: UnmanagedCheckpoint) -> CheckpointSeen:
    nodes = tuple(holding.node_id for holding in checkpoint.holdings)
    note, missing = _state(look, checkpoint)
    return CheckpointSeen(checkpoint.checkpoint_id, UNMANAGED, nodes, missing=missing, note=note)


def _state(look: UnmanagedLook, checkpoint: UnmanagedCheckpoint) -> tuple[str, tuple[str, ...]]:
    """Its state, and its missing files. Without a valid `.metadata` the shards are unknown."""
    if not checkpoint.nodes_with_metadata:
        return "stock, no .metadata", (METADATA_NAME,)
    try:
        save = look.examine(checkpoint).save
    except CheckpointAmbiguous:
        return "stock, contradictory", (METADATA_NAME,)
    except (MetadataUnsafe, StoreError, PeerProtocolError):
        return "stock, unreadable", (METADATA_NAME,)
    note = f"stock, {plural(len(save.missing), 'shard')} missing" if save.missing else "stock, unprotected"
    return note, tuple(save.missing)


def print_audits(audits: Sequence[UnmanagedAudit]) -> None:
    for audit in audits:
        for finding in audit.findings:
            print(finding)
        if audit.problem:
            print(f"stock: {audit.checkpoint_id}: {audit.problem}")
        elif audit.missing:
            print(f"stock: {audit.checkpoint_id}: no node that was reached has {', '.join(audit.missing)}")
        else:
            print(
                f"stock: {audit.checkpoint_id} of stock torch, unprotected: {audit.bytes_read} bytes read, "
                f"{audit.unchecked} items without a CRC32: {('sound' if audit.is_sound else 'NOT sound')}"
            )


def worst_code(audits: Sequence[UnmanagedAudit]) -> ExitCode:
    if any(audit.missing for audit in audits):
        return ExitCode.SHARD_LOST
    return ExitCode.OK if all(audit.is_sound for audit in audits) else ExitCode.FAILED
