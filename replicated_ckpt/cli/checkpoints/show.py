"""`replicated-ckpt show ID`: one checkpoint with its shards, who holds them, its run and its place in the bucket."""

import argparse
import json
from contextlib import closing
from dataclasses import asdict
from typing import Any

from replicated_ckpt.cli.checkpoints.ls import list_bucket, name_bucket_alone
from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.cli.look.checkpoints import (
    DAMAGED,
    LOST,
    NOT_SEEN,
    CheckpointSeen,
    advise,
    choose_id,
    describe_absent,
    find_id,
    list_checkpoints,
    see_with_unclaimed_files,
)
from replicated_ckpt.cli.look.given_nodes import add_nodes_argument, open_book
from replicated_ckpt.cli.look.given_root import add_root_argument, add_start_argument, name_root, open_store_of
from replicated_ckpt.cli.look.nodes import NO_NODES, NodesSeen, look_at_nodes
from replicated_ckpt.cli.look.progress import format_moment, format_table
from replicated_ckpt.cli.printing import add_output_argument
from replicated_ckpt.core.divergence import describe_divergences
from replicated_ckpt.core.inventory import saves_found
from replicated_ckpt.core.manifest import Manifest, decode_manifest
from replicated_ckpt.core.protocol.seen_save import SeenSave
from replicated_ckpt.environment import ROOT_ENV
from replicated_ckpt.errors import CheckpointNotFound, ConfigInvalid
from replicated_ckpt.stores.bucket.bucket import Bucket
from replicated_ckpt.stores.bucket_client.opening import open_client
from replicated_ckpt.wording import describe_bytes

HELP = "Show one checkpoint: its size, run, step and bucket, and which nodes hold each shard."
_HEADER = ("FILE", "SIZE", "OF", "COPIES", "ON", "NOT REACHED")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", metavar="ID", help="the checkpoint, or latest")
    add_root_argument(parser, required=False)
    parser.add_argument("--object-store", metavar="URL", help="without --root: show it as it is in this bucket")
    add_nodes_argument(parser)
    add_start_argument(parser)
    add_output_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Exit code: OK if every file of the checkpoint's newest save was seen; else SHARD_LOST, UNREACHABLE or FAILED."""
    if arguments.root is None and not arguments.nodes:
        return _show_in_bucket(arguments)
    if arguments.object_store is not None:
        raise ConfigInvalid(
            "--object-store shows a bucket alone.", f"Leave out --root and --nodes, and unset {ROOT_ENV}."
        )
    store = open_store_of(arguments)
    seen = look_at_nodes(store, open_book(store, arguments.nodes))
    arguments.id = find_id(store, arguments.id, seen)
    rows = [row for row in list_checkpoints(seen) if row.checkpoint_id == arguments.id]
    if not rows:
        raise describe_absent(store, seen, arguments.id)
    saves = {save.save_id: save for save in saves_found(seen.holdings)}
    known = [
        (row, see_with_unclaimed_files(saves[row.save_id], seen.manifests[row.save_id], seen))
        for row in rows
        if row.save_id in seen.manifests
    ]
    if arguments.json:
        details = {row.save_id: _details(save) for row, save in known}
        versions = [{**row.to_json(), **details.get(row.save_id, {})} for row in rows]
        print(json.dumps({"checkpoint_id": arguments.id, "saves": versions}, indent=2))
    else:
        for row in rows:
            print(f"{row.checkpoint_id}: {row.describe_copies(seen)}")
            for other, save in known:
                if other is row:
                    print(_describe(row, save, seen))
        for line in [*seen.describe_unreached(), *advise(rows, seen, name_root(store))]:
            print(line)
    if not rows[0].save_id or not known:
        return ExitCode.FAILED
    codes = {LOST: ExitCode.SHARD_LOST, NOT_SEEN: ExitCode.UNREACHABLE, DAMAGED: ExitCode.FAILED}
    return codes.get(rows[0].state, ExitCode.OK)


