"""`replicated-ckpt rm ID`: removes one checkpoint from this node for good, and from the bucket once no node has it."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from shlex import quote

from replicated_ckpt.cli.look.checkpoints import IN_BUCKET, CheckpointSeen, describe_absent
from replicated_ckpt.cli.look.given_root import open_store
from replicated_ckpt.cli.removal.remover import Removed, Remover, add_removal_arguments
from replicated_ckpt.core.upkeep.policy import scope_of
from replicated_ckpt.core.upkeep.retention import find_last_good
from replicated_ckpt.errors import ManifestInvalid
from replicated_ckpt.stores.local.versions.remove import renamed_refusal

HELP = (
    "Remove one checkpoint from this node, from each node whose agent has the same key file, and from the bucket once no "
    "node has it. Without a common key file, run it on every node."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", metavar="ID", help="the checkpoint")
    parser.add_argument(
        "--save", metavar="SAVE", help="remove only this save, if `ls` lists several under the checkpoint's name"
    )
    add_removal_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Exit code: OK if it was removed everywhere. FAILED if the removal was refused, or other nodes still have copies.

    UNREACHABLE if nodes that may have copies did not answer.
    """
    store = open_store(arguments.root)
    remover = Remover.look(store, arguments)
    listed = [
        row for row in remover.rows if row.checkpoint_id == arguments.id and arguments.save in (None, row.save_id)
    ]
    chosen = [row for row in listed if row.save_id]
    # Files without a manifest may belong to a save that the user wants to keep: only the user can remove them.
    if listed and not chosen:
        path = quote(str(store.root / arguments.id))
        hint = f"`repair` restores the manifest if another node has it. If you do not need the files: `rm -r {path}`."
        raise ManifestInvalid(f"{arguments.id!r} has no valid manifest here, so its save is unknown.", hint)
    if not chosen:
        where = "" if arguments.object_store else " Add --object-store URL if a bucket has it."
        raise describe_absent(store, remover.seen, arguments.id, where)
    for row in chosen:
        if (saved_as := remover.seen.renamed_from(row.checkpoint_id, row.save_id)) is not None:
            raise renamed_refusal(row.checkpoint_id, saved_as, store.root)
    why = "" if arguments.force else _find_refusal(remover, chosen, keeps_bucket=arguments.keep_in_bucket)
    outcome = Removed(kept={arguments.id: why} if why else {})
    if not (why or arguments.dry_run):
        outcome = remover.carry_out(chosen)
    if arguments.json:
        plan = [{"checkpoint_id": row.checkpoint_id, "save_id": row.save_id, "on": list(row.nodes)} for row in chosen]
        print(json.dumps({"plan": plan, "dry_run": arguments.dry_run, **asdict(outcome)}, indent=2))
    elif why:
        print(f"refused: {arguments.id} {why}; nothing was changed")
        print("next step: `ls` lists the other checkpoints; --force removes this one all the same")
    elif arguments.dry_run:
        print("\n".join(remover.describe_plan(chosen)))
    else:
        print("\n".join(remover.describe(outcome)))
    return outcome.code


def _find_refusal(remover: Remover, chosen: Sequence[CheckpointSeen], *, keeps_bucket: bool) -> str:
    """Why it is not removed without --force, as a phrase that follows its id. "": it may be removed."""
    rows, scope = remover.rows, scope_of(chosen[0].checkpoint_id)
    runs = {one.lineage for one in rows if one.state != IN_BUCKET and scope_of(one.checkpoint_id) == scope} - {""}
    # Clusters may share a prefix: the save may be another cluster's.
    if not keeps_bucket and runs and any(row.state == IN_BUCKET and row.lineage not in runs for row in chosen):
        return "in the bucket is of a run that no node here has; --keep-in-bucket keeps it there"
    # Without it the run could not resume.
    if find_last_good(remover.list_removable(), {row.save_id for row in chosen}):
        return _describe_last_good(remover, chosen)
    if keeps_bucket and any(
        row.bucket in ("on its way", "refused") and {*row.nodes} <= {remover.seen.own_node} for row in chosen
    ):
        return "is not in its bucket yet, as its upload has not ended, and is on no other node"
    if any(row.save_id not in remover.seen.manifests and row.state != IN_BUCKET for row in chosen):
        return "lies on other nodes only, and none returned its manifest: it may be the last good one of its run"
    return ""


def _describe_last_good(remover: Remover, chosen: Sequence[CheckpointSeen]) -> str:
    if any(row.copies_seen or row.state == IN_BUCKET or row.bucket == "there" for row in chosen):
        return "is the last good checkpoint of its run"
    if all(row.is_lost for row in chosen):
        return "may be the last good checkpoint of its run: whether its bucket has it is unknown"
    silent = remover.seen.list_names(remover.seen.unreached) or "a node without a known address"
    return f"may be the last good checkpoint of its run: it was not seen complete, as {silent} did not answer"
