"""`replicated-ckpt upload ID`: uploads one checkpoint to the object store, or waits for its upload."""

import argparse
import json
import sys
import time
from collections.abc import Collection, Mapping
from contextlib import closing
from dataclasses import asdict
from shlex import quote

from replicated_ckpt.agent.launch import ensure_agent
from replicated_ckpt.cli.checkpoints.ls import name_bucket
from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.cli.look.checkpoints import find_id
from replicated_ckpt.cli.look.given_root import add_root_argument, open_store
from replicated_ckpt.cli.look.nodes import NodesSeen, look_at_nodes
from replicated_ckpt.cli.look.progress import ProgressLine, describe_progress, parse_seconds
from replicated_ckpt.cli.printing import add_output_argument
from replicated_ckpt.core.manifest import Manifest
from replicated_ckpt.core.upkeep.upload_plan import UploadState
from replicated_ckpt.errors import (
    HINT_MARK,
    CheckpointExists,
    CheckpointNotFound,
    ConfigInvalid,
    ManifestInvalid,
    ManifestVersionUnknown,
    ObjectMissing,
    ReplicatedCkptError,
    UploadFailed,
)
from replicated_ckpt.node.peers.address_book import PeerBook
from replicated_ckpt.stores.bucket.bucket import Bucket, BucketSave
from replicated_ckpt.stores.bucket_client.opening import open_client
from replicated_ckpt.stores.bucket_client.url import ObjectTarget
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.peer.client import AgentAddress, AgentClient
from replicated_ckpt.stores.threads import FanOut
from replicated_ckpt.wording import list_some, one_line, plural

