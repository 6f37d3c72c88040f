"""Common parts of `export` and `import`: options about keys, and lines about how far it is."""

import argparse
import sys
import time
import warnings
from typing import TYPE_CHECKING, Self

from replicated_ckpt.cli.look.progress import ProgressLine, describe_progress
from replicated_ckpt.core.key_rules import KeyRules
from replicated_ckpt.errors import ConfigInvalid, ReplicatedCkptWarning
from replicated_ckpt.wording import escape_controls, plural

if TYPE_CHECKING:
    from replicated_ckpt.dcp.convert.source import Converted, Progress

_LINE_EVERY_S = 1.0


def add_key_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that select and rename entries."""
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
    """The rules from the options.

    Raises:
        ConfigInvalid: a renaming without "=".
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


def describe(done: "Converted") -> str:
    objects = f" and {plural(done.objects, 'other entry')}" if done.objects else ""
    return f"{plural(done.tensors, 'tensor')}{objects}, {plural(done.size_bytes, 'byte')} in {done.seconds:.1f} s,"


class Printer:
    """Writes progress, notes and this package's warnings to stderr, at most a line of progress in a second."""

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
        # The check reads all of it again, and how long that takes is not known.
        self._line.show(f"{self._verb}: {how_far if progress.step == 'writing' and how_far else progress.step}")

    def print_line(self, line: str) -> None:
        self._line.clear()
        print(f"{self._verb}: {escape_controls(line)}", file=sys.stderr, flush=True)
