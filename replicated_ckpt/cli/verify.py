"""`replicated-ckpt verify`: reads every file of every checkpoint on every node that it reaches, and changes nothing."""

import argparse
import json
from typing import Any

from replicated_ckpt.agent.audit import Audit, Auditor
from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.errors import CheckpointNotFound
from replicated_ckpt.stores.local import LocalStore

HELP = "Read everything that this node and its peers hold, check every byte, and change nothing."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--root", required=True, help="a node's store")
    parser.add_argument("--checkpoint", metavar="ID", help="only this checkpoint (default: all)")
    parser.add_argument("--json", action="store_true", help="the same for machines")


def run(arguments: argparse.Namespace) -> int:
    """Exit code: OK if every byte is as it was saved and every shard has its copies; see ExitCode for the rest.

    Raises:
        CheckpointNotFound, StoreError
    """
    audit = Auditor(existing_store(arguments.root)).audited(arguments.checkpoint)
    if arguments.checkpoint and not audit.checkpoint_ids:
        raise CheckpointNotFound(f"No node that was reached holds {arguments.checkpoint!r}.")
    if arguments.json:
        print(json.dumps(as_json(audit), indent=2))
    else:
        _print(audit)
    return exit_code(audit)


def existing_store(root: str) -> LocalStore:
    store = LocalStore(root)
    if not store.root.is_dir():
        raise CheckpointNotFound(f"{store.root} is no directory.", "Name the node's store with --root.")
    return store


def exit_code(audit: Audit) -> ExitCode:
    if audit.plan.lost:
        return ExitCode.SHARD_LOST
    if not audit.is_intact:
        return ExitCode.FAILED
    return ExitCode.UNREACHABLE if audit.unreachable else ExitCode.OK


def as_json(audit: Audit) -> dict[str, Any]:
    return {
        "checkpoints": list(audit.checkpoint_ids),
        "is_intact": audit.is_intact,
        "nodes": [{"node_id": found.node_id, "bytes_read": found.bytes_read} for found in audit.readings],
        "findings": [finding.to_json() for finding in audit.findings],
        "unreachable": list(audit.unreachable),
        "plan": audit.plan.to_json(),
    }


def _print(audit: Audit) -> None:
    for finding in audit.findings:
        print(finding)
    for short in audit.plan.short:
        print(f"{'lost' if short.have == 0 else 'too few nodes'}: {short}")
    for action in audit.plan.copy:
        print(f"copy missing: {action.checkpoint_id}/{action.shard}; repair would make one on node {action.node_id}")
    for line in audit.unreachable:
        print(f"not reached: {line}")
    size = sum(reading.bytes_read for reading in audit.readings)
    print(
        f"{len(audit.checkpoint_ids)} checkpoints, {len(audit.readings)} nodes, {size} bytes read: "
        f"{'intact' if audit.is_intact else 'NOT intact'}"
    )
