"""`replicated-ckpt VERB`: parses the command line, runs the verb, turns errors into exit codes."""

import argparse
import io
import os
import sys
import traceback
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from shlex import quote
from typing import TextIO

from replicated_ckpt.cli.completion import complete, is_completing
from replicated_ckpt.cli.exit_codes import MEANING, ExitCode, exit_code_of
from replicated_ckpt.errors import ConfigInvalid, ReplicatedCkptError
from replicated_ckpt.version import __version__

VERBS = {
    "ls": "checkpoints.ls",
    "show": "checkpoints.show",
    "report": "checkpoints.report",
    "status": "nodes.status",
    "verify": "checkpoints.verify",
    "repair": "checkpoints.repair",
    "upload": "checkpoints.upload",
    "reject": "checkpoints.reject",
    "export": "checkpoints.export",
    "import": "checkpoints.import_",
    "slim": "removal.slim",
    "rm": "removal.rm",
    "prune": "removal.prune",
    "drain": "nodes.drain",
    "forget": "nodes.forget",
    "agent": "nodes.agent",
    "drill": "drill",
    "completion": "completion",
}
"""The module of each verb, in the order of `--help`: verbs that only look come first."""
_BEGIN = (
    "Begin with `replicated-ckpt ls --root ROOT`, on a node. `replicated-ckpt VERB --help` lists the options of a verb."
)
_RERUN = "Hint: Redirect the output elsewhere, and run the command again. Completed steps are not undone."


def parser(wanted: Iterable[str] = tuple(VERBS)) -> argparse.ArgumentParser:
    """The parser with the wanted verbs. It imports only their modules."""
    codes = "\n".join(f"  {code.value:3}  {meaning}" for code, meaning in MEANING.items())
    top = argparse.ArgumentParser(
        prog="replicated-ckpt",
        description="Replicated, fault-tolerant checkpoints for PyTorch Distributed Checkpoint.",
        epilog=f"{_BEGIN}\n\nexit codes:\n{codes}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"replicated-ckpt {__version__}")
    verbs = top.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name in wanted:
        module = import_module(f"replicated_ckpt.cli.{VERBS[name]}")
        verb = verbs.add_parser(name, help=module.HELP, description=module.HELP)
        module.add_arguments(verb)
        verb.set_defaults(run=module.run)
    return top


def _open_closed_streams() -> None:
    """Redirects closed standard streams, as a daemon may have, to /dev/null. Otherwise a file could get their number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115, PTH123 - until the process ends


def _write(stream: TextIO, text: str) -> bool:
    """Writes the text; returns whether that worked. If not, the stream now leads to /dev/null.

    Otherwise Python's own flush at exit would fail on the stream, too.
    """
    try:
        stream.write(text)
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return False
    return True


def _run(arguments: argparse.Namespace) -> int:
    """Runs the verb. Raises ConfigInvalid: the verb needs torch, which this Python lacks, as in the agent's image."""
    try:
        return int(arguments.run(arguments))
    except ModuleNotFoundError as exc:
        if exc.name != "torch":
            raise
        problem = f"`{arguments.verb}` needs torch, which this Python ({sys.executable}) does not have."
        hint = "Run it where the job runs. It finds the checkpoints of all nodes, also from there."
        raise ConfigInvalid(problem, hint) from exc


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command, and returns its exit code. An error of this package is printed, and has its exit code."""
    _open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):  # escapes letters that the terminal's encoding lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    given = sys.argv[1:] if argv is None else list(argv)
    given = given or ["--help"]
    first = given[:1]
    if is_completing():
        complete(parser())
    try:
        try:
            # Only the module of this verb is imported: `ls` must not wait for the imports of `drill` or `export`.
            known = parser(first if first and first[0] in VERBS else VERBS)
            if any("\0" in text for text in given):  # from a caller in this process: no shell passes NUL on
                known.error("arguments must not contain NUL")
            arguments = known.parse_args(given, argparse.Namespace(given=given))
            return _run(arguments)
        finally:
            # A full disk or a closed pipe is handled below, and not by the interpreter at its exit.
            sys.stdout.flush()
    except ReplicatedCkptError as exc:
        text, root = str(exc), getattr(arguments, "root", None)
        if root and "--root ROOT" in text:  # so that the printed command works, also on another node
            text = text.replace("--root ROOT", f"--root {quote(str(Path(root).absolute()))}")
        _write(sys.stderr, f"replicated-ckpt {arguments.verb}: {text}\n")
        # Scripts and probes act on the code, which depends on the error's class, not on its text.
        return exit_code_of(exc)
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except Exception as exc:  # noqa: BLE001 - top of the process
        # A pipe that its reader has closed, as `| head` does, is not a defect of this package.
        if isinstance(exc, OSError) and not (_write(sys.stdout, "\n") and _write(sys.stderr, "\n")):
            if not isinstance(exc, BrokenPipeError):
                _write(sys.stderr, f"replicated-ckpt: standard output cannot be written: {exc.strerror}. {_RERUN}\n")
            return ExitCode.FAILED
        _write(sys.stderr, traceback.format_exc())
        return ExitCode.INTERNAL
    finally:
        # Flushed now: if stderr is closed, Python's own flush at exit would change the exit code.
        _write(sys.stderr, "")
