"""`replicated-ckpt VERB`: parses the command line, runs the verb, turns errors into exit codes."""

import argparse
import io
import os
import sys
import traceback
from collections.abc import Iterable, Sequence
from importlib import import_module
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
    "export": "convert.export",
    "import": "convert.import_",
    "slim": "removal.slim",
    "rm": "removal.rm",
    "prune": "removal.prune",
    "drain": "nodes.drain",
    "forget": "nodes.forget",
    "agent": "nodes.agent",
    "drill": "drill",
    "completion": "completion",
}
"""The module of each, in the order of `--help`: what looks first, what removes later."""
_BEGIN = (
    "Begin with `replicated-ckpt ls --root ROOT`, on a node. `replicated-ckpt VERB --help` lists the options of a verb."
)
_RERUN = "Hint: Redirect it elsewhere and run the command again. Completed steps are not undone."


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
    """Standard streams that are closed, as a daemon's may be, lead nowhere. Else a file would be opened in their place."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115, PTH123 - until the process ends


def _write(stream: TextIO, text: str) -> bool:
    """Whether it could be written. Else the stream leads nowhere from now on: Python would fail on it again at its end."""
    try:
        stream.write(text)
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return False
    return True


def _run(arguments: argparse.Namespace) -> int:
    """Runs the verb. Raises ConfigInvalid: it needs torch, which the image of the agent does not have."""
    try:
        return int(arguments.run(arguments))
    except ModuleNotFoundError as exc:
        if exc.name != "torch":
            raise
        problem = f"`{arguments.verb}` needs torch, which this Python ({sys.executable}) does not have."
        hint = "Run it where the job runs. It finds the checkpoints of all nodes, also from there."
        raise ConfigInvalid(problem, hint) from exc


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code, also for each of our errors that its verb raises."""
    _open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):  # letters that it cannot encode, in a name or a table, are escaped
        sys.stdout.reconfigure(errors="backslashreplace")
    given = sys.argv[1:] if argv is None else list(argv)
    given = given or ["--help"]
    first = given[:1]
    if is_completing():
        complete(parser())
    try:
        try:
            # One verb's module alone is imported: `ls` must not wait for what `drill` or `export` needs.
            known = parser(first if first and first[0] in VERBS else VERBS)
            if any("\0" in text for text in given):  # in this process: no shell passes one on
                known.error("arguments must not contain NUL")
            arguments = known.parse_args(given, argparse.Namespace(given=given))
            return _run(arguments)
        finally:
            # Here a full disk or a closed pipe is still an error of ours, not of the interpreter's end.
            sys.stdout.flush()
    except ReplicatedCkptError as exc:
        _write(sys.stderr, f"replicated-ckpt {arguments.verb}: {exc}\n")
        # Scripts and probes act on the code: it depends on the error's class, not on its words.
        return exit_code_of(exc)
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except Exception as exc:  # noqa: BLE001 - top of the process
        # `| head` closes the pipe: that is not a defect of this package.
        if isinstance(exc, OSError) and not (_write(sys.stdout, "\n") and _write(sys.stderr, "\n")):
            if not isinstance(exc, BrokenPipeError):
                _write(sys.stderr, f"replicated-ckpt: standard output cannot be written: {exc.strerror}. {_RERUN}\n")
            return ExitCode.FAILED
        _write(sys.stderr, traceback.format_exc())
        return ExitCode.INTERNAL
    finally:
        # A closed stderr must be found now: Python's own flush at exit would change the exit code.
        _write(sys.stderr, "")
