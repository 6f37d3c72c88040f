"""`replicated-ckpt export ID --to FORMAT PATH`: writes a checkpoint in another format. `import` shares parts of it."""

import argparse
import json
import sys
import time
import warnings
from dataclasses import asdict
from typing import TYPE_CHECKING, Self

from replicated_ckpt.cli.exit_codes import ExitCode, stop_on_sigterm
from replicated_ckpt.cli.look.given_root import add_root_argument, open_store
from replicated_ckpt.cli.look.progress import ProgressLine, describe_progress
from replicated_ckpt.cli.printing import add_output_argument
from replicated_ckpt.core.key_rules import KeyRules
from replicated_ckpt.errors import ConfigInvalid, ReplicatedCkptWarning
from replicated_ckpt.wording import escape_controls, list_some, plural

if TYPE_CHECKING:
    from replicated_ckpt.dcp.convert.source import Converted, Progress

HELP = "Write one checkpoint as a torch file, as safetensors, or as a plain DCP directory."
_SKIPPED_SHOWN_MAX = 4
_LINE_EVERY_S = 1.0


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
    """Exit code: OK if the output is written and was read back. With any other code, no output is left. See ExitCode."""
    if arguments.root is None and arguments.object_store is None:
        raise ConfigInvalid("No source was named.", "Name a node's store with --root, or a bucket with --object-store.")
    if arguments.object_store is None:
        # The store is only read: a group that may read the checkpoints may export them.
        open_store(arguments.root, of_any_user=True)
    # Imported here: this imports torch, and wrong options should fail before that.
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
        print(f"{done.checkpoint_id}: {describe_converted(done)} written to {done.place} and read back")
    return ExitCode.OK


def add_key_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `export` and `import` that select and rename entries."""
    add = parser.add_argument
    add(
        "--include",
        action="append",
        default=[],
        metavar="GLOB",
        help="take only entries whose full name (FQN) matches; may be repeated",
    )
    add(
        "--exclude",
        action="append",
        default=[],
        metavar="GLOB",
        help="leave out entries whose full name (FQN) matches; may be repeated",
    )
    add("--strip-prefix", default="", metavar="TEXT", help="remove this from the start of names, such as model.")
    add(
        "--rename",
        action="append",
        default=[],
        metavar="REGEX=NEW",
        help="replace in names, as re.sub does, after --strip-prefix: '^h\\.(\\d+)=layers.\\1'",
    )
    add(
        "--trust-pickles",
        action="store_true",
        help="also unpickle objects that are refused by default: their writer can run code here",
    )


def key_rules(arguments: argparse.Namespace) -> KeyRules:
    """The rules that the options select.

    Raises:
        ConfigInvalid: `--rename` has no "=".
    """
    renames = []
    for text in arguments.rename:
        # At the last "=": a pattern may contain one, as in a lookahead.
        pattern, equals, new = text.rpartition("=")
        if not equals or not pattern:
            raise ConfigInvalid(f"--rename takes REGEX=NEW, not {text!r}.")
        renames.append((pattern, new))
    added = getattr(arguments, "add_prefix", "")
    return KeyRules(arguments.include, arguments.exclude, arguments.strip_prefix, renames, added)


def describe_converted(done: "Converted") -> str:
    objects = f" and {plural(done.objects, 'other entry')}" if done.objects else ""
    return f"{plural(done.tensors, 'tensor')}{objects}, {plural(done.size_bytes, 'byte')} in {done.seconds:.1f} s,"


class Printer:
    """Writes progress, notes and this package's warnings to stderr. At most one line of progress a second."""

    def __init__(self, verb: str) -> None:
        self._verb = verb
        self._started_at = self._shown_at = time.monotonic()
        self._step = "writing"
        self._line = ProgressLine()
        self._caught = warnings.catch_warnings()

    def __enter__(self) -> Self:
        self._caught.__enter__()
        warnings.showwarning = lambda message, *_args, **_more: self.print_line(str(message))
        warnings.filterwarnings("ignore", module="torch")
        warnings.filterwarnings("always", category=ReplicatedCkptWarning)
        warnings.filterwarnings("ignore", ".* this save replaces", ReplicatedCkptWarning)  # --overwrite asks for it
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._line.clear()
        self._caught.__exit__(None, None, None)

    def show(self, progress: "Progress") -> None:
        now = time.monotonic()
        # A file of a million small tensors would print a million lines.
        if now - self._shown_at < _LINE_EVERY_S and progress.step == self._step:
            return
        self._shown_at, self._step = now, progress.step
        how_far = describe_progress(progress.done_bytes, progress.total_bytes, now - self._started_at, "written")
        # Only the writing has progress: the check reads everything again, in an unknown time.
        self._line.show(f"{self._verb}: {how_far if progress.step == 'writing' and how_far else progress.step}")

    def print_line(self, line: str) -> None:
        self._line.clear()
        print(f"{self._verb}: {escape_controls(line)}", file=sys.stderr, flush=True)
