"""The overview: missing copies over all nodes, and the newest save of each level of protection."""

from dataclasses import replace

from replicated_ckpt.core.layout import METADATA_NAME
from replicated_ckpt.core.manifest import Manifest
from replicated_ckpt.core.upkeep.overview import Look, Overview, make_overview
from replicated_ckpt.core.upkeep.policy import NOTHING_REPORTED, NodeReport
from replicated_ckpt.core.upkeep.repair import NodeView, Presence
from tests.core.upkeep.test_repair import holding, manifest, shard

UP, ASSUMED, GONE = Presence.UP, Presence.ASSUMED, Presence.GONE
BOTH = (shard(0), shard(1))


def save(number: int, checkpoint_id: str) -> Manifest:
    made = manifest(number, {shard(0): ("a", "b"), shard(1): ("b", "a")})
    return replace(made, checkpoint_id=checkpoint_id, created_unix_s=float(number))


OLD, NEW = save(10, "step-1"), save(20, "step-2")
SAVES = {one.save_id: one for one in (OLD, NEW)}


def overview(*views: NodeView, going: frozenset[str] = frozenset()) -> Overview:
    return make_overview(Look(SAVES, views, going))


def view(
    node: str, presence: Presence = UP, *, new: tuple[str, ...] = BOTH, report: NodeReport = NOTHING_REPORTED
) -> NodeView:
    return NodeView(node, presence, (holding(node, OLD, *BOTH), holding(node, NEW, *new)), node_report=report)


def test_all_copies_are_there() -> None:
    """With all copies, the newest save has every level but the bucket's."""
    assert overview(view("a"), view("b")) == Overview(0, 0, 20.0, 20.0, 0.0, 0)


def test_a_lost_node_leaves_copies_missing() -> None:
    """After the loss of one of two nodes, saves are complete but lack copies. A silent node counts for a while."""
    assert overview(view("a"), view("b", GONE)) == Overview(4, 0, 20.0, 0.0, 0.0, 0)
    assert overview(view("a"), view("b", ASSUMED)) == Overview(0, 0, 20.0, 20.0, 0.0, 0)
    assert overview(view("a"), NodeView("b", ASSUMED, None)) == Overview(0, 0, 20.0, 20.0, 0.0, 0)


def test_a_lost_shard_leaves_the_older_save() -> None:
    """If the newest save has lost a shard, the older save is the newest complete one, with all its copies."""
    found = overview(view("a", new=BOTH[:1]), view("b", new=BOTH[:1]))
    assert found == Overview(2, 1, 10.0, 10.0, 0.0, 0)


def test_a_node_that_was_never_introduced_may_have_its_shards() -> None:
    """A node without an address may have the shards: none counts as lost, until the node has timed out or is forgotten."""
    own = view("a", new=BOTH[:1])
    assert (overview(own).shards_lost, overview(own, view("b", GONE)).shards_lost) == (0, 1)
    look = Look(SAVES, (own,), forgotten=("b",))
    assert make_overview(look).shards_lost == 1
    assert look.has_unknown_holder(NEW.save_id, METADATA_NAME) is False
    assert replace(look, forgotten=()).has_unknown_holder(NEW.save_id, METADATA_NAME)


def test_damaged_and_torn_files_are_no_copies() -> None:
    """A damaged file and a truncated file count as missing copies."""
    bad = replace(holding("a", NEW, *BOTH), damaged=(shard(0),))
    torn = replace(holding("b", NEW, *BOTH), sizes={shard(0): 99, shard(1): 100})
    assert overview(NodeView("a", UP, (bad,)), NodeView("b", UP, (torn,)), going=frozenset({OLD.save_id})) == Overview(
        2, 1, 0.0, 0.0, 0.0, 0
    )


def test_a_removed_or_replaced_save_has_no_missing_copies() -> None:
    """A save that is being removed or was replaced has no missing copies."""
    a, b = view("a"), NodeView("b", UP, (holding("b", NEW, *BOTH),))
    assert overview(a, b).copies_missing == 2
    assert overview(a, b, going=frozenset({OLD.save_id})).copies_missing == 0
    older = replace(OLD, checkpoint_id="step-2")
    assert make_overview(Look({older.save_id: older, NEW.save_id: NEW}, (a, b))).copies_missing == 0


def test_uploads_are_counted() -> None:
    """One node's report of an upload is enough. A save that was removed from the bucket does not count."""
    one = overview(view("a", report=NodeReport(uploaded=frozenset({OLD.save_id, NEW.save_id}))), view("b"))
    assert (one.uploaded_unix_s, one.uploaded_bytes) == (20.0, 400)
    absent = NodeReport(uploaded=frozenset({NEW.save_id}), absent=frozenset({NEW.save_id}))
    gone = overview(view("a", report=NodeReport(uploaded=frozenset({OLD.save_id}))), view("b", report=absent))
    assert (gone.uploaded_unix_s, gone.uploaded_bytes) == (10.0, 200)
