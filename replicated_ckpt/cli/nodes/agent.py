"""`replicated-ckpt agent`: this node's agent in the foreground, for systemd, Slurm or a DaemonSet."""

import argparse

from replicated_ckpt.agent import command
from replicated_ckpt.agent.command import HELP, add_arguments
from replicated_ckpt.cli.look.given_root import check_is_no_file

__all__ = ["HELP", "add_arguments", "run"]


def run(arguments: argparse.Namespace) -> int:
    """Serves until stopped; returns the exit code 0.

    Raises:
        CheckpointNotFound: the root is a file. AgentUnavailable, ConfigInvalid: as the `run` of `agent/command.py`.
    """
    check_is_no_file(arguments.root)
    return command.run(arguments)
