"""Placement: buddies are other nodes, in other domains if possible, with as few fatal pairs as possible."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicated_ckpt.core.manifest import list_domains
from replicated_ckpt.core.protocol.placement import PlacedNode, Placement, intended_holders, place_copies
from replicated_ckpt.errors import ConfigInvalid


def nodes_of(domains: list[str | None]) -> list[PlacedNode]:
    return [PlacedNode(f"n{index}", (domain,) if domain else ()) for index, domain in enumerate(domains)]


def groups_of(domains: list[str | None], copies: int) -> list[list[int]]:
    return [[int(node[1:]) for node in group] for group in place_copies(nodes_of(domains), copies).groups]


@pytest.mark.parametrize(
    ("count", "copies", "expected"),
    [
        (1, 2, [[0]]),
        (2, 2, [[0, 1]]),
        (3, 2, [[0, 1, 2]]),
        (4, 2, [[0, 1], [2, 3]]),
        (5, 2, [[0, 1], [2, 3, 4]]),
        (3, 3, [[0, 1, 2]]),
        (7, 3, [[0, 1, 2], [3, 4, 5, 6]]),
        (8, 3, [[0, 1, 2, 7], [3, 4, 5, 6]]),
        (4, 1, [[0], [1], [2], [3]]),
    ],
)
def test_neighbours_in_rank_order_form_disjoint_groups(count: int, copies: int, expected: list[list[int]]) -> None:
    """Without domains, groups are neighbours in rank order. A leftover node joins a group, and no node shares a domain."""
    assert groups_of([None] * count, copies) == expected
    assert place_copies(nodes_of([None] * count), copies).shared_domain == ()


def test_nodes_of_one_state_are_buddies_where_domains_allow_it() -> None:
    """Replicas of HSDP need not send copies to each other. Copies in different domains take precedence over that."""

    def groups(states: str, domains: str) -> list[list[str]]:
        nodes = [
            PlacedNode(f"n{index}", (domain,), state)
            for index, (state, domain) in enumerate(zip(states, domains, strict=True))
        ]
        return [list(group) for group in place_copies(nodes, 2).groups]

    assert groups("abab", "1234") == [["n0", "n2"], ["n1", "n3"]]
    assert groups("abab", "1122") == [["n0", "n2"], ["n1", "n3"]]
    assert groups("aabb", "1122") == [["n0", "n2"], ["n1", "n3"]], "in one rack the replicas would be lost together"
    assert groups("abba", "1122") == [["n0", "n3"], ["n1", "n2"]]
    assert groups("abcd", "1234") == groups("    ", "1234") == [["n0", "n1"], ["n2", "n3"]]


def test_whole_domains_are_paired_with_whole_domains() -> None:
    """The loss of two racks loses data only if they are a pair."""
    racks = [rack for rack in "ABCD" for _ in range(4)]
    placement = place_copies(nodes_of(list(racks)), 2)
    pairs = {frozenset(racks[int(node[1:])] for node in group) for group in placement.groups}
    assert pairs == {frozenset("AB"), frozenset("CD")}
    assert placement.shared_domain == ()


def test_racks_stay_with_racks_next_to_one_of_another_size() -> None:
    """With three racks of four nodes and one of one, four pairs of racks are fatal. Changing partners would make five."""
    racks = "AAAABBBBCCCCD"
    placement = place_copies(nodes_of(list(racks)), 2)
    pairs = {
        frozenset(racks[int(member[1:])] for member in (node, *buddies))
        for node, buddies in placement.buddies_by_node.items()
    }
    assert pairs == {frozenset(pair) for pair in ("AB", "AC", "BC", "CD")}


def test_three_pairs_are_formed_across_three_domains() -> None:
    """Three domains of two nodes each are paired across domains."""
    placement = place_copies(nodes_of(["A", "A", "B", "B", "C", "C"]), 2)
    assert placement.shared_domain == ()


def test_one_domain_larger_than_its_share_is_reported() -> None:
    """If buddies must share a domain, the placement lists those nodes."""
    assert set(place_copies(nodes_of(["A", "A", "A", "B"]), 2).shared_domain) == {"n1", "n2"}


@pytest.mark.parametrize(
    ("domain", "boots", "names", "shares"),
    [
        (None, "aabb", "aabb", 0),  # one disk for each GPU
        (None, "aabb", "1234", 0),  # one container for each GPU
        ("zone", "aabb", "aabb", 4),  # one zone: copies are on different hosts
        (None, "aaaa", "1122", 4),  # one machine: copies are in different containers
    ],
)
def test_without_domains_copies_are_on_different_hosts(domain: str | None, boots: str, names: str, shares: int) -> None:
    """Copies are on different machines, whatever the names of containers, also where one domain cannot separate them."""
    hosts = enumerate(zip(boots, names, strict=True))
    nodes = [PlacedNode(f"n{index}", list_domains(domain, boot, name)) for index, (boot, name) in hosts]
    placement = place_copies(nodes, 2)
    assert placement.groups == (("n0", "n2"), ("n1", "n3"))
    assert len(placement.shared_domain) == shares


def test_a_named_domain_goes_before_the_host() -> None:
    """Nodes in different domains of the user may be buddies on one host."""
    places = enumerate(zip("1212", "aabb", strict=True))
    nodes = [PlacedNode(f"n{index}", list_domains(f"rack-{rack}", boot, boot)) for index, (rack, boot) in places]
    placement = place_copies(nodes, 2)
    assert placement.groups == (("n0", "n1"), ("n2", "n3"))
    assert placement.shared_domain == ()


@pytest.mark.parametrize(
    ("domains", "copies", "weak"),
    [
        ("ACBABCA", 2, 0),  # the leftover node joins the pair without its domain
        ("BABDCABC", 3, 2),  # the first groups must not use up domains that the last one needs
        ("CABAC", 3, 2),  # in a ring, nodes of one domain are as far apart as possible
    ],
)
def test_as_few_nodes_as_possible_share_a_domain(domains: str, copies: int, weak: int) -> None:
    """With leftover nodes or uneven domains, as few nodes as possible share a domain."""
    assert len(place_copies(nodes_of(list(domains)), copies).shared_domain) == weak


@pytest.mark.parametrize(
    ("acknowledged", "expected"),
    [(("a", "b"), ("a", "b")), (("a",), ("a", "b")), (("a", "d"), ("a", "d")), (("b",), ("b", "c")), ((), ("b", "c"))],
)
def test_intended_holders_are_acknowledging_nodes_and_missing_buddies(
    acknowledged: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    """Intended holders are the nodes that acknowledged, plus buddies up to the number of copies, each once."""
    assert intended_holders(acknowledged, ("b", "c"), 2) == expected


@given(st.lists(st.sampled_from([None, "A", "B", "C", "D"]), min_size=1, max_size=14), st.integers(1, 4))
def test_every_node_has_enough_other_nodes_as_buddies(domains: list[str | None], copies: int) -> None:
    """Every node is in one group and has `copies - 1` different buddies, none of which is itself."""
    placement = place_copies(nodes_of(domains), copies)
    members = [node for group in placement.groups for node in group]
    assert sorted(members) == sorted(node.node_id for node in nodes_of(domains))
    assert placement.copies == min(copies, len(domains))
    for node, buddies in placement.buddies_by_node.items():
        assert len(set(buddies)) == len(buddies) == placement.copies - 1
        assert node not in buddies


@given(st.lists(st.sampled_from(["A", "B", "C", "D"]), min_size=2, max_size=12))
def test_pairs_cross_domains_whenever_no_domain_has_more_than_half(domains: list[str]) -> None:
    """With an even number of nodes and no domain above half of them, no buddies share a domain (pigeonhole)."""
    if len(domains) % 2 == 0 and max(map(domains.count, domains)) <= len(domains) // 2:
        assert place_copies(nodes_of(list(domains)), 2).shared_domain == ()


def survivors_have_all(placement: Placement, dead: set[str]) -> bool:
    return all(
        node not in dead or any(buddy not in dead for buddy in buddies)
        for node, buddies in placement.buddies_by_node.items()
    )


@pytest.mark.parametrize("count", [4, 6, 8, 16])
def test_pairs_have_half_as_many_fatal_pairs_as_a_ring(count: int) -> None:
    """With two copies, count / 2 pairs of nodes are fatal. A ring has count."""
    placement = place_copies(nodes_of([None] * count), 2)
    names = [node.node_id for node in nodes_of([None] * count)]
    fatal = [pair for pair in combinations(names, 2) if not survivors_have_all(placement, set(pair))]
    assert len(fatal) == count // 2


def test_substitutes_exclude_the_node_and_its_buddies() -> None:
    """A lost buddy is replaced by the nearest node without the shard."""
    assert place_copies(nodes_of([None] * 6), 2).substitutes("n2") == ("n4", "n5", "n0", "n1")


@pytest.mark.parametrize(("names", "copies"), [([], 2), (["a", "a"], 2), (["a"], 0)])
def test_impossible_input_is_refused(names: list[str], copies: int) -> None:
    """No node, a duplicate node, or no copy raises ConfigInvalid."""
    with pytest.raises(ConfigInvalid):
        place_copies([PlacedNode(name) for name in names], copies)
