"""`replicated-ckpt repair`: has every node read everything, plans what mends it, prints the plan, then carries it out."""

import argparse
import ipaddress
import json
import time
from collections.abc import Mapping
from typing import Any

from replicated_ckpt.agent.audit import Audit, Auditor
from replicated_ckpt.agent.launch import ensured_agent
from replicated_ckpt.agent.peers import PeerBook
from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.cli.verify import as_json, existing_store
from replicated_ckpt.core.repair import RepairPlan
from replicated_ckpt.errors import PeerProtocolError
from replicated_ckpt.stores.agent_client import AgentAddress, AgentClient
from replicated_ckpt.stores.fanout import FanOut
from replicated_ckpt.stores.local import LocalStore

_GREETING_WAIT_S = 20.0
_POLL_S = 0.05
HELP = "Set bad files aside, restore them from good copies, and make up for missing copies, on all nodes."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--root", required=True, help="a node's store")
    parser.add_argument("--checkpoint", metavar="ID", help="only this checkpoint (default: all)")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and change nothing")
    parser.add_argument(
        "--lost",
        action="append",
        default=[],
        metavar="NODE",
        help="this node is gone for good: its copies are made anew (may be given several times)",
    )
    parser.add_argument("--json", action="store_true", help="the same for machines")


def run(arguments: argparse.Namespace) -> int:
    """Exit code: OK if everything that was planned is done and no shard is lost; see ExitCode for the rest.

    Raises:
        CheckpointNotFound, StoreError, AgentUnavailable
    """
    store = existing_store(arguments.root)
    audit = Auditor(store, arguments.lost).audited(arguments.checkpoint)
    if not arguments.json:
        _print_plan(audit)
    errors = {} if arguments.dry_run else _carried_out(store, audit.plan)
    if arguments.json:
        outcome = {"dry_run": arguments.dry_run, "failed": errors}
        print(json.dumps({**as_json(audit), **outcome}, indent=2))
    elif not arguments.dry_run:
        _print_outcome(audit.plan, errors)
    return _exit_code(audit, errors)


def _exit_code(audit: Audit, errors: Mapping[str, str]) -> ExitCode:
    if audit.plan.lost:
        return ExitCode.SHARD_LOST
    if errors or audit.plan.short:
        return ExitCode.FAILED
    return ExitCode.UNREACHABLE if audit.unreachable else ExitCode.OK


def _carried_out(store: LocalStore, plan: RepairPlan) -> dict[str, str]:
    """Has each node's agent do its part, all at once; returns what failed: the action, or the node, and why."""
    nodes = sorted({action.node_id for action in plan.actions})
    if not nodes:
        return {}
    addresses = {peer.node_id: peer for peer in PeerBook(store.root_agent_directory()).known()}
    own = ensured_agent(store, _bind_host(list(addresses.values())))
    addresses[own.node_id] = own.local_address()
    _wait_until_known(own.local_address())

    def told(node: str) -> dict[str, str]:
        with AgentClient(addresses[node]) as client:
            answer = client.call("POST", "/v1/repair", {"plan": plan.of_node(node).to_json()})
        return _failures(answer, addresses[node])

    outcome = FanOut[str, dict[str, str]]().run(nodes, told)
    errors = {action: error for result in outcome.results.values() for action, error in result.items()}
    return {**errors, **{f"node {node}": error.message for node, error in outcome.errors.items()}}


def _wait_until_known(own: AgentAddress) -> None:
    """An agent that has just been started tells its peers where it is; they may have to fetch something from it."""
    deadline = time.monotonic() + _GREETING_WAIT_S
    with AgentClient(own) as client:
        while not client.call("GET", "/v1/status").get("greeted") and time.monotonic() < deadline:
            time.sleep(_POLL_S)


def _failures(answer: Mapping[str, Any], address: AgentAddress) -> dict[str, str]:
    try:
        return {str(result["action"]): str(result["error"]) for result in answer["results"] if result["error"]}
    except (KeyError, TypeError) as exc:
        raise PeerProtocolError(f"{address.label} answered repair wrongly: {exc}.") from exc


def _bind_host(peers: list[AgentAddress]) -> str:
    """Where an agent that has to be started listens: peers on other hosts must reach it."""
    return "127.0.0.1" if all(_is_loopback(peer.host) for peer in peers) else "0.0.0.0"  # noqa: S104 - a token guards it


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _print_plan(audit: Audit) -> None:
    for action in audit.plan.actions:
        print(f"to do: {action}")
    for short in audit.plan.short:
        print(f"{'lost' if short.have == 0 else 'too few nodes'}: {short}")
    for line in audit.unreachable:
        print(f"not reached: {line}")
    if not audit.plan.actions:
        print("nothing to do")


def _print_outcome(plan: RepairPlan, errors: Mapping[str, str]) -> None:
    for action, error in errors.items():
        print(f"failed: {action}: {error}")
    print(f"{len(plan.actions) - len(errors)} of {len(plan.actions)} actions done")
