"""Placement: the nodes that hold copies for each node, as a printable value.

Disjoint groups of `copies` nodes, not a ring over all of them: with two copies, this halves the pairs of nodes whose
loss is fatal.
Source: Wang et al., GEMINI, SOSP 2023, section 4 (group placement). Failure domains come first, rank order second.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from replicated_ckpt.errors import ConfigInvalid


@dataclass(frozen=True)
class PlacedNode:
    """A node to be placed. Nodes are passed in rank order. `domains`: from `list_domains` in
    `core/manifest.py`; (): the node fails alone.

    `state`: equal for nodes whose ranks have the same values, which then need not send them to each other.
    """

    node_id: str
    domains: tuple[str, ...] = ()
    state: str = ""


@dataclass(frozen=True)
class Placement:
    """The holders of copies for each node.

    Each group's nodes form a ring; a node's buddies are the next `copies - 1` nodes in it. `copies` is smaller than
    requested if there are fewer nodes. `shared_domain` has the nodes with two copies in one domain of the largest kind.
    """

    copies: int
    groups: tuple[tuple[str, ...], ...]
    shared_domain: tuple[str, ...]

    @cached_property
    def buddies_by_node(self) -> Mapping[str, tuple[str, ...]]:
        return {
            node: tuple(group[(index + step) % len(group)] for step in range(1, self.copies))
            for group in self.groups
            for index, node in enumerate(group)
        }

    @cached_property
    def _order(self) -> list[str]:
        return [member for group in self.groups for member in group]

    def substitutes(self, node: str) -> tuple[str, ...]:
        """Nodes that can replace a lost buddy of `node`, nearest first, without its buddies."""
        order = self._order
        at = order.index(node)
        taken = {node, *self.buddies_by_node[node]}
        return tuple(member for member in order[at + 1 :] + order[:at] if member not in taken)


def place_copies(nodes: Sequence[PlacedNode], copies: int) -> Placement:
    """Placement of `copies` copies over `nodes`: as few nodes as possible share a domain, the largest domains first.

    Holds afterwards: every node is in exactly one group; no node is its own buddy; every node has min(copies, nodes) - 1
    buddies, all different; groups have between `copies` and `2 * copies - 1` nodes.

    Raises:
        ConfigInvalid: copies below one, no node, or one node twice.
    """
    # One node listed twice would be its own buddy: two copies on one disk.
    if copies < 1 or not nodes or len({node.node_id for node in nodes}) != len(nodes):
        raise ConfigInvalid(f"Cannot place {copies} copies on nodes {[node.node_id for node in nodes]}.")
    # Fewer nodes than copies: each node gets one.
    copies = min(copies, len(nodes))
    levels = _list_levels(nodes)

    def count_sharing(placement: Placement) -> list[int]:
        return [len(_find_sharing(placement, level)) for level in levels]

    tried: list[Placement] = []
    # From the largest domains down: a smaller level is tried only if nodes still share a domain.
    for domain_of in levels:
        tried.append(_place_by(domain_of, nodes, copies))
        if not any(count_sharing(tried[-1])):
            break
    best = min(tried, key=count_sharing)
    return replace(best, shared_domain=_find_sharing(best, levels[0]))


def _list_levels(nodes: Sequence[PlacedNode]) -> list[Mapping[str, str]]:
    """The domain of each node, for each level of domains, the largest first."""
    longest = max(nodes, key=lambda node: len(node.domains)).domains
    return [
        # A node without a domain at this level fails alone: NUL keeps its id apart from any named domain.
        {node.node_id: node.domains[level] if level < len(node.domains) else f"\0{node.node_id}" for node in nodes}
        for level in range(len(longest) or 1)
    ]


def _place_by(domain_of: Mapping[str, str], nodes: Sequence[PlacedNode], copies: int) -> Placement:
    rank_of = {node.node_id: index for index, node in enumerate(nodes)}
    groups = _disjoint_groups(nodes, copies, domain_of)
    grouped = {member for group in groups for member in group}
    for node in nodes:
        if node.node_id not in grouped:
            _join(groups, node.node_id, domain_of)
    groups = [_ring(group, copies, domain_of) for group in groups]
    groups.sort(key=lambda group: min(rank_of[member] for member in group))
    return Placement(copies, tuple(tuple(group) for group in groups), ())


def _disjoint_groups(nodes: Sequence[PlacedNode], copies: int, domain_of: Mapping[str, str]) -> list[list[str]]:
    """Groups of exactly `copies` nodes; up to `copies - 1` nodes stay out.

    Consecutive groups use the same domains, so whole domains are paired with whole domains. If that would leave too few
    distinct domains for later groups, the domains with most remaining nodes are used instead. Nodes of one state come
    together where the domains allow it.
    """
    left: dict[str, list[str]] = {}
    first = {node.state: place for place, node in reversed(list(enumerate(nodes)))}
    counts = Counter(node.state for node in nodes)
    # Only states of several nodes: for any other, each choice would search all remaining nodes in vain.
    state_of = {node.node_id: node.state for node in nodes if counts[node.state] > 1}
    for node in nodes:
        left.setdefault(domain_of[node.node_id], []).append(node.node_id)
    if len(left) == len(nodes):
        ordered = [node.node_id for node in sorted(nodes, key=lambda node: first[node.state])]
        return [ordered[start : start + copies] for start in range(0, len(ordered) - copies + 1, copies)]
    groups: list[list[str]] = []
    current: list[str] = []
    for remaining in range(len(nodes) // copies, 0, -1):
        if not _can_stay(left, current, copies, remaining):
            current = sorted(left, key=lambda domain: -len(left[domain]))[:copies]
        group: list[str] = []
        for domain in current:
            if left[domain]:
                group.append(_take_like(left[domain], group, state_of))
        while len(group) < copies:
            fullest = max(left, key=lambda domain: len(left[domain]))
            group.append(_take_like(left[fullest], group, state_of))
        groups.append(group)
    return groups


def _take_like(members: list[str], group: Sequence[str], state_of: Mapping[str, str]) -> str:
    """Removes and returns the first member with the state of the group's first node; if there is none, the first member."""
    wanted = state_of.get(group[0]) if group else None
    if wanted is None:
        return members.pop(0)
    like = (index for index, member in enumerate(members) if state_of.get(member) == wanted)
    return members.pop(next(like, 0))


