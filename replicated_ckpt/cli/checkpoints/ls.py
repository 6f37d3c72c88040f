"""`replicated-ckpt ls`: which checkpoints exist, and how many copies of each shard can be found now."""

import argparse
import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Any

from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.cli.look.checkpoints import (
    CheckpointSeen,
    advise,
    describe_damaged_manifests,
    describe_newer,
    describe_totals,
    find_needed,
    format_checkpoints,
    list_checkpoints,
    list_unmanaged,
)
from replicated_ckpt.cli.look.conflicting_runs import describe_conflicting_runs
from replicated_ckpt.cli.look.given_nodes import add_nodes_argument, open_book
from replicated_ckpt.cli.look.given_root import (
    add_root_argument,
    add_start_argument,
    describe_memory_tier,
    name_root,
    open_store_of,
    refuse_no_store,
)
from replicated_ckpt.cli.look.nodes import NO_NODES, NodesSeen, look_at_nodes
from replicated_ckpt.cli.look.progress import print_if_slow
from replicated_ckpt.cli.look.waiting_saves import advise_on_in_doubt, describe_wait, list_staged_saves
from replicated_ckpt.cli.printing import add_output_argument
from replicated_ckpt.errors import StoreError
from replicated_ckpt.node.peers.watch import describe_silence
from replicated_ckpt.stores.bucket.bucket import Bucket, BucketSave
from replicated_ckpt.stores.bucket_client.opening import open_client
from replicated_ckpt.stores.bucket_client.url import ObjectTarget
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.wording import describe_bytes, plural

HELP = "List the checkpoints on this node and its peers."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_root_argument(parser, required=False)
    parser.add_argument(
        "--object-store",
        metavar="URL",
        help="also list what is in this bucket, such as s3://bucket/prefix; without --root, only that",
    )
    add_nodes_argument(parser)
    add_start_argument(parser)
    add_output_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Exit code: OK if the node's own store could be listed, whatever it holds and whichever nodes did not answer.

    Raises:
        CheckpointNotFound, ConfigInvalid, AgentUnavailable: as `open_store_of`. StoreError: the node's store or the bucket
            cannot be read. The table of the nodes is printed before an error of the bucket.
    """
    if arguments.root is None and not arguments.nodes:
        return _list_bucket_alone(arguments)
    store = open_store_of(arguments)
    seen = look_at_nodes(store, open_book(store, arguments.nodes))
    there, problem = None, None
    try:
        there = None if arguments.object_store is None else list_bucket(name_bucket(arguments.object_store, store))
    except StoreError as exc:
        # Raised after the table: a bucket that does not answer must not hide the checkpoints on the nodes.
        problem = exc
    rows = list_checkpoints(seen, there)
    rows += list_unmanaged(store, seen, {row.checkpoint_id for row in rows})
    if arguments.json:
        _print_json(store, seen, rows)
    else:
        _print(store, seen, rows)
    if problem is not None:
        raise problem
    return ExitCode.OK


def _list_bucket_alone(arguments: argparse.Namespace) -> int:
    target = name_bucket_alone(arguments)
    rows = list_checkpoints(NO_NODES, list_bucket(target))
    if arguments.json:
        print(json.dumps({"checkpoints": [row.to_json() for row in rows], "object_store": target.url}, indent=2))
    else:
        print(format_checkpoints(rows, NO_NODES))
        size = describe_bytes(sum(row.size_bytes or 0 for row in rows))
        print(f"{plural(len(rows), 'checkpoint')}, {size} in {target.url}; no node was asked, as there is no --root")
    return ExitCode.OK


def name_bucket_alone(arguments: argparse.Namespace) -> ObjectTarget:
    """As `name_bucket`, for a command without `--root`. Raises ConfigInvalid: there is no `--object-store`, either."""
    if arguments.object_store is None or arguments.start_agents:
        raise refuse_no_store(otherwise=", or a bucket alone with --object-store")
    return name_bucket(arguments.object_store, None)


def name_bucket(url: str, store: LocalStore | None) -> ObjectTarget:
    """The bucket that an option names. No request is sent. Credentials come from the environment or a profile, as for s3fs.

    Raises:
        ConfigInvalid: the URL names no bucket, or a place in the node's store, or the package for its scheme is missing.
    """
    target = ObjectTarget.check_supported(url, None)
    target.check_is_apart(None if store is None else store.root)
    # Opened now: a missing package must show at once, not after every node was read.
    open_client(target).close()
    return target


def list_bucket(target: ObjectTarget) -> Sequence[BucketSave]:
    with closing(open_client(target)) as client, print_if_slow(target.url):
        return Bucket(client).saves()


def _print_json(store: LocalStore, seen: NodesSeen, rows: Sequence[CheckpointSeen]) -> None:
    nodes: list[dict[str, Any]] = [
        {"node_id": node, "host": seen.hosts.get(node, ""), "is_reached": True}
        for node in sorted(seen.holdings_by_node)
    ]
    nodes += [
        {"node_id": node, "host": seen.hosts.get(node, ""), "is_reached": False, "error": describe_silence(error)}
        for node, error in sorted(seen.unreached.items())
    ]
    staged = [asdict(save) for save in list_staged_saves(store)]
    document = {"node_id": seen.own_node, "nodes": nodes, "staged": staged}
    document |= {
        "conflicting_runs": describe_conflicting_runs(rows, seen, name_root(store)),
        "memory_tier": describe_memory_tier(store),
    }
    document |= {"newer_format": seen.newer}
    print(json.dumps({**document, "checkpoints": [row.to_json() for row in rows]}, indent=2))


def _print(store: LocalStore, seen: NodesSeen, rows: Sequence[CheckpointSeen]) -> None:
    print(format_checkpoints(rows, seen))
    for line in (describe_totals(rows, seen), *describe_memory_tier(store)):
        print(line)
    for newer in seen.newer:
        print(describe_newer(newer))
    staged = list_staged_saves(store)
    for save in staged:
        print(f"in doubt: {save}; {describe_wait(save, seen)}")
    for line in describe_damaged_manifests(rows, seen):
        print(line)
    steps = [step for save in staged for step in advise_on_in_doubt(save, seen, name_root(store))]
    for line in [
        *describe_conflicting_runs(rows, seen, name_root(store)),
        *seen.describe_unreached(find_needed(rows, seen)),
        *steps,
        *advise(rows, seen, name_root(store)),
    ]:
        print(line)
