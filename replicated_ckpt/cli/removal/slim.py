"""`replicated-ckpt slim ID`: removes the optimizer of one checkpoint from this node, and keeps the model."""

import argparse
import json
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field

from replicated_ckpt.cli.checkpoints.ls import name_bucket
from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.cli.look.checkpoints import FULL, IN_BUCKET, CheckpointSeen, describe_absent, list_checkpoints
from replicated_ckpt.cli.look.given_root import add_root_argument, open_store, repeat_command
from replicated_ckpt.cli.look.nodes import NodesSeen, look_at_nodes, on_each_host
from replicated_ckpt.cli.look.progress import print_if_slow, show_progress
from replicated_ckpt.cli.printing import add_output_argument
from replicated_ckpt.core.manifest import Manifest
from replicated_ckpt.core.parts import Part, part_of_shard
from replicated_ckpt.core.upkeep.policy import pending, scope_of
from replicated_ckpt.errors import ReplicatedCkptError
from replicated_ckpt.stores.bucket.bucket import Bucket
from replicated_ckpt.stores.bucket.bucket_removal import slim_in_bucket
from replicated_ckpt.stores.bucket_client.opening import open_client
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.local.versions.remove import renamed_refusal, slim
from replicated_ckpt.wording import describe_bytes

HELP = (
    "Remove the optimizer of one checkpoint from this node; its model still loads. Run it on each node, with `srun "
    "--ntasks-per-node=1` or with the SSH command that it prints."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", metavar="ID", help="the checkpoint")
    add_root_argument(parser)
    parser.add_argument(
        "--object-store", metavar="URL", help="also slim it in this bucket, with credentials from the environment"
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="also slim the last full checkpoint of a run, or one whose upload is not complete",
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would be removed; change nothing")
    add_output_argument(parser)


@dataclass
class Slimmed:
    """The outcome. `refused`: why nothing was changed, or "". `kept`: why the checkpoint is still full here, or ""."""

    checkpoint_id: str
    save_id: str
    dropped: list[str]
    refused: str = ""
    kept: str = ""
    freed_bytes: int = 0
    in_bucket: str = ""
    full_on: list[str] = field(default_factory=list)


def run(arguments: argparse.Namespace) -> int:
    """Exit code: OK if no node that answers still has the optimizer. FAILED if some do, or the removal was refused."""
    store = open_store(arguments.root)
    target = None if arguments.object_store is None else name_bucket(arguments.object_store, store)
    seen = look_at_nodes(store)
    rows = list_checkpoints(seen)
    manifest = store.catalog.find_manifest(arguments.id)
    if manifest is None:
        where = " Run the command on a node that has it."
        raise describe_absent(store, seen, arguments.id, where)
    if manifest.checkpoint_id != arguments.id:
        raise renamed_refusal(arguments.id, manifest.checkpoint_id, store.root)
    gone = manifest.dropped or (manifest.weights.dropped if manifest.weights is not None else ())
    # A small optimizer may lie in the model's files: its removal would free nothing.
    if not manifest.is_slim and all(part_of_shard(name) is not Part.OPTIMIZER for name in manifest.shards):
        gone = ()
    outcome = Slimmed(arguments.id, manifest.save_id, list(gone))
    outcome.refused = "" if arguments.force else _find_refusal(manifest, rows, seen)
    if not gone:
        outcome.refused = "has no optimizer in separate files, or nothing but an optimizer"
    outcome.full_on = _list_full(manifest, seen)
    if not (outcome.refused or arguments.dry_run):
        _drop(store, manifest, outcome)
        if target is not None:
            with print_if_slow(target.url), closing(open_client(target)) as client:
                slim_in_bucket(Bucket(client), arguments.id, manifest.save_id)
            outcome.in_bucket = target.url
    if arguments.json:
        print(json.dumps({"dry_run": arguments.dry_run, **asdict(outcome)}, indent=2))
    else:
        left = _describe_left(outcome, seen, repeat_command(arguments, store))
        print("\n".join(_describe(outcome, manifest, store, left, dry_run=arguments.dry_run)))
    return ExitCode.FAILED if outcome.refused or outcome.kept or outcome.full_on else ExitCode.OK


def _find_refusal(manifest: Manifest, rows: Sequence[CheckpointSeen], seen: NodesSeen) -> str:
    """Why the save stays full without --force, as a phrase that follows its id. "": it may be slimmed."""
    if manifest.is_slim:
        return ""
    others = (row for row in rows if row.save_id != manifest.save_id and row.lineage == manifest.lineage)
    if not any(
        _is_full(row, seen) for row in others if scope_of(row.checkpoint_id) == scope_of(manifest.checkpoint_id)
    ):
        return "is the last full checkpoint of its run that was seen"
    if manifest.save_id in pending(held.node_report for held in seen.holdings_by_node.values()):
        return "is not in its bucket yet"
    return ""


def _is_full(row: CheckpointSeen, seen: NodesSeen) -> bool:
    """Whether the run could resume from it: all its files were seen, and it has an optimizer."""
    known = seen.manifests.get(row.save_id)
    has_optimizer = known is not None and known.weights is not None
    is_whole = row.state == IN_BUCKET or bool(row.copies_seen)
    return row.content == FULL and has_optimizer and is_whole and not row.removed_on


def _list_full(manifest: Manifest, seen: NodesSeen) -> list[str]:
    """The other nodes that still have the full save under its name."""
    held = [holding for holding in seen.holdings if holding.save_id == manifest.save_id]
    full = {one.node_id for one in held if not (one.is_slim or one.is_replaced)}
    return sorted(full - {seen.own_node})


def _drop(store: LocalStore, manifest: Manifest, outcome: Slimmed) -> None:
    size_bytes, before = _measure_optimizer(store, manifest), _measure(store, manifest)

    def look_how_far() -> Mapping[str, tuple[int, int]]:
        done_bytes = 0
        with suppress(OSError, ReplicatedCkptError):
            done_bytes = before - _measure(store, manifest)
        return {"": (done_bytes, size_bytes)}

    with show_progress("removing", "removed", look_how_far):
        is_slimmed = slim(store.root, manifest.checkpoint_id, manifest.save_id)
    outcome.freed_bytes = before - _measure(store, manifest)
    if not is_slimmed and not manifest.is_slim:
        outcome.kept = "a load reads it, or its save has not ended on this node; run the command again later"


def _measure(store: LocalStore, manifest: Manifest) -> int:
    return sum(store.catalog.look(manifest.checkpoint_id).sizes.values())


def _measure_optimizer(store: LocalStore, manifest: Manifest) -> int:
    """Bytes of the optimizer's files on this node."""
    kept = manifest.shards if manifest.is_slim else manifest.slimmed().shards
    sizes = store.catalog.look(manifest.checkpoint_id).sizes
    return sum(size for shard, size in sizes.items() if shard in manifest.shards and shard not in kept)


def _describe_left(outcome: Slimmed, seen: NodesSeen, again: str) -> list[str]:
    """Lines with the other nodes that still have the full save, and the command for them."""
    if not outcome.full_on:
        return []
    run = on_each_host(seen, outcome.full_on, again)
    again_there = f"next step: run the same command there, for example with {run}"
    return [f"still full on {seen.list_names(outcome.full_on)}", again_there]


def _describe(
    outcome: Slimmed, manifest: Manifest, store: LocalStore, left: Sequence[str], *, dry_run: bool
) -> list[str]:
    name, names = outcome.checkpoint_id, ", ".join(outcome.dropped)
    if outcome.refused:
        return [
            f"refused: {name} {outcome.refused}; nothing was changed",
            *(["next step: `ls` lists the other checkpoints; --force slims this one all the same"] if names else []),
        ]
    if dry_run:
        size = describe_bytes(_measure_optimizer(store, manifest))
        return [f"would remove {names} of {name} (save {outcome.save_id}) from this node: {size}", *left]
    if outcome.kept:
        return [f"kept: {name}: {outcome.kept}"]
    lines = [
        f"{name} keeps its weights alone on this node: {names} was removed ({describe_bytes(outcome.freed_bytes)} freed)"
    ]
    lines += [f"the same in {outcome.in_bucket}"] if outcome.in_bucket else []
    return [*lines, *left]
