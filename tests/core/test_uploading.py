"""Which node uploads a shard to the bucket."""

import pytest

from replicated_ckpt.core.inventory import Holding
from replicated_ckpt.core.manifest import Manifest, NodeEntry, ShardEntry
from replicated_ckpt.core.upkeep.policy import NodeReport
from replicated_ckpt.core.upkeep.repair import NodeView, Presence
from replicated_ckpt.core.upkeep.upload_plan import choose_uploader

SHARD, SIZE = "__0_0.distcp", 100
SAVE = "5" * 32
MANIFEST = Manifest(
    save_id=SAVE,
    checkpoint_id="step-1",
    sequence=1,
    created_unix_s=0.0,
    world_size=3,
    copies=2,
    metadata_bytes=1,
    metadata_crc32c=0,
    nodes=tuple(NodeEntry(node, node, None, (rank,)) for rank, node in enumerate(("owner", "buddy", "third"))),
    shards={SHARD: ShardEntry(SIZE, 0, 0, "owner", ("owner", "buddy"))},
)
UP, SILENT, GONE = Presence.UP, Presence.ASSUMED, Presence.GONE


def node(name: str, presence: Presence, what: str = "whole") -> NodeView:
    """A view of a node with an intact, a damaged or no copy of the shard, or without a known holding (`unheard`).

    `unable`: the node cannot upload. `replaced`: a newer save is published there. `ordered`: its user has ordered the
    upload.
    """
    if what == "unheard":
        return NodeView(name, presence, None)
    sizes = {} if what == "none" else {SHARD: SIZE}
    damaged = (SHARD,) if what == "damaged" else ()
    unable, ordered = (frozenset({SAVE} if what == word else ()) for word in ("unable", "ordered"))
    node_report = NodeReport(unable=unable, ordered=ordered)
    held = Holding(name, "step-1", SAVE, 1, True, sizes, damaged=damaged, is_replaced=what == "replaced")
    return NodeView(name, presence, (held,), node_report=node_report)


@pytest.mark.parametrize(
    ("own", "others", "chosen"),
    [
        ("owner", [], "owner"),
        ("owner", [node("buddy", UP), node("third", UP)], "owner"),
        ("buddy", [node("owner", UP)], "owner"),
        ("buddy", [node("owner", UP, "none")], "buddy"),
        ("buddy", [node("owner", UP, "damaged")], "buddy"),
        ("buddy", [node("owner", UP, "replaced")], "buddy"),
        ("buddy", [node("owner", SILENT)], None),
        ("buddy", [node("owner", SILENT, "unheard")], None),
        ("buddy", [node("owner", GONE)], "buddy"),
        ("buddy", [node("owner", GONE, "unheard")], "buddy"),
        ("buddy", [], "buddy"),
        ("third", [node("owner", GONE), node("buddy", UP)], "buddy"),
        ("third", [node("owner", GONE), node("buddy", SILENT, "unheard")], None),
        ("third", [node("owner", GONE), node("buddy", GONE)], "third"),
        ("third", [node("owner", GONE), node("buddy", UP, "unable")], "third"),
        ("buddy", [node("owner", UP, "unable")], "buddy"),
        ("third", [node("owner", GONE), node("buddy", UP, "none")], "third"),
        ("third", [node("owner", GONE), node("buddy", GONE), node("other", UP)], "other"),
        ("third", [node("owner", GONE), node("buddy", GONE), node("other", SILENT, "unheard")], "third"),
    ],
)
def test_the_first_node_in_order_with_a_copy_uploads(own: str, others: list[NodeView], chosen: str | None) -> None:
    """The owner uploads, else an intended holder, else any node with a copy. A node that is only silent is waited for."""
    assert choose_uploader(MANIFEST, SHARD, others, own) == chosen


@pytest.mark.parametrize(("what", "chosen"), [("whole", "buddy"), ("ordered", "owner")])
def test_an_order_is_carried_out_by_nodes_that_have_it(what: str, chosen: str) -> None:
    """An order to upload is carried out by nodes that have the order. Other nodes refuse, and are not waited for."""
    others = [node("owner", UP, what)]
    assert choose_uploader(MANIFEST, SHARD, others, "buddy", is_ordered=True) == chosen
    assert choose_uploader(MANIFEST, SHARD, others, "buddy") == "owner"
