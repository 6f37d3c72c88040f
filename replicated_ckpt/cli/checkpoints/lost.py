"""The nodes that `repair --lost` names, by what other commands call them."""

from collections.abc import Sequence

from replicated_ckpt.agent.peers.address_book import PeerBook
from replicated_ckpt.cli.look.doubts import list_staged_saves
from replicated_ckpt.cli.look.nodes import NodesSeen, look_at_nodes
from replicated_ckpt.errors import ConfigInvalid
from replicated_ckpt.stores.local.store import LocalStore


def list_known_nodes(store: LocalStore) -> set[str]:
    """The nodes that this one has met, or waits for to settle a save."""
    known = {peer.node_id for peer in PeerBook(store.root_agent_directory()).read_all()}
    return known | {node for save in list_staged_saves(store) for node in save.nodes}


def find_lost(store: LocalStore, named: Sequence[str]) -> list[str]:
    """The id of each node that is named by its id, its host, or both. A slip of the hand would else give a node up.

    Raises:
        ConfigInvalid: none or several are, of the nodes that are known here and those that a manifest names.
    """
    known = list_known_nodes(store)
    if known.issuperset(named):
        return list(named)
    seen = look_at_nodes(store)
    return [name if name in known else _find(name, seen, known) for name in named]


def _find(named: str, seen: NodesSeen, known: set[str]) -> str:
    nodes = known | seen.names.keys()
    found = [node for node in nodes if named in (node, seen.name(node))]
    if len(found) == 1:
        return found[0]
    shown = ", ".join(sorted(seen.label(node) for node in nodes - {seen.own_node})) or "none"
    is_shared = any(seen.name(node).startswith(f"{named}/") for node in nodes)
    what = "several nodes have that host" if is_shared else "no node of that id or host is known here"
    raise ConfigInvalid(
        f"--lost {named}: {what}. Other nodes that are: {shown}.", "Name one by its id; nothing was changed."
    )