def intended_holders(acknowledged: Sequence[str], buddies: Sequence[str], copies: int) -> tuple[str, ...]:
    """The intended holders of a shard: nodes that acknowledged it and, if they are too few, buddies that did not."""
    missing = [node for node in buddies if node not in acknowledged]
    return (*acknowledged, *missing[: max(0, copies - len(acknowledged))])


def _can_stay(left: Mapping[str, list[str]], current: Sequence[str], copies: int, remaining: int) -> bool:
    """Whether one more group from the `current` domains leaves enough distinct domains for the groups after it.

    Each group can have distinct domains if no domain has more nodes than there are groups (pigeonhole). A larger domain
    contributes at most one node to each group.
    """
    if len(current) < copies or not all(left[domain] for domain in current):
        return False
    after = {domain: len(members) - (domain in current) for domain, members in left.items()}
    return sum(min(count, remaining - 1) for count in after.values()) >= (remaining - 1) * copies


def _join(groups: list[list[str]], node: str, domain_of: Mapping[str, str]) -> None:
    """Adds a remaining node to the last of the smallest groups in which its domain is rarest."""
    smallest = min(len(group) for group in groups)
    candidates = [group for group in reversed(groups) if len(group) == smallest]
    host = min(candidates, key=lambda group: sum(domain_of[member] == domain_of[node] for member in group))
    host.append(node)


def _ring(group: list[str], copies: int, domain_of: Mapping[str, str]) -> list[str]:
    """The group's order as a ring, so that any `copies` consecutive nodes differ in domain if possible."""
    ring = [group[0]]
    rest = group[1:]
    while rest:
        near = [domain_of[member] for member in ring[-(copies - 1) :]]
        following = min(rest, key=lambda member: (near.count(domain_of[member]), rest.index(member)))
        ring.append(following)
        rest.remove(following)
    return ring


def _find_sharing(placement: Placement, domain_of: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(
        node
        for node, buddies in placement.buddies_by_node.items()
        if len({domain_of[node], *(domain_of[buddy] for buddy in buddies)}) < placement.copies
    )
