"""Loads from a bucket that refuses, resets, corrupts or hangs: they return the saved bytes, or an error that names the
cause.
"""

import threading
from pathlib import Path
from typing import Any

import pytest

from tests.agent.agents import wait_for
from tests.buckets.faults import Fault, Kind
from tests.buckets.servers import Server
from tests.harness.cluster import call
from tests.marks import mark_long
from tests.object_tier.conftest import SiteOf
from tests.object_tier.sites import Site
from tests.steps import lookup, objects
from tests.stopwatch import Stopwatch

pytestmark = [pytest.mark.multiprocess, pytest.mark.fault, pytest.mark.timeout(240)]

COUNT = 3  # MiB of each rank


def saved(site: Site, **writer: Any) -> None:
    calls = [site.save("step-1", COUNT, seed=7, **writer), site.save("step-2", COUNT, **writer), site.wait(**writer)]
    site.cluster.launch(calls, nodes=[0, 1])


@pytest.mark.parametrize("kind", mark_long(["status", "reset", "lost_answer", "cut_answer"], keep=["reset"]))
def test_the_bucket_alone_with_bucket_faults(moto: Server, site_of: SiteOf, kind: Kind) -> None:
    """One GET in four fails: two blank nodes load every bit."""
    site = site_of(moto, 2)
    saved(site)
    site.lose_all()
    fault = site.faulty.add(Fault(kind, method="GET", probability=0.25, seed=4))
    by_name, latest = site.load("step-2", COUNT, 2), site.load("latest", COUNT, 2)
    results = site.cluster.launch([by_name, latest], nodes=[0, 1])
    assert all(value["same"] for value in (*results.of(by_name), *results.of(latest)))
    assert fault.fired > 1


@pytest.mark.long
@pytest.mark.parametrize("kind", ["short_answer", "flip_answer"])
def test_the_bucket_alone_answers_wrongly(moto: Server, site_of: SiteOf, kind: Kind) -> None:
    """Some successful GETs of shards return short or corrupted bodies: the reader requests those again."""
    site = site_of(moto, 2)
    saved(site)
    site.lose_all()
    faults = [site.faulty.add(Fault(kind, method="GET", key="__", skip=2 * count, times=1)) for count in range(3)]
    (found,) = site.cluster.run(site.load("step-2", COUNT, 2), nodes=[0])
    assert found["same"]
    assert sum(fault.fired for fault in faults) >= 2


@pytest.mark.long
def test_throttled_for_seconds(moto: Server, site_of: SiteOf) -> None:
    """After eight `SlowDown` answers, the load succeeds."""
    site = site_of(moto, 2)
    saved(site)
    site.lose_all()
    site.faulty.add(Fault("status", method="GET", key="__", times=8))
    assert site.cluster.run(site.load("step-2", COUNT, 2), nodes=[0, 1])[0]["same"]


@pytest.mark.long
def test_a_bucket_that_is_away_is_not_needed(moto: Server, site_of: SiteOf, stopwatch: Stopwatch) -> None:
    """The nodes have all shards: with a bucket that refuses or hangs, the load takes seconds longer and succeeds."""
    site = site_of(moto, 2)
    saved(site)
    for how, within_s in (("refuse", 10), ("hang", 18)):
        site.faulty.away(how)  # type: ignore[arg-type]
        started = stopwatch.now()
        found = site.cluster.run(site.load("latest", COUNT, 2), nodes=[0, 1])
        assert all(value["same"] and value["report"]["checkpoint_id"] == "step-2" for value in found)
        assert stopwatch.now() - started < within_s
        site.faulty.back()


def test_a_bucket_that_is_away_and_needed_is_named(moto: Server, site_of: SiteOf) -> None:
    """Without nodes or bucket, every rank raises within seconds and names the bucket. The lookup of `latest` raises,
    too. Once the bucket is back, the load succeeds.
    """
    site = site_of(moto, 2)
    saved(site)
    site.lose_all()
    site.faulty.away()
    fails = call(objects.load_fails, checkpoint_id="latest", count=COUNT, ranks=2, where=site.where)
    ask = call(lookup.ask_in_vain, **site.where)
    results = site.cluster.launch([fails, ask], nodes=[0, 1], timeout_s=30)
    for failure in results.of(fails):
        assert failure["types"] == ["CheckpointNotFound"]
        assert f"{site.url}: not reached" in failure["message"]
        assert "testsecret" not in failure["message"]
    assert [asked["type"] for asked in results.of(ask)] == ["StoreUnavailable"] * 2
    site.faulty.back()
    assert all(value["same"] for value in site.cluster.run(site.load("latest", COUNT, 2), nodes=[0, 1]))


@pytest.mark.long
def test_a_bucket_that_goes_away_in_the_middle_is_waited_for_once(
    moto: Server, site_of: SiteOf, tmp_path: Path
) -> None:
    """A rank does not wait for the bucket again after another rank of its node has waited in vain."""
    site, wait_s, large = site_of(moto, 2), 8.0, 16
    site.cluster.launch([site.save("step-1", large), site.wait()], nodes=[0, 1], ranks=2)
    site.lose_all()
    site.faulty.add(Fault("throttle", method="GET", key="distcp", bytes_per_s=8e6))

    def leave() -> None:
        wait_for((tmp_path / "reached").exists, 60, "the first item")
        site.faulty.away()
        (tmp_path / "go").touch()

    threading.Thread(target=leave, daemon=True).start()
    shape: dict[str, Any] = {"checkpoint_id": "step-1", "count": large, "ranks": 4, "where": site.where}
    load = call(objects.load_fails_midway, **shape, folder=str(tmp_path), wait_s=wait_s)
    for failure in site.cluster.run(load, nodes=[0, 1], ranks=2):
        assert failure["types"] == ["ShardLost"]
        assert failure["hint"].startswith("Check that the object store answers")
        assert wait_s / 2 < failure["seconds"] < 2 * wait_s
