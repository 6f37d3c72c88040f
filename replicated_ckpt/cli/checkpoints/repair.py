"""`replicated-ckpt repair`: has every node read everything, prints a plan of repairs, and carries it out."""

import argparse
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from operator import index
from typing import Any

from replicated_ckpt.agent.launch import ensure_agent
from replicated_ckpt.agent.repair.audit import Audit, Auditor
from replicated_ckpt.cli.checkpoints.verify import as_json, describe_short, see_audit
from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.cli.look.checkpoints import (
    advise,
    advise_on_bucket,
    describe_absent,
    describe_newer,
    find_id,
    list_checkpoints,
)
from replicated_ckpt.cli.look.given_root import add_root_argument, open_store, start_agent
from replicated_ckpt.cli.look.nodes import NodesSeen, look_at_nodes
from replicated_ckpt.cli.look.progress import show_progress
from replicated_ckpt.cli.look.waiting_saves import (
    advise_on_in_doubt,
    describe_loss,
    describe_wait,
    has_save_in_doubt,
    label_nodes,
    list_staged_saves,
)
from replicated_ckpt.cli.printing import add_output_argument
from replicated_ckpt.core.upkeep.repair_plan import RepairPlan, ShortShard
from replicated_ckpt.errors import ConfigInvalid, ReplicatedCkptError
from replicated_ckpt.node.peers.address_book import PeerBook, listening_host
from replicated_ckpt.node.peers.unmanaged_audit import UnmanagedLook
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.peer.answer import parsing
from replicated_ckpt.stores.peer.client import AgentAddress, AgentClient
from replicated_ckpt.stores.threads import FanOut
from replicated_ckpt.wording import one_line, plural


def list_known_nodes(store: LocalStore) -> set[str]:
    """The nodes in the address book, and those that a save in doubt on this node waits for."""
    known = {peer.node_id for peer in PeerBook(store.root_agent_directory()).read_all()}
    return known | {node for save in list_staged_saves(store) for node in save.nodes}


def find_lost(store: LocalStore, named: Sequence[str]) -> list[str]:
    """The id of each node that is named by its id, its host, or both. A misspelled name must not count a node as lost.

    Raises:
        ConfigInvalid: of the nodes that are known here or named in a manifest, none or several have that name.
    """
    known = list_known_nodes(store)
    # If all are known ids, no node has to be asked: each lost one would cost a time-out.
    if known.issuperset(named):
        return list(named)
    seen = look_at_nodes(store)
    return [name if name in known else _find(name, seen, known) for name in named]


def _find(named: str, seen: NodesSeen, known: set[str]) -> str:
    nodes = known | seen.names.keys()
    found = [node for node in nodes if named in (node, seen.name(node))]
    # Two nodes may share a host, and counting the wrong one as lost would give up its copies.
    if len(found) == 1:
        return found[0]
    shown = ", ".join(sorted(seen.label(node) for node in nodes - {seen.own_node})) or "none"
    is_shared = any(seen.name(node).startswith(f"{named}/") for node in nodes)
    what = "several nodes have that host" if is_shared else "no known node has that id or host"
    raise ConfigInvalid(f"--lost {named}: {what}. Known nodes: {shown}.", "Name a node by its id. Nothing was changed.")


