"""The decision about a save, as it follows from the posts of the ranks."""

from dataclasses import replace
from typing import Any

import pytest

from replicated_ckpt.config import Retention, WriterConfig
from replicated_ckpt.dcp.agreement.decision import (
    Receipt,
    SaveDecision,
    SavePost,
    ShardReceipt,
    decide,
    list_weaknesses,
)
from replicated_ckpt.dcp.agreement.node_post import NodePost
from replicated_ckpt.dcp.c10d.group_pool import describe_wanted
from replicated_ckpt.errors import CheckpointIdMismatch, ConfigInvalid
from replicated_ckpt.stores.peer.client import AgentAddress


def post(node: str, **changes: str | None) -> SavePost:
    address = AgentAddress(node, "127.0.0.1", 1, f"token of {node}")
    made = NodePost(node, f"host of {node}", f"boot of {node}", f"inode of {node}", None, address)
    return SavePost("step-1", replace(made, **changes))  # type: ignore[arg-type]


def test_ranks_of_one_store_are_one_node() -> None:
    """Ranks with one store are one node, nodes are in rank order, and the decision survives JSON."""
    decision = decide([post("a"), post("a"), post("b"), post("a")], 2, "0" * 32)
    assert [node.node_id for node in decision.nodes] == ["a", "b"]
    assert [decision.node_of(rank).node_id for rank in range(4)] == ["a", "a", "b", "a"]
    assert decision.ranks_of("a") == (0, 1, 3)
    assert decision.placement.buddies_by_node == {"a": ("b",), "b": ("a",)}
    assert SaveDecision.from_json(decision.to_json()) == decision


def test_differing_ids_are_listed_by_rank() -> None:
    """The error lists each rank's id, and the hint explains how ranks agree on one."""
    with pytest.raises(CheckpointIdMismatch, match="rank 1: 'step-2'") as raised:
        decide([post("a"), replace(post("b"), checkpoint_id="step-2")], 2, "0" * 32)
    assert raised.value.id_by_rank == {0: "step-1", 1: "step-2"}
    for cure in ("dist.broadcast_object_list(ids, src=0)", 'ReplicatedWriter(checkpoint_id_from="coordinator")'):
        assert cure in raised.value.hint


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("copies", 3),
        ("ack", "local"),
        ("on_degraded", "raise"),
        ("overwrite", True),
        ("object_store", "s3://bucket/run"),
        ("retention", Retention(keep_last=3)),
    ],
)
def test_ranks_must_want_one_save(name: str, value: Any) -> None:
    """Ranks with different options raise ConfigInvalid, which lists the values by rank."""
    config = WriterConfig("/nvme", 2, "peer", None, "warn", overwrite=False)
    wanted = [config, replace(config, **{name: value}), config]
    posts = [replace(post(node), wants=describe_wanted(each)) for node, each in zip("abc", wanted, strict=True)]
    with pytest.raises(ConfigInvalid) as raised:
        decide([SavePost.from_json(each.to_json()) for each in posts], 2, "0" * 32)
    was = repr(getattr(config, name))
    told = f"{name} is {was} on ranks 0, 2 (host host of a); {value!r} on rank 1 (host host of b)"
    assert str(raised.value).startswith(f"The ranks ask for different saves: {told}.")


def test_options_of_one_node_may_differ() -> None:
    """The root, the domain, direct I/O and `checkpoint_id_from` may differ between ranks."""
    config = WriterConfig("/nvme", 2, "peer", None, "warn", overwrite=False)
    other = replace(config, root="/disk", domain="rack", direct_io="off", checkpoint_id_from="coordinator")
    assert describe_wanted(config) == describe_wanted(other)


@pytest.mark.parametrize("other_host", [True, False])
def test_a_cloned_store_is_noticed(other_host: bool) -> None:
    """Two stores with one identity, on one host or two, are refused: each would count the other's copies as its own."""
    clone = post("a", boot_id="another") if other_host else post("a", store_inode="another")
    clone = replace(
        clone, node=replace(clone.node, address=replace(clone.node.address, token="another"), root="/my disk")
    )
    with pytest.raises(ConfigInvalid, match="identity a: /nvme on host of a and /my disk on host of a") as raised:
        decide([post("a", root="/nvme"), clone], 2, "0" * 32)
    assert "`rm -r '/my disk'/node.json '/my disk'/.agent` on host of a; or" in str(raised.value.hint)
    assert "`rm -r /nvme/node.json /nvme/.agent` on host of a" in str(raised.value.hint)


def test_an_agent_that_was_restarted_between_two_posts_is_no_clone() -> None:
    """Two posts with the same host and store but different tokens are one node."""
    again = post("a")
    again = replace(again, node=replace(again.node, address=replace(again.node.address, token="another")))
    assert len(decide([post("a"), again], 2, "0" * 32).nodes) == 1


def test_weaknesses_are_described() -> None:
    """The weaknesses list too few nodes, a failure domain that buddies share, and a store on a shared file system."""
    one = [post("a"), post("a", boot_id="another host")]
    found = list_weaknesses(decide(one, 2, "0" * 32), 2, one)
    assert any("2 copies are wanted" in text for text in found)
    assert any("shared file system" in text for text in found)
    racks = [post("a", domain="r1"), post("b", domain="r1")]
    assert any("failure domain" in text for text in list_weaknesses(decide(racks, 2, "0" * 32), 2, racks))
    assert list_weaknesses(decide([post("a"), post("b")], 2, "0" * 32), 2, [post("a"), post("b")]) == []


def on_hosts(boots: str) -> list[SavePost]:
    """Nodes n0, n1, ... on these hosts, each in a container of its own."""
    return [post(f"n{number}", boot_id=boot) for number, boot in enumerate(boots)]


def test_copies_of_several_nodes_per_host_are_on_another_host() -> None:
    """Several nodes per host without domains: a node's buddy, and the node that replaces a lost buddy, are on another
    host. There is no warning.
    """
    posts = on_hosts("aabbcc")
    decision = decide(posts, 2, "0" * 32)
    boots = {node.node_id: node.boot_id for node in decision.nodes}
    assert all(boots[node] != boots[decision.buddies_of(node)[0]] for node in boots)
    assert list_weaknesses(decision, 2, posts) == []
    for lost in "abc":
        left = replace(decision, unreached=tuple(node for node, boot in boots.items() if boot == lost))
        kept = boots.keys() - {*left.unreached}
        assert all(boots[node] != boots[left.buddies_of(node)[0]] for node in kept), f"host {lost} does not answer"


@pytest.mark.parametrize(("boots", "hosts", "weak"), [("aaaa", "1 host", 4), ("aaab", "2 hosts", 2)])
def test_copies_on_one_host_are_warned_of(boots: str, hosts: str, weak: int) -> None:
    """Copies that must share a host give a warning with the number of hosts and the way to name domains. Named domains
    suppress the warning.
    """
    posts = on_hosts(boots)
    (said,) = list_weaknesses(decide(posts, 2, "0" * 32), 2, posts)
    assert said.startswith(f"the 4 nodes of this save are on {hosts}. For the shards of {weak} nodes, two copies")
    assert "REPLICATED_CKPT_DOMAIN" in said
    named = [replace(each, node=replace(each.node, domain=f"rack {number}")) for number, each in enumerate(posts)]
    assert list_weaknesses(decide(named, 2, "0" * 32), 2, named) == []


def test_a_receipt_survives_the_blackboard() -> None:
    receipt = Receipt((ShardReceipt("__0_0.distcp", 5, 7, ("a", "b")),))
    assert Receipt.from_json(receipt.to_json()) == receipt
