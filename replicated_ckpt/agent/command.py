"""The agent as a command: its arguments, and how it runs."""

import argparse
import logging
import sys

from replicated_ckpt.agent.life import Agent
from replicated_ckpt.config import AgentConfig

HELP = "Serve one node's store to its peers until stopped (ranks start one by themselves if none runs)."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the agent's arguments to a command line."""
    parser.add_argument("--root", required=True, help="the node's store, a directory on its own disk")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 for all (default: %(default)s)"
    )
    parser.add_argument("--port", type=int, default=0, help="port to listen on (default: any free one)")
    parser.add_argument(
        "--idle-exit-s", type=float, default=None, help="leave after this long without client or work (default: stay)"
    )
    parser.add_argument("--verbose", action="store_true", help="log every request")


def run(arguments: argparse.Namespace) -> int:
    """Serves until stopped; returns the exit code 0.

    Raises:
        AgentUnavailable: another agent serves the root, or the port is taken. ConfigInvalid
    """
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.DEBUG if arguments.verbose else logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    Agent(AgentConfig(arguments.root, arguments.host, arguments.port, arguments.idle_exit_s)).run()
    return 0
