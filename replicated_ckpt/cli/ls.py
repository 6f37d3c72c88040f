"""`replicated-ckpt ls`: which checkpoints exist, and how many copies of each shard can be found now."""

import argparse
import json
from typing import Any

from replicated_ckpt.agent.peers.address_book import PeerBook
from replicated_ckpt.cli import unmanaged
from replicated_ckpt.cli.doubts import list_staged_saves
from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.core.inventory import Holding, SaveFound, saves_found
from replicated_ckpt.core.manifest import Manifest
from replicated_ckpt.core.protocol.seen_save import see_save
from replicated_ckpt.errors import CheckpointNotFound, ManifestInvalid, ObjectMissing, ReplicatedCkptError
from replicated_ckpt.stores.bucket.bucket import Bucket
from replicated_ckpt.stores.bucket.opening import open_client
from replicated_ckpt.stores.bucket.url import ObjectTarget
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.peer.client import AgentClient

HELP = "List the checkpoints that this node and the peers it has met hold."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--root", required=True, help="a node's store")
    parser.add_argument("--object-store", metavar="URL", help="list what lies there, too, such as s3://bucket/prefix")
    parser.add_argument("--json", action="store_true", help="the same for machines")


def run(arguments: argparse.Namespace) -> int:
    store = LocalStore(arguments.root)
    if not store.root.is_dir():
        raise CheckpointNotFound(f"{store.root} is no directory.", "Name the node's store with --root.")
    node_id = store.known_node_id()
    holdings, unreachable = _look(store, node_id)
    if arguments.object_store:
        holdings += _in_bucket(arguments.object_store)
    rows = [_row(save, _manifest(store, save)) for save in saves_found(holdings)]
    rows += unmanaged.list_rows(store, {holding.checkpoint_id for holding in holdings})
    if arguments.json:
        staged = [save.to_json() for save in list_staged_saves(store, node_id)]
        document = {"node_id": node_id, "checkpoints": rows, "unreachable": unreachable, "staged": staged}
        print(json.dumps(document, indent=2))
        return ExitCode.OK
    for row in rows:
        print(f"{row['checkpoint_id']:24} {row['copies']:18} on nodes {', '.join(row['nodes'])}")
    for save in list_staged_saves(store, node_id):
        print(f"in doubt: {save}")
    for line in unreachable:
        print(f"not reached: {line}")
    return ExitCode.OK


def _look(store: LocalStore, node_id: str) -> tuple[list[Holding], list[str]]:
    holdings = list(store.catalog.holdings(node_id))
    unreachable = []
    for peer in PeerBook(store.root_agent_directory()).known():
        try:
            with AgentClient(peer) as client:
                found = client.call("GET", "/v1/holdings")["holdings"]
                holdings += [Holding.from_json(fields) for fields in found]
        except (ReplicatedCkptError, ValueError, KeyError, TypeError) as exc:
            unreachable.append(f"{peer.label}: {exc}")
    return holdings, unreachable


def _in_bucket(url: str) -> list[Holding]:
    """What is committed in the bucket; credentials come from the environment or a profile, as for s3fs."""
    client = open_client(ObjectTarget.checked(url, None))
    try:
        return [save.holding for save in Bucket(client).saves()]
    finally:
        client.close()


def _manifest(store: LocalStore, save: SaveFound) -> Manifest | None:
    try:
        manifest = store.catalog.manifest(save.checkpoint_id)
    except (ObjectMissing, ManifestInvalid):
        return None
    return manifest if manifest.save_id == save.save_id else None


def _row(save: SaveFound, manifest: Manifest | None) -> dict[str, Any]:
    return {
        "checkpoint_id": save.checkpoint_id,
        "save_id": save.save_id,
        "sequence": save.sequence,
        "nodes": [holding.node_id for holding in save.holdings],
        "copies": _copies(save, manifest),
    }


def _copies(save: SaveFound, manifest: Manifest | None) -> str:
    if manifest is None:
        return "not held here"
    nodes = [holding.node_id for holding in save.holdings]
    counts = [len(intact) for intact in see_save(save, manifest, nodes, unsure=(), remains=()).intact.values()]
    least = min(counts, default=0)
    if least == 0 and counts:
        return f"{counts.count(0)} shards lost"
    return f"{least} of {manifest.copies} copies"
