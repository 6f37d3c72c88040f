"""`replicated-ckpt export ID --to FORMAT PATH`: one checkpoint in another format."""

import argparse
import json
from dataclasses import asdict

from replicated_ckpt.cli.convert.conversion import Printer, add_key_arguments, describe, key_rules
from replicated_ckpt.cli.exit_codes import ExitCode, stop_on_sigterm
from replicated_ckpt.cli.look.given_root import add_root_argument, open_store
from replicated_ckpt.cli.printing import add_output_argument
from replicated_ckpt.errors import ConfigInvalid
from replicated_ckpt.wording import list_some, plural

HELP = "Write one checkpoint as a torch file, as safetensors, or as a plain DCP directory."
_SKIPPED_SHOWN_MAX = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", metavar="ID", help="the checkpoint, or latest")
    parser.add_argument("path", metavar="PATH", help="target: a path, or a URL that fsspec supports")
    add_root_argument(parser, "a node's store; what it lacks is read from its peers", required=False)
    parser.add_argument(
        "--object-store", metavar="URL", help="also read from this bucket; without --root, only from there"
    )
    parser.add_argument(
        "--to",
        required=True,
        choices=["torch", "safetensors", "dcp"],
        dest="format",
        help="torch: one file for torch.load; safetensors: a Hugging Face directory, tensors only; dcp: a directory "
        "for stock FileSystemReader",
    )
    parser.add_argument(
        "--shard-size-limit",
        default="5GB",
        metavar="SIZE",
        help="size of one safetensors or DCP file (default: %(default)s)",
    )
    add_key_arguments(parser)
    parser.add_argument("--overwrite", action="store_true", help="replace PATH, once everything is written")
    add_output_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Exit code: OK if the output is at its place, read back; otherwise nothing is there. See ExitCode."""
    if arguments.root is None and arguments.object_store is None:
        raise ConfigInvalid("No source was named.", "Name a node's store with --root, or a bucket with --object-store.")
    if arguments.object_store is None:
        # It is only read: a group that may read the checkpoints may export them.
        open_store(arguments.root, of_any_user=True)
    # Imported here: it brings torch, and wrong options should fail before that.
    from replicated_ckpt.dcp.convert.export import export_checkpoint

    with stop_on_sigterm(), Printer("export") as printer:
        done = export_checkpoint(
            arguments.id,
            arguments.path,
            format=arguments.format,
            root=arguments.root,
            object_store=arguments.object_store,
            keys=key_rules(arguments),
            shard_size_limit=arguments.shard_size_limit,
            overwrite=arguments.overwrite,
            trust_pickles=arguments.trust_pickles,
            progress=printer.show,
        )
    if done.skipped:
        entries, names = plural(len(done.skipped), "entry"), list_some(done.skipped, _SKIPPED_SHOWN_MAX)
        printer.print_line(f"left out {entries} without a tensor, which {arguments.format} files cannot hold: {names}")
    if arguments.json:
        print(json.dumps(asdict(done), indent=2))
    else:
        print(f"{done.checkpoint_id}: {describe(done)} written to {done.place} and read back")
    return ExitCode.OK
