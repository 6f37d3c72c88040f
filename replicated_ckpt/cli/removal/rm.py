"""`replicated-ckpt rm ID`: one checkpoint goes from this node for good, and from the bucket with its last copy."""

import argparse
import json

from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.cli.look.root import open_store
from replicated_ckpt.cli.removal.remover import Remover, add_removal_arguments
from replicated_ckpt.errors import CheckpointNotFound, ConfigInvalid

HELP = "Remove one checkpoint from this node, and from the bucket once no other node has it. Run it on each node."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", metavar="ID", help="the checkpoint")
    add_removal_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Exit code: OK if no node that is known has it any more; FAILED if it was refused, or others have it still.

    Raises:
        CheckpointNotFound, ConfigInvalid, StoreError, AgentUnavailable
    """
    store = open_store(arguments.root)
    remover = Remover(store, arguments)
    listed = [row for row in remover.rows if row.checkpoint_id == arguments.id]
    chosen = [row for row in listed if row.save_id]
    if listed and not chosen:
        path = store.root / arguments.id
        hint = f"`repair` restores the manifest where another node has it; if the files are not needed: `rm -r {path}`."
        raise ConfigInvalid(f"{arguments.id!r} has no manifest that is believed: its save cannot be told.", hint)
    if not chosen:
        where = "" if arguments.object_store else " Add --object-store URL if a bucket has it."
        raise CheckpointNotFound(
            f"No node that was reached holds {arguments.id!r}, or it is stock torch's.",
            f"`ls` lists what there is; a checkpoint of stock torch is a plain directory on each node.{where}",
        )
    if last := remover.find_last_good(chosen):
        print(f"refused: {', '.join(last)} is the last good checkpoint of its run; nothing was changed")
        print("next step: `ls` shows what else there is; --force removes it all the same")
        return ExitCode.FAILED
    if arguments.dry_run:
        for row in chosen:
            print(f"would remove {row.checkpoint_id} (save {row.save_id}), on: {remover.seen.list_names(row.nodes)}")
        return ExitCode.OK
    outcome = remover.carry_out(chosen)
    if arguments.json:
        print(json.dumps(outcome.to_json(), indent=2))
    else:
        print("\n".join(remover.describe(outcome)))
    return outcome.code