HELP = "Upload one checkpoint to the object store, or wait for an upload under way."
_POLL_S = 0.3
_SAID_EVERY_S = 3.0
_SHOWN_MAX = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", metavar="ID", help="the checkpoint, or latest")
    add_root_argument(parser)
    parser.add_argument(
        "--to", metavar="URL", help="target bucket, such as s3://bucket/prefix (default: the bucket of the save)"
    )
    parser.add_argument("--no-wait", action="store_true", help="start the upload, and do not wait for it")
    parser.add_argument(
        "--timeout-s",
        type=parse_seconds,
        default=600.0,
        metavar="SECONDS",
        help="how long to wait for the commit (default: %(default)s)",
    )
    add_output_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Exit code: OK if the checkpoint is committed in the bucket, or with `--no-wait` ordered. See ExitCode for the others.

    Credentials come from the environment or a profile, as for s3fs. Every agent that is reached gets the order, and
    uploads its own shards.
    """
    store = open_store(arguments.root)
    arguments.id = find_id(store, arguments.id)
    manifest = _manifest(store, arguments.id)
    url = manifest.upload.url if arguments.to is None and manifest.upload is not None else arguments.to
    if url is None:
        raise ConfigInvalid(f"The save of {arguments.id!r} names no object store.", "Name a bucket with --to.")
    target = name_bucket(url, store)
    # Such a bucket is in the agent's memory and ends with it, although the command would report a commit.
    if target.is_process_local:
        raise ConfigInvalid(f"{url} is in the memory of one process.", "Name a bucket that other processes can reach.")
    if arguments.to is not None:
        _check_replaceable(manifest, target)
    ordered, refused = _order(store, manifest, target, is_new=arguments.to is not None)
    stuck = _find_stuck(store, manifest, target, ordered, refused)
    if stuck and not arguments.no_wait:
        raise UploadFailed(arguments.id, target.url, stuck)
    for address, error in () if stuck else refused.items():
        said = f"{address.label} did not take the request, so other nodes upload its shards: {error.message}"
        print(said, file=sys.stderr if arguments.json else sys.stdout)
    if arguments.no_wait:
        text = f"{arguments.id}: the upload to {target.url} is requested{'' if not stuck else f', but {stuck}'}"
        state = UploadState(manifest.checkpoint_id, target.url, error=stuck)
    else:
        state = _wait_for_upload(store, manifest, target, arguments.timeout_s)
        is_over = state.state == "superseded"
        text = f"{arguments.id}: {state.error}" if is_over else f"{arguments.id}: committed in {target.url}"
    print(json.dumps(asdict(state), indent=2) if arguments.json else text)
    return ExitCode.FAILED if state.state == "superseded" else ExitCode.OK


def _manifest(store: LocalStore, checkpoint_id: str) -> Manifest:
    try:
        return store.catalog.manifest(checkpoint_id)
    except ManifestVersionUnknown:
        raise
    except (ObjectMissing, ManifestInvalid) as exc:
        what = (
            "has no manifest" if isinstance(exc, ObjectMissing) else f"has no valid manifest: {exc.message.rstrip('.')}"
        )
        raise CheckpointNotFound(
            f"{checkpoint_id!r} in {store.root} {what}.",
            f"Run the command on a node that holds it. `replicated-ckpt show {quote(checkpoint_id)} --root "
            f"{quote(str(store.root))}` lists them.",
        ) from exc


def _check_replaceable(manifest: Manifest, target: ObjectTarget) -> None:
    """Refuses the upload if another save has the name in the bucket, and this save has no prefix of its own."""
    if manifest.upload is not None and manifest.upload.has_own_prefix:
        return
    there = _save_in(manifest, target)
    if there is not None and there.save_id != manifest.save_id:
        raise CheckpointExists(
            f"{target.url} holds another save of {manifest.checkpoint_id!r}.",
            "Upload it under another prefix with --to.",
        )


def _save_in(manifest: Manifest, target: ObjectTarget) -> BucketSave | None:
    with closing(open_client(target)) as client:
        return Bucket(client).save_of(manifest.checkpoint_id)


def _order(
    store: LocalStore, manifest: Manifest, target: ObjectTarget, *, is_new: bool
) -> tuple[set[str], Mapping[AgentAddress, ReplicatedCkptError]]:
    """Orders the upload from every agent. Returns the nodes that accepted it, and the errors of the others.

    This node's agent must accept. `is_new`: the bucket is first named to this node's agent. Other agents accept a bucket
    only from their own user.
    """
    own = ensure_agent(store).local_address()
    peers = [peer for peer in PeerBook(store.root_agent_directory()).read_all() if peer.node_id != own.node_id]

    def order(address: AgentAddress) -> None:
        with AgentClient(address) as client:
            # The credentials stay on this host. Other nodes get those of the bucket from their own ranks.
            if address is own and is_new:
                client.call("POST", "/v1/object/target", target.to_json())
            client.call("POST", "/v1/object/upload", {"save_id": manifest.save_id, "url": target.url})

    # First and alone: if this node's agent refuses, no other node gets the order.
    order(own)
    outcome = FanOut.run(peers, order)
    return {own.node_id, *(address.node_id for address in outcome.results)}, outcome.errors


def _find_stuck(
    store: LocalStore,
    manifest: Manifest,
    target: ObjectTarget,
    ordered: Collection[str],
    refused: Mapping[AgentAddress, ReplicatedCkptError],
) -> str:
    """The error text for shards that neither the bucket nor a node with the order has. "": there is no such shard."""
    seen = look_at_nodes(store)
    holders = {name: _find_holders(manifest, name, seen) for name in manifest.shards}
    stuck = {name for name, nodes in holders.items() if nodes.isdisjoint(ordered)}
    # A shard that no such node has may be in the bucket from an earlier try.
    if stuck:
        with closing(open_client(target)) as client:
            stuck -= Bucket(client).find_arrived(manifest)
    if not stuck:
        return ""
    shards = [f"{name} (on {seen.list_names(holders[name]) or 'no node that answers'})" for name in sorted(stuck)]
    message_by_node = {address.node_id: error.message for address, error in refused.items()}
    nodes = sorted({node for name in stuck for node in holders[name]})
    why = [message_by_node.get(node, f"This node has no address of {seen.label(node)}.") for node in nodes]
    return (
        f"no node that was asked to upload has {list_some(shards, _SHOWN_MAX, 'shard')}. {' '.join(why)}{HINT_MARK}"
        "This node keeps the request. For each of these shards, run this on a node that has the shard, too: "
        f"`replicated-ckpt upload {quote(manifest.checkpoint_id)} --to {quote(target.url)} --root ROOT`."
    )


def _find_holders(manifest: Manifest, name: str, seen: NodesSeen) -> set[str]:
    """The nodes that have an intact copy, and those that should have one and did not answer."""
    entry = manifest.shards[name]
    here = {
        holding.node_id
        for holding in seen.holdings
        if holding.save_id == manifest.save_id
        and holding.sizes.get(name) == entry.size_bytes
        and name not in holding.damaged
    }
    return here | (set(entry.holders) - seen.holdings_by_node.keys())


def _wait_for_upload(store: LocalStore, manifest: Manifest, target: ObjectTarget, timeout_s: float) -> UploadState:
    own, began, line = store.read_node_id(), time.monotonic(), ProgressLine()
    size_bytes = sum(entry.size_bytes for entry in manifest.shards.values() if entry.owner_node == own)
    deadline, said, every_s = began + timeout_s, "", line.every_s or _SAID_EVERY_S
    say_at = began + every_s
    while True:
        # Looked up each time: an agent that ranks started may exit meanwhile, and another one start.
        with AgentClient(ensure_agent(store).local_address()) as client:
            state = UploadState(**client.call("GET", f"/v1/object/saves/{manifest.save_id}"))
        if state.url != target.url:  # the order has ended, and the agent uploads to the bucket that the save named
            there = _save_in(manifest, target)
            if there is None or there.save_id != manifest.save_id:
                raise UploadFailed(manifest.checkpoint_id, target.url, "the upload ended without a commit.")
            return UploadState(manifest.checkpoint_id, target.url, "committed")
        if state.state != "pending":
            line.clear()
            return state
        how_far = _describe_progress(state, manifest)
        # Waiting does not end a refusal, for example of credentials.
        if state.is_denied or time.monotonic() > deadline:
            raise UploadFailed(manifest.checkpoint_id, target.url, state.error or f"the time-out expired: {how_far}.")
        if how_far != said and time.monotonic() > say_at:
            sent = describe_progress(state.bytes_sent, size_bytes, time.monotonic() - began, "sent by this node")
            line.show(f"{manifest.checkpoint_id}: {how_far}" + (f"; {sent}" if sent and line.every_s else ""))
            said, say_at = how_far, time.monotonic() + every_s
        time.sleep(_POLL_S)


def _describe_progress(state: UploadState, manifest: Manifest) -> str:
    """The number of uploaded shards, and the nodes that should upload the others."""
    labels = {node.node_id: f"{node.host} (node {node.node_id})" for node in manifest.nodes}
    owners = [(name, manifest.shards[name].owner_node) for name in state.missing if name in manifest.shards]
    waits = [one_line(f"{name} of {labels.get(node, node)}") for name, node in owners]
    number, count = state.shards_there, len(manifest.shards)
    missing = f"; waiting for {list_some(waits, _SHOWN_MAX)}" if waits else ""
    return f"{number} of {plural(count, 'shard')} are in {state.url}{missing}" + (
        f"; the last try failed: {one_line(state.error)}" if state.error else ""
    )
