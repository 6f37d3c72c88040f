"""`--start-agents`: this node's agent runs before the nodes are looked at, as it does before a load."""

import argparse
import time

from replicated_ckpt.agent.peers.address_book import listening_host
from replicated_ckpt.agent.start.launch import ensure_agent
from replicated_ckpt.cli.look.root import open_store
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.peer.client import AgentAddress, AgentClient

_GREETING_WAIT_S = 20.0
_POLL_S = 0.05


def add_start_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--start-agents",
        action="store_true",
        help="start this node's agent if none runs; it announces its address to its peers and exits after a minute "
        "without work",
    )


def open_store_of(arguments: argparse.Namespace) -> LocalStore:
    """The store under `--root`, its agent running if `--start-agents` asks for that.

    Raises:
        CheckpointNotFound, ConfigInvalid, StoreDenied, AgentUnavailable
    """
    store = open_store(arguments.root)
    if arguments.start_agents:
        start_agent(store)
    return store


def start_agent(store: LocalStore) -> AgentAddress:
    """This node's agent, which is started if none runs, and has told the peers that answer where it is."""
    own = ensure_agent(store, listening_host(store.root_agent_directory())).local_address()
    deadline = time.monotonic() + _GREETING_WAIT_S
    with AgentClient(own) as client:
        # Peers fetch copies from this agent: they must know its new address before a plan names it.
        while not client.call("GET", "/v1/status").get("greeted") and time.monotonic() < deadline:
            time.sleep(_POLL_S)
    return own
