"""Damaged or truncated objects in the bucket: readers detect them, use peers' copies instead, or report lost shards."""

from collections.abc import Callable
from typing import Any

import pytest

from replicated_ckpt.core.commit_mark import MARK_BYTES
from tests.buckets.faults import Fault
from tests.buckets.servers import Server
from tests.harness.cluster import Call, call
from tests.marks import mark_long
from tests.object_tier.conftest import SiteOf
from tests.object_tier.sites import Site
from tests.steps import objects

pytestmark = [pytest.mark.multiprocess, pytest.mark.fault, pytest.mark.timeout(240)]

COUNT = 3  # MiB of each rank
SHARD, MANIFEST, METADATA = "__1_0.distcp", ".manifest.json", ".metadata"
Damage = Callable[[bytes], bytes]


def flipped(at: int) -> Damage:
    """Flips one bit of byte `at`. A negative `at` counts from the end."""
    return lambda raw: raw[:at] + bytes([raw[at] ^ 4]) + raw[len(raw[:at]) + 1 :]


def halved(raw: bytes) -> bytes:
    return raw[: len(raw) // 2]


DAMAGES: dict[str, tuple[str, Damage]] = {
    "shard-flip": (SHARD, flipped(1_500_000)),
    "shard-cut": (SHARD, halved),
    "manifest-flip": (MANIFEST, flipped(200)),
    "manifest-cut": (MANIFEST, halved),
    "metadata-flip": (METADATA, flipped(100)),
    "metadata-cut": (METADATA, halved),
    "mark-flip": (METADATA, flipped(-20)),
    "mark-cut": (METADATA, lambda raw: raw[:-MARK_BYTES]),
    "mark-cut-short": (METADATA, lambda raw: raw[:-1]),
}


def saved(site: Site, **writer: object) -> None:
    calls = [site.save("step-1", COUNT, seed=7, **writer), site.save("step-2", COUNT, **writer), site.wait(**writer)]
    site.cluster.launch(calls, nodes=[0, 1])


def damage(site: Site, name: str, change: Damage) -> None:
    key = site.key("step-2", name)
    site.change(key, change(site.body(key)))


def failing_load(site: Site, checkpoint_id: str) -> Call[Any]:
    where = {"where": site.where, "rootless": True}
    return call(objects.load_fails, checkpoint_id=checkpoint_id, count=COUNT, ranks=2, **where)


@pytest.mark.parametrize("kind", mark_long(DAMAGES, keep=["shard-flip"]))
def test_a_damaged_object_is_no_source(moto: Server, site_of: SiteOf, kind: str) -> None:
    """With one damaged object, a load from nodes with copies succeeds. With all nodes lost, every rank names the lost
    object, and loads no wrong byte.
    """
    name, change = DAMAGES[kind]
    site = site_of(moto, 2)
    saved(site)
    damage(site, name, change)
    site.cluster.nodes[0].lose()
    found = site.cluster.run(site.load("step-2", COUNT, 2), nodes=[0, 1])
    assert all(value["same"] and value["report"]["checkpoint_id"] == "step-2" for value in found)
    site.lose_all()
    calls = [failing_load(site, "step-2"), site.load("step-1", COUNT, 2, seed=7)]
    results = site.cluster.launch(calls, nodes=[0, 1])
    for failure in results.of(objects.load_fails):
        assert failure["types"] in (["ShardLost"], ["AssertionError"]), failure  # DCP wraps what read_metadata raises
        assert f"no intact copy of 1 shard is left: {name}" in failure["message"]
        assert failure["is_clean"]
        assert site.name in failure["message"]
    assert all(value["same"] for value in results.of(objects.load))


@pytest.mark.long
def test_a_damaged_footer_leaves_the_data(moto: Server, site_of: SiteOf) -> None:
    """The only copy, in the bucket, has a damaged footer: its data matches the manifest's checksum, and loads."""
    site = site_of(moto, 2)
    saved(site)
    damage(site, SHARD, flipped(-30))
    site.lose_all()
    found = site.cluster.run(site.load("step-2", COUNT, 2), nodes=[0, 1])
    assert all(value["same"] and value["report"]["checkpoint_id"] == "step-2" for value in found)


@pytest.mark.long
def test_two_bad_copies_make_a_good_one(moto: Server, site_of: SiteOf) -> None:
    """A peer's copy and the bucket's are damaged in different places: a load combines the intact pieces, and reports
    both copies.
    """
    site = site_of(moto, 2)
    saved(site, copies=1)
    damage(site, SHARD, flipped(2_500_000))
    path = site.cluster.nodes[1].disk / "step-2" / SHARD
    path.write_bytes(flipped(500_000)(path.read_bytes()))
    site.cluster.nodes[0].lose()
    blank, survivor = site.cluster.run(site.load("step-2", COUNT, 2), nodes=[0, 1])
    for value, first, *others in ((value, *value["report"]["bad_copies"]) for value in (blank, survivor)):
        assert value["same"]
        assert SHARD in first
        assert "expected CRC32C" in first
        for other in others:
            assert f"{SHARD} on node object" in other or site.name in other
    assert (
        len(blank["report"]["bad_copies"]) == 2
    )  # the blank node reads larger pieces than the survivor, and meets both bad copies


@pytest.mark.long
def test_a_peer_that_comes_back_replaces_a_bad_copy_in_the_bucket(moto: Server, site_of: SiteOf) -> None:
    """The bucket's copy is damaged and the peer is away: the load raises ShardLost. Once the peer is back, the same
    load succeeds.
    """
    site = site_of(moto, 2)
    saved(site, copies=1)
    damage(site, SHARD, flipped(1_500_000))
    node = site.cluster.nodes[1]
    node.kill_agent()
    aside = node.disk.rename(node.disk.with_suffix(".aside"))
    fails = call(objects.load_fails, checkpoint_id="step-2", count=COUNT, ranks=2, where=site.where)
    (failure,) = site.cluster.run(fails, nodes=[0])
    assert failure["types"] == ["ShardLost"]
    assert failure["shards"] == [SHARD]
    aside.rename(node.disk)
    found = site.cluster.run(site.load("step-2", COUNT, 2), nodes=[0, 1])
    assert all(value["same"] for value in found)


@pytest.mark.long
@pytest.mark.parametrize("name", [SHARD, MANIFEST, METADATA])
def test_a_bit_that_flips_on_the_way_is_read_again(moto: Server, site_of: SiteOf, name: str) -> None:
    """A reader whose first answer has a flipped bit reads the object again before reporting damage."""
    site = site_of(moto, 2)
    saved(site)
    site.lose_all()
    fault = site.faulty.add(Fault("flip_answer", method="GET", key=f"step-2/{name}", times=1))
    (found,) = site.cluster.run(site.load("step-2", COUNT, 2), nodes=[0])
    assert fault.fired == 1
    assert found["same"]


@pytest.mark.long
def test_a_missing_object_is_found_missing(moto: Server, site_of: SiteOf) -> None:
    """After a shard was deleted from the bucket, `latest` is the checkpoint before, and a load by name reports the
    shard.
    """
    site = site_of(moto, 2)
    saved(site)
    site.server.client().delete_object(Bucket=site.name, Key=site.key("step-2", SHARD))
    site.lose_all()
    calls = [failing_load(site, "step-2"), site.load("latest", COUNT, 2, seed=7)]
    results = site.cluster.launch(calls, nodes=[0, 1])
    assert all(failure["shards"] == [SHARD] for failure in results.of(objects.load_fails))
    assert all(value["same"] and value["report"]["checkpoint_id"] == "step-1" for value in results.of(objects.load))