ROUNDS_MAX = 4
"""A restored manifest can show damaged files, so a second round may have work. A third one finds nothing."""
_OF_STOCK = (
    "stock torch wrote it, without checksums. Load it and save it under a new id: the new save has checksums and copies"
)
HELP = "Move bad files aside, restore them from good copies, and make missing copies, on all nodes."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_root_argument(parser)
    parser.add_argument("id", nargs="?", metavar="ID", help="only this checkpoint, or latest (default: all)")
    parser.add_argument("--dry-run", action="store_true", help="print the plan; change nothing")
    parser.add_argument(
        "--lost",
        action="append",
        default=[],
        metavar="NODE",
        help="id or host of a node that is gone for good: make its copies anew, and abort saves that are in doubt only "
        "because of it; may be repeated",
    )
    add_output_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Exit code: OK if the whole plan was carried out and no shard is lost. See ExitCode for the others."""
    store = open_store(arguments.root)
    arguments.id = arguments.id and find_id(store, arguments.id)
    arguments.lost = find_lost(store, arguments.lost)
    audit = Auditor(store, arguments.lost).audit(arguments.id)
    stock = _list_stock(store, audit, arguments)
    if arguments.id and not stock:
        _check_is_there(store, audit, arguments.id)
    if not arguments.json:
        _print_in_doubt(store, audit, arguments.lost)
        _print_plan(store, audit)
        for checkpoint_id in stock:
            print(f"not repaired: {checkpoint_id}: {_OF_STOCK}")
    newer = [] if arguments.id else see_audit(store, audit).newer
    done = _Done(short=set(audit.plan.short))
    if not arguments.dry_run:
        done.errors |= _abort_lost(store, arguments.lost)
        _carry_out_until_done(store, audit.plan, arguments.lost, done)
    in_doubt = list_staged_saves(store)
    if arguments.json:
        outcome = {"unmanaged": list(stock), "dry_run": arguments.dry_run, "failed": done.errors}
        others = {"in_doubt": [asdict(save) for save in in_doubt], "newer_format": newer}
        print(json.dumps({**as_json(audit), **outcome, **others}, indent=2))
    else:
        for line in map(describe_newer, newer):
            print(f"not checked: {line}")
        if not arguments.dry_run:
            _print_outcome(done, audit, see_audit(store, audit))
    code = _exit_code(audit, done, has_in_doubt=bool(in_doubt) and has_save_in_doubt(store))
    return ExitCode.FAILED if (newer or arguments.id in stock) and code != ExitCode.SHARD_LOST else code


def _list_stock(store: LocalStore, audit: Audit, arguments: argparse.Namespace) -> tuple[str, ...]:
    """The requested checkpoints of stock torch, newest first. They have no checksums, so no action is planned for them."""
    # Lost and silent nodes are not asked: each would cost one more time-out.
    not_asked = {*arguments.lost, *audit.silent_nodes}
    peers = [peer for peer in PeerBook(store.root_agent_directory()).read_all() if peer.node_id not in not_asked]
    found = UnmanagedLook(store, store.read_node_id(), peers).checkpoints(arguments.id, audit.checkpoint_ids)
    return tuple(checkpoint.checkpoint_id for checkpoint in found)


@dataclass
class _Done:
    """The actions done, the errors of failed ones, and the shards that still have too few copies."""

    actions: list[object] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)
    short: set[ShortShard] = field(default_factory=set)


def _exit_code(audit: Audit, done: _Done, *, has_in_doubt: bool) -> ExitCode:
    if any(short.is_lost for short in done.short):
        return ExitCode.SHARD_LOST
    if done.errors or done.short:
        return ExitCode.FAILED
    return ExitCode.UNREACHABLE if audit.unreachable or has_in_doubt else ExitCode.OK


def _carry_out_until_done(store: LocalStore, plan: RepairPlan, lost: Sequence[str], done: _Done) -> None:
    """Carries out a plan, reads the affected files again, and repeats this until `verify` would find nothing to do."""
    for _ in range(ROUNDS_MAX):
        if not plan.actions:
            return
        peers = {peer.node_id: peer for peer in PeerBook(store.root_agent_directory()).read_all()}
        errors = carry_out(plan, peers | _own_address(store), lambda node: f"node {node}")
        done.actions += plan.actions
        done.errors |= errors
        # A failed action would fail again in the next round, after another read of every file.
        if errors:
            return
        changed = sorted({action.checkpoint_id for action in plan.actions})
        plan = _join_plans([Auditor(store, lost).audit(checkpoint_id).plan for checkpoint_id in changed])
        done.short = {short for short in done.short if short.checkpoint_id not in changed} | set(plan.short)
    done.errors |= {str(action): "not done yet" for action in plan.actions}


def _join_plans(plans: Sequence[RepairPlan]) -> RepairPlan:
    return RepairPlan(
        tuple(action for plan in plans for action in plan.restore),
        tuple(action for plan in plans for action in plan.copy),
        tuple(action for plan in plans for action in plan.set_aside),
        tuple(short for plan in plans for short in plan.short),
    )


def _own_address(store: LocalStore) -> dict[str, AgentAddress]:
    """This node's agent, started if none runs, after it has announced its address to the other nodes."""
    own = start_agent(store)
    return {own.node_id: own}


def carry_out(
    plan: RepairPlan, address_by_node: Mapping[str, AgentAddress], label: Callable[[str], str]
) -> dict[str, str]:
    """Has all agents do their parts at the same time. Returns errors by failed action or node label."""

    def do_part(node: str) -> dict[str, str]:
        with AgentClient(address_by_node[node]) as client:
            answer = client.call("POST", "/v1/repair", {"plan": plan.of_node(node).to_json()})
        return list_failures(answer, client.address.label)

    with show_progress("copying", "copied", _Copying(plan, address_by_node).look):
        outcome = FanOut.run(sorted({action.node_id for action in plan.actions}), do_part)
    errors = {action: error for result in outcome.results.values() for action, error in result.items()}
    return errors | {label(node): error.message for node, error in outcome.errors.items()}


