"""The agent as a command: its arguments, and how it runs."""

import argparse
import logging
import os
from dataclasses import fields
from functools import partial
from typing import get_args

from replicated_ckpt.agent.process import Agent
from replicated_ckpt.agent.state.log_file import BoundedLog
from replicated_ckpt.config import AgentConfig, DirectIO
from replicated_ckpt.environment import (
    AGENT_ENV_PREFIX,
    DIRECT_IO_ENV,
    PLAIN_ENV,
    PORT_ENV,
    ROOT_ENV,
    TLS_CERT_ENV,
    TLS_KEY_ENV,
    default_root,
)
from replicated_ckpt.node.peers.address_book import listening_host
from replicated_ckpt.stores.files.ownership import GROUP_ENV
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.threads import lower_session_priority

HELP = "Serve this node's store to its peers until stopped. Ranks start an agent by themselves if none runs."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    root = default_root()
    help_ = f"this node's store, a directory on its own disk (default: {ROOT_ENV})"
    parser.add_argument("--root", required=root is None, default=root, help=help_)
    parser.add_argument(
        "--host",
        help="address to listen on (default: 127.0.0.1 while all known peers are on this host, else all IPv4 and IPv6 "
        "addresses)",
    )
    add = parser.add_argument
    add(
        "--port",
        default=os.environ.get(PORT_ENV, ""),
        metavar="PORTS",
        help=f"port to listen on, or a range such as 29600-29631 (default: {PORT_ENV}, else its last port, else any "
        "free one)",
    )
    add("--idle-exit-s", type=float, metavar="N", help="exit after N seconds without clients or work (default: never)")
    number = partial(_add_number, parser)
    number("--lost-after-s", "treat a silent peer's copies as lost after N seconds (default: %(default)s)")
    number(
        "--away-after-s",
        "treat the copies of a peer that announced its exit as lost after N seconds (default: %(default)s)",
    )
    number(
        "--copy-mib-per-s",
        "rate of re-protection and asynchronous saves together; asynchronous saves get at least 8 (default: no limit; "
        "re-protection gets 256 while the node saves or loads, and 16 while its ranks fetch)",
    )
    number("--scrub-mib-per-s", "rate of the scrub, which reads the store to find damage (default: %(default)s)")
    number("--upload-mib-per-s", "rate of uploads to the object store (default: %(default)s)")
    number("--upload-part-mib", "size of the parts of an upload to S3, 5 to 512 (default: %(default)s)", int)
    number("--scrub-every-s", "seconds between two scrubs (default: %(default)s)")
    number("--round-every-s", "seconds between two rounds of re-protection (default: %(default)s)")
    number("--drain-s", "after SIGTERM, complete open saves for at most N seconds (default and maximum: %(default)s)")
    number("--nice", "niceness of the threads that write and receive shards, 0 to 19 (default: %(default)s)", int)
    certificate = os.environ.get(TLS_CERT_ENV, "")
    help_ = "certificate of the agent (PEM; default: the agent makes one)"
    add("--tls-cert", default=certificate, metavar="FILE", help=help_)
    add(
        "--tls-key",
        default=os.environ.get(TLS_KEY_ENV, ""),
        metavar="FILE",
        help="private key of the certificate (PEM)",
    )
    add("--plain", action="store_true", help="do not encrypt: on a trusted network, and on all nodes or none")
    add("--group", help=f"a group that may read new saves (default: {GROUP_ENV}, else none)")
    add(
        "--direct-io",
        choices=get_args(DirectIO),
        default=os.environ.get(DIRECT_IO_ENV) or "auto",
        help="write copies past the page cache; auto: if the file system is on a block device (default: %(default)s)",
    )
    parser.add_argument("--verbose", action="store_true", help="log every request")


def _add_number(parser: argparse.ArgumentParser, option: str, help_: str, kind: type[float | int] = float) -> None:
    """Adds an option that takes a number. Its default comes from the environment variable, else from AgentConfig.

    Agents that ranks start inherit the variable.
    """
    name = option.removeprefix("--").replace("-", "_")
    variable = f"{AGENT_ENV_PREFIX}{name.upper()}"

    def parse(text: str) -> float:
        try:
            return kind(text)
        except ValueError:
            wanted = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"(or {variable}) must be {wanted}, not {text!r}") from None

    default = os.environ.get(variable, getattr(AgentConfig, name))
    parser.add_argument(option, type=parse, metavar="N", default=default, help=help_)


def run(arguments: argparse.Namespace) -> int:
    """Serves until stopped; returns the exit code 0.

    Raises:
        AgentUnavailable: another agent serves the root, or the port is taken. ConfigInvalid
    """
    if arguments.group:
        # The store takes the group from the environment, and needs it for the first directory that it makes.
        os.environ[GROUP_ENV] = arguments.group
    if arguments.plain:
        os.environ[PLAIN_ENV] = "1"
    level = logging.DEBUG if arguments.verbose else logging.INFO
    directory = LocalStore(arguments.root).root_agent_directory()
    logging.basicConfig(level=level, handlers=[BoundedLog(directory)])
    options = {field.name: getattr(arguments, field.name) for field in fields(AgentConfig)}
    config = AgentConfig(**{**options, "host": arguments.host or listening_host(directory)})
    lower_session_priority(config.nice)
    Agent(config).run()
    return 0