def _show_in_bucket(arguments: argparse.Namespace) -> int:
    """Exit code: OK if every file in the bucket has its size; SHARD_LOST if not.

    Raises:
        CheckpointNotFound: the bucket does not have it. ObjectMissing, ManifestInvalid: it has no valid manifest, as one of
            stock torch. StoreError: the bucket cannot be read.
    """
    target = name_bucket_alone(arguments)
    saves = list_bucket(target)
    rows = {row.checkpoint_id: row for row in list_checkpoints(NO_NODES, saves)}
    checkpoint_id = choose_id(arguments.id, list(rows.values()))
    there = next((save for save in saves if save.checkpoint_id == checkpoint_id), None)
    if there is None:
        hint = "`replicated-ckpt ls --object-store URL` lists the checkpoints there."
        raise CheckpointNotFound(f"{target.url} has no checkpoint {arguments.id!r}.", hint)
    with closing(open_client(target)) as client:
        manifest = decode_manifest(Bucket(client).manifest_raw(there), target.url)
    row = rows[there.checkpoint_id]
    absent = [name for name, entry in manifest.shards.items() if there.sizes.get(name) != entry.size_bytes]
    if arguments.json:
        shards = {
            name: {"size_bytes": entry.size_bytes, "crc32c": f"{entry.crc32c:08x}", "is_there": name not in absent}
            for name, entry in manifest.shards.items()
        }
        save = {**row.to_json(), "world_size": manifest.world_size, "shards": shards}
        print(json.dumps({"checkpoint_id": there.checkpoint_id, "object_store": target.url, "saves": [save]}, indent=2))
    else:
        cells = [
            (
                name,
                describe_bytes(entry.size_bytes),
                f"rank {entry.owner_rank}",
                "not there" if name in absent else "there",
            )
            for name, entry in sorted(manifest.shards.items(), key=lambda item: (item[1].owner_rank, item[0]))
        ]
        print(f"{there.checkpoint_id} in {target.url}; no node was asked, as there is no --root")
        print("\n".join(_describe_facts(row, manifest, NO_NODES)))
        print(format_table(("FILE", "SIZE", "OF", "BUCKET"), cells))
    return ExitCode.SHARD_LOST if absent else ExitCode.OK


def _details(save: SeenSave) -> dict[str, Any]:
    manifest = save.manifest
    return {
        "world_size": manifest.world_size,
        "upload": None if manifest.upload is None else manifest.upload.url,
        "divergences": [asdict(one) for one in manifest.divergences],
        "world": [
            {"node_id": node.node_id, "host": node.host, "domain": node.domain, "ranks": list(node.ranks)}
            for node in manifest.nodes
        ],
        "shards": {
            name: {
                "size_bytes": entry.size_bytes,
                "crc32c": f"{entry.crc32c:08x}",
                "owner_rank": entry.owner_rank,
                "owner_node": entry.owner_node,
                "wanted_on": list(entry.holders),
                "seen_on": sorted(save.intact[name]),
                "damaged_on": sorted(save.damaged[name]),
                "not_reached": sorted(save.assumed[name]),
            }
            for name, entry in manifest.shards.items()
        },
    }


def _describe(row: CheckpointSeen, save: SeenSave, seen: NodesSeen) -> str:
    lines = _describe_facts(row, save.manifest, seen)
    return "\n".join([*lines, format_table(_HEADER, [_metadata_cells(save, seen), *_shard_cells(save, seen)])])


def _describe_facts(row: CheckpointSeen, manifest: Manifest, seen: NodesSeen) -> list[str]:
    facts = {
        "saved at": format_moment(manifest.created_unix_s),
        "step": "-" if row.step is None else str(row.step),
        "content": f"weights, without {', '.join(manifest.dropped)}" if manifest.is_slim else row.content,
        "size": f"{describe_bytes(row.size_bytes or 0)} in one copy",
        "save": manifest.save_id,
        "run": f"lineage {manifest.lineage or 'without a name'}, save number {manifest.sequence}",
        "ranks": f"{manifest.world_size} on {_describe_world(manifest, seen)}",
        "bucket": "-" if manifest.upload is None else f"{manifest.upload.url}: {row.bucket}",
    }
    if manifest.divergences:
        facts["replicas"] = f"differed in {describe_divergences(manifest.divergences, manifest.host_by_rank)}"
    return [f"  {name + ':':10}{value}" for name, value in facts.items()]


def _describe_world(manifest: Manifest, seen: NodesSeen) -> str:
    return "; ".join(
        f"{seen.label(node.node_id)}{f' in {node.domain}' if node.domain else ''}: {_describe_ranks(node.ranks)}"
        for node in manifest.nodes
    )


def _describe_ranks(ranks: tuple[int, ...]) -> str:
    if ranks and ranks == tuple(range(ranks[0], ranks[0] + len(ranks))):
        return f"ranks {ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks))}"


def _metadata_cells(save: SeenSave, seen: NodesSeen) -> tuple[str, ...]:
    size = describe_bytes(save.manifest.metadata_bytes)
    on, silent = seen.list_names(save.with_metadata), seen.list_names(save.assumed_metadata)
    return (".metadata", size, "every node", str(len(save.with_metadata)), on or "-", silent or "-")


def _shard_cells(save: SeenSave, seen: NodesSeen) -> list[tuple[str, ...]]:
    return [
        (
            name,
            describe_bytes(entry.size_bytes),
            f"rank {entry.owner_rank}",
            f"{len(save.intact[name])} of {save.manifest.copies}",
            _describe_holders(save, name, seen),
            seen.list_names(save.assumed[name]) or "-",
        )
        for name, entry in sorted(save.manifest.shards.items(), key=lambda item: (item[1].owner_rank, item[0]))
    ]


def _describe_holders(save: SeenSave, shard: str, seen: NodesSeen) -> str:
    damaged = [f"{seen.name(node)} (damaged)" for node in sorted(save.damaged[shard])]
    return ", ".join([*filter(None, [seen.list_names(save.intact[shard])]), *damaged]) or "-"
