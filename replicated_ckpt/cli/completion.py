"""`replicated-ckpt completion SHELL`: the shell code that completes verbs and options. argcomplete makes it."""

import argparse
import os
from importlib.util import find_spec

from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.errors import ConfigInvalid

LINES = {
    "bash": 'eval "$(replicated-ckpt completion bash)"',
    "zsh": 'autoload -U compinit && compinit; eval "$(replicated-ckpt completion zsh)"',
    "fish": "replicated-ckpt completion fish | source",
}
"""By shell, the line for its start file."""
HELP = "Print the shell code that completes this command."
_PROGRAM = "replicated-ckpt"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=[*LINES], help="the shell that runs it. " + _describe_lines())


def _describe_lines() -> str:
    return "In its start file: " + "; ".join(f"{shell}: {line}" for shell, line in LINES.items())


def run(arguments: argparse.Namespace) -> int:
    """Exit code: OK. Raises ConfigInvalid: the package argcomplete is missing."""
    if find_spec("argcomplete") is None:
        raise ConfigInvalid(
            "Completion needs the package argcomplete, which is not installed.",
            "Run `pip install 'replicated-ckpt[completion]'` in the environment of `replicated-ckpt`.",
        )
    from argcomplete.shell_integration import shellcode

    print(shellcode([_PROGRAM], shell=arguments.shell))
    return ExitCode.OK


def is_completing() -> bool:
    """Whether a shell asks this process for completions."""
    return "_ARGCOMPLETE" in os.environ and find_spec("argcomplete") is not None


def complete(parser: argparse.ArgumentParser) -> None:
    """Writes completions for the command line that the shell put into the environment, and ends this process."""
    import argcomplete

    argcomplete.autocomplete(parser, always_complete_options="long")