class _Copying:
    """The progress of the agents with the copies of a plan."""

    def __init__(self, plan: RepairPlan, address_by_node: Mapping[str, AgentAddress]) -> None:
        self._addresses = {copy.node_id: address_by_node[copy.node_id] for copy in plan.copy}
        self._sizes = Counter[str]()
        for copy in plan.copy:
            self._sizes[copy.node_id] += copy.size_bytes
        self._at_first: dict[str, int] = {}

    def look(self) -> Mapping[str, tuple[int, int]]:
        now = FanOut.run(self._addresses, self._ask).results
        self._at_first = {**now, **self._at_first}
        return {node: (fetched - self._at_first[node], self._sizes[node]) for node, fetched in now.items()}

    def _ask(self, node: str) -> int:
        with AgentClient(self._addresses[node]) as client:
            answer = client.call("GET", "/v1/status?brief=1")
        with parsing(f"{self._addresses[node].label} sent an invalid report of its progress"):
            return index(answer["bytes_fetched"])


def list_failures(answer: Mapping[str, Any], label: str) -> dict[str, str]:
    """The errors of a node's part of a plan, by action.

    Raises:
        PeerProtocolError: the answer is invalid.
    """
    with parsing(f"{label} sent an invalid answer to repair"):
        results = [(result["action"], result["error"]) for result in answer["results"] if result["error"]]
    return {one_line(action): one_line(error) for action, error in results}


def _check_is_there(store: LocalStore, audit: Audit, checkpoint_id: str) -> None:
    """Raises CheckpointNotFound: no file of the checkpoint was seen, and no save of this id is in doubt."""
    staged = (save.checkpoint_id for save in list_staged_saves(store))
    if checkpoint_id not in {*audit.checkpoint_ids, *staged}:
        raise describe_absent(store, look_at_nodes(store), checkpoint_id)


def _print_in_doubt(store: LocalStore, audit: Audit, lost: Sequence[str]) -> None:
    """Prints the saves in doubt on this node, what they wait for, and what `--lost` would lose."""
    saves = list_staged_saves(store)
    where, seen = label_nodes(store, saves), see_audit(store, audit)
    for save in saves:
        print(f"in doubt: {save}")
        for node in save.nodes:
            print(f"  {where[node]}")
        if lost and not save.blocked_by:
            print(
                f"to do: {describe_loss(save, lost, [h for reading in audit.readings for h in reading.held.holdings])}"
            )
            continue
        print(f"  {describe_wait(save, seen)}")
        for line in advise_on_in_doubt(save, seen, store.root):
            print(line)


def _abort_lost(store: LocalStore, lost: Sequence[str]) -> dict[str, str]:
    """Has this node's agent settle saves that are in doubt only because of lost nodes. Returns those still in doubt."""
    saves = list_staged_saves(store) if lost else []
    # Without a save in doubt, no agent is started.
    if not saves:
        return {}
    own = ensure_agent(store, listening_host(store.root_agent_directory())).local_address()
    errors = {}
    # One at a time: a save that cannot be settled must not keep the others in doubt.
    for save in saves:
        try:
            with AgentClient(own) as client:
                answer = client.call("POST", "/v1/abort-lost", {"save_id": save.save_id, "lost": list(lost)})
        except ReplicatedCkptError as exc:
            errors[f"abort save {save.save_id}"] = str(exc)
            continue
        if answer["waits_for"]:
            errors[f"abort save {save.save_id}"] = f"it also waits for node {', '.join(answer['waits_for'])}"
    return errors


def _print_plan(store: LocalStore, audit: Audit) -> None:
    seen = see_audit(store, audit)
    for action in audit.plan.actions:
        print(f"to do: {seen.label_all(action)}")
    for short in audit.plan.short:
        print(describe_short(short))
    for line in audit.unreachable:
        print(f"not reached: {line}")
    if not audit.plan.actions:
        done = "nothing to repair on the nodes that answered" if audit.unreachable else "nothing to repair"
        print(done if audit.plan.is_complete else "nothing can be repaired now")
    rows = list_checkpoints(seen)
    for line in advise_on_bucket(rows, seen) if audit.plan.actions else advise(rows, seen, store.root):
        print(line)


def _print_outcome(done: _Done, audit: Audit, seen: NodesSeen) -> None:
    for short in done.short - set(audit.plan.short):
        print(describe_short(short))
    for action, error in done.errors.items():
        print(f"failed: {seen.label_all(action)}: {error}")
    print(f"{max(0, len(done.actions) - len(done.errors))} of {plural(len(done.actions), 'action')} done")
