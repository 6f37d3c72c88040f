"""`replicated-ckpt import PATH ID --from FORMAT`: makes a checkpoint of this package from another format."""

import argparse
import json
from dataclasses import asdict

from replicated_ckpt.cli.checkpoints.export import Printer, add_key_arguments, describe_converted, key_rules
from replicated_ckpt.cli.exit_codes import ExitCode, stop_on_sigterm
from replicated_ckpt.cli.look.given_root import add_root_argument
from replicated_ckpt.cli.printing import add_output_argument
from replicated_ckpt.errors import CheckpointExists

HELP = "Make a checkpoint from a torch file, from safetensors, or from a plain DCP directory."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path", metavar="PATH", help="a file of torch.save, safetensors (file or directory), or a DCP directory"
    )
    parser.add_argument("id", metavar="ID", help="id of the new checkpoint")
    add_root_argument(parser, "this node's store; created if missing")
    parser.add_argument(
        "--from", required=True, choices=["torch", "safetensors", "dcp"], dest="format", help="the format of PATH"
    )
    parser.add_argument("--object-store", metavar="URL", help="also upload to this bucket, such as s3://bucket/prefix")
    parser.add_argument(
        "--copies",
        type=int,
        default=2,
        help="copies of every shard, this node's included (default: %(default)s)",
    )
    add_key_arguments(parser)
    parser.add_argument("--add-prefix", default="", metavar="TEXT", help="put this before each name, such as model.")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing checkpoint of this id")
    add_output_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Exit code: OK if the checkpoint is committed and was read back, with --object-store also there. See ExitCode."""
    # Imported here: this imports torch, and `--help` and wrong options should not wait for that.
    from replicated_ckpt.dcp.convert.importing import import_checkpoint

    try:
        with stop_on_sigterm(), Printer("import") as printer:
            done = import_checkpoint(
                arguments.path,
                arguments.id,
                format=arguments.format,
                root=arguments.root,
                object_store=arguments.object_store,
                copies=arguments.copies,
                keys=key_rules(arguments),
                overwrite=arguments.overwrite,
                trust_pickles=arguments.trust_pickles,
                progress=printer.show,
            )
    except CheckpointExists as exc:
        hint = f"Import it under another ID than {arguments.id!r}, or replace the existing checkpoint with --overwrite."
        raise CheckpointExists(exc.message, hint) from exc
    if arguments.json:
        print(json.dumps(asdict(done), indent=2))
    else:
        print(f"{done.checkpoint_id}: {describe_converted(done)} saved in {done.place} and read back")
    return ExitCode.OK
