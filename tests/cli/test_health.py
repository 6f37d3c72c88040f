"""What `status` concludes from the holdings of the nodes, without processes."""

from pathlib import Path

import pytest

from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.cli.look.nodes import NodesSeen
from replicated_ckpt.cli.nodes.health import describe_work, judge_health
from replicated_ckpt.core.inventory import Holding
from replicated_ckpt.errors import StoreUnavailable
from replicated_ckpt.node.peers.watch import NodeHoldings
from replicated_ckpt.stores.files.room import Room

GB = 10**9


@pytest.mark.parametrize(
    ("free_bytes", "size_bytes", "code"),
    [
        (4 * GB, 1000 * GB, ExitCode.OK),  # a small share of the disk, but room for many saves
        (30 * GB, 100 * GB, ExitCode.OK),
        (2 * GB, 5 * GB, ExitCode.FAILED),  # a large share of the disk, but no room for one save
        (0, 0, ExitCode.OK),  # a tmpfs without a limit
    ],
)
def test_a_disk_is_full_when_the_next_save_may_not_fit(free_bytes: int, size_bytes: int, code: ExitCode) -> None:
    """The limit is the node's largest save, not a share of its disk."""
    held = Holding("n", "step-1", "1" * 32, 1, has_metadata=True, sizes={"__0_0.distcp": 2 * GB})
    seen = NodesSeen("n", {"n": NodeHoldings((held,), room=Room(free_bytes, size_bytes))}, {}, {}, {})
    health = judge_health(seen, [], None, "", [], Path("/r"))
    assert health.code == code
    if code != ExitCode.OK:
        (why,) = health.reasons
        assert (
            "2 GB of 5 GB free, and its largest save takes 2 GB: the next one may not fit, as 67.1 MB should stay free"
            in why
        )
        assert "`replicated-ckpt prune --root /r --keep-last N --keep-in-bucket` there makes room" in why


@pytest.mark.parametrize("is_silent", [True, False])
def test_re_protection_waits_only_for_silent_nodes(*, is_silent: bool) -> None:
    """If all nodes answer, lost files are not a reason to wait for a node."""
    error = StoreUnavailable("b", "connect", "/", "refused")
    seen = NodesSeen("a", {"a": NodeHoldings(())}, {}, {"b": error} if is_silent else {}, {})
    protection = {"rounds": 1, "is_complete": True, "in_doubt": [], "over_bound": []}
    agent = {"protection": protection, "object_store": {"pending": {}, "done": 0}}
    waits = [line for line in describe_work(agent, seen, is_good=False) if "waits for the nodes" in line]
    assert bool(waits) == is_silent


def test_refused_uploads_are_one_reason_with_ways_out() -> None:
    """Eight checkpoints whose bucket has a mistyped name are one line of trouble. A note has commands for both ways out."""
    uploads = {
        str(number): {
            "checkpoint_id": f"step-{number}",
            "url": "s3://typo/x",
            "error": "no such bucket",
            "failing_s": 60.0 + number,
            "is_denied": True,
        }
        for number in range(2)
    }
    agent = {"protection": {"failed": []}, "object_store": {"pending": uploads, "done": 0}}
    health = judge_health(NodesSeen("a", {"a": NodeHoldings(())}, {}, {}, {}), [], agent, "", [], Path("/r"))
    assert list(health.reasons) == ["upload of step-0, step-1 to s3://typo/x has failed for 1 min 1 s: no such bucket"]
    (note,) = health.notes
    assert "`replicated-ckpt upload step-1 --root /r --to URL`" in note
    assert "`replicated-ckpt rm step-1 --root /r --keep-in-bucket --force`" in note
