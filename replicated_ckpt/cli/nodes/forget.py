"""`replicated-ckpt forget NODE`: removes a node that is gone for good from this node's address book."""

import argparse
import json
from collections.abc import Iterator, Sequence
from shlex import quote

from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.cli.look.checkpoints import (
    DAMAGED,
    CheckpointSeen,
    advise_on_bucket,
    find_needed,
    list_checkpoints,
    list_unmanaged,
)
from replicated_ckpt.cli.look.given_root import add_root_argument, open_store, repeat_command, start_agent
from replicated_ckpt.cli.look.nodes import NodesSeen, look_at_nodes, on_each_host
from replicated_ckpt.cli.look.waiting_saves import list_staged_saves
from replicated_ckpt.cli.printing import add_output_argument, list_next_steps
from replicated_ckpt.core.layout import MANIFEST_NAME
from replicated_ckpt.errors import ConfigInvalid
from replicated_ckpt.node.peers.address_book import PeerBook
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.peer.client import AgentClient

HELP = "Remove a node that is gone for good from this node's address book, and print what is lost with it."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("node", metavar="NODE", help="id of the node, or its host if no other node has that host")
    add_root_argument(parser)
    parser.add_argument("--force", action="store_true", help="also forget a node that may hold the last copy of a file")
    add_output_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Exit code: OK if the node is forgotten, by this command or an earlier one. FAILED if it stays: it may have the
    last copy of a file, and `--force` is missing.

    Raises:
        ConfigInvalid: the address book has no such node, or several, or the node answers. StoreError, AgentUnavailable
    """
    store = open_store(arguments.root)
    seen = look_at_nodes(store)
    forgotten = _find_forgotten(store, seen, arguments.node)
    node = forgotten or find_node(seen, arguments.node)
    # Forgetting a node that answers would give up its copies, while its agent still counts on the copies here.
    if not forgotten and node not in seen.unreached:
        hint = (
            "Only a node that never comes back can be forgotten: end its agent first, once its copies are on other "
            "nodes."
        )
        raise ConfigInvalid(f"{seen.label(node)} answers.", hint)
    rows = list_checkpoints(seen)
    # If the answer to an earlier command was lost, the node is out of the book, and its losses were accepted then.
    losses = {} if forgotten else _list_losses(store, seen, rows, node)
    in_doubt = [str(save) for save in list_staged_saves(store) if node in save.nodes]
    is_done = not losses or arguments.force
    if is_done and not forgotten:
        with AgentClient(start_agent(store)) as client:
            client.call("POST", "/v1/forget", {"node_id": node})
    is_missed = not forgotten and node in find_needed(rows, seen)
    lines = list(_describe(seen, node, losses, in_doubt, is_done=is_done, is_missed=is_missed, root=str(store.root)))
    lines += advise_on_bucket([row for row in rows if row.checkpoint_id in losses], seen)
    lines += [_describe_next(seen, node, repeat_command(arguments, store))] if is_done else []
    if arguments.json:
        found = {"node_id": node, "is_forgotten": is_done, "losses": losses, "in_doubt": in_doubt}
        print(json.dumps({**found, "next_steps": list_next_steps(lines)}, indent=2))
    else:
        print("\n".join(lines))
    return ExitCode.OK if is_done else ExitCode.FAILED


def _find_forgotten(store: LocalStore, seen: NodesSeen, named: str) -> str:
    """The node of that name that an earlier command forgot, perhaps without getting an answer. "": there is none."""
    book = PeerBook(store.root_agent_directory()).read_forgotten() - seen.addresses.keys()
    found = [node for node in book if named in (node, seen.name(node))]
    return found[0] if len(found) == 1 else ""


def find_node(seen: NodesSeen, named: str) -> str:
    """The id of the node that is named by its id, its host, or both.

    Raises:
        ConfigInvalid: this node and its address book have no such node, or several.
    """
    found = [node for node in seen.addresses if named in (node, seen.name(node), seen.addresses[node].host)]
    found = [named] if named in found else found
    if len(found) != 1:
        known = ", ".join(seen.label(node) for node in sorted(seen.addresses)) or "no other node"
        shared = any(name.startswith(f"{named}/") for name in seen.names.values())
        what = "names several nodes" if found or shared else "is not in this node's address book"
        raise ConfigInvalid(f"{named!r} {what}.", f"Name one by its id. Known nodes: {known}.")
    return found[0]


def _list_losses(store: LocalStore, seen: NodesSeen, rows: Sequence[CheckpointSeen], node: str) -> dict[str, list[str]]:
    """By checkpoint, the files of which no node that answered has a copy, and `node` may have one.

    Without a manifest it is unknown which nodes should have the files: any silent node may have them and the manifest.
    """
    losses = {row.checkpoint_id: list(row.missing) for row in rows if row.missing and node in row.not_reached}
    losses |= {row.checkpoint_id: [MANIFEST_NAME] for row in rows if row.state == DAMAGED}
    stock = list_unmanaged(store, seen, {row.checkpoint_id for row in rows})
    return losses | {row.checkpoint_id: list(row.missing) for row in stock if row.missing}


def _describe(
    seen: NodesSeen,
    node: str,
    losses: dict[str, list[str]],
    in_doubt: list[str],
    *,
    is_done: bool,
    is_missed: bool,
    root: str,
) -> Iterator[str]:
    label = seen.label(node)
    for checkpoint_id, names in losses.items():
        verb = "lost with it" if is_done else "would be lost"
        yield f"{verb}: {checkpoint_id}: {', '.join(names)}: no node that answers has a copy, and {label} may"
    if not is_done:
        yield f"refused: {label} stays in the address book; nothing was changed"
        agent = f"replicated-ckpt agent --root {quote(root)}"
        yield f"next step: bring it back, if only for a minute with `{agent}`; or use --force"
        return
    copies = (
        "agents make new copies of its files, if other nodes can take them"
        if is_missed
        else "all copies exist without it"
    )
    yield f"forgotten: this node no longer waits for {label}; {copies}"
    for save in in_doubt:
        yield f"in doubt: {save}"
    if in_doubt:
        yield (
            f"next step: `replicated-ckpt repair --root {quote(root)} --lost {node}` aborts saves that are in doubt "
            "only because of it"
        )


def _describe_next(seen: NodesSeen, node: str, again: str) -> str:
    """Each node has an address book of its own."""
    others = (seen.holdings_by_node.keys() | seen.unreached.keys()) - {seen.own_node, node}
    back = "A job with ranks on the forgotten node adds it again"
    if not others:
        return f"no other node is known. {back}"
    names, run = seen.list_names(others), on_each_host(seen, others, again)
    return f"next step: run the same command on {names}, for example with {run}. {back}"
