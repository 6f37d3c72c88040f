"""A bucket refuses, resets, throttles or hangs: saves stay quick, uploads finish afterwards, and errors name the cause."""

import json
import re
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from replicated_ckpt.agent.http.object_routes import FIRST_WAIT_S
from tests.agent.agents import wait_for
from tests.buckets.faults import Fault
from tests.buckets.servers import Server
from tests.marks import mark_long
from tests.object_tier.conftest import SiteOf
from tests.object_tier.sites import Site
from tests.steps import objects

pytestmark = [pytest.mark.multiprocess, pytest.mark.fault, pytest.mark.timeout(240)]

COUNT = 4  # MiB of each rank
SAVE_WITHIN_S = 12.0
AFTER_WITHIN_S = 45.0
SECRET = "testsecret"

Breaker = Callable[[Site], Any]
BUCKET_FAULTS: dict[str, tuple[Breaker, str]] = {
    "slow-down": (lambda site: site.faulty.add(Fault("status")), "SlowDown"),
    "reset": (lambda site: site.faulty.add(Fault("reset")), "ConnectionClosedError|EndpointConnectionError"),
    "refused": (lambda site: site.faulty.away(), "EndpointConnectionError|ConnectionClosedError"),
    "hang": (lambda site: site.faulty.away("hang"), "ReadTimeoutError|no answer|not answered"),
}


def metric(site: Site, node: int, name: str) -> float:
    found = re.search(rf"^replicated_ckpt_{name} (\S+)$", site.asked(node, "/metrics").decode(), re.MULTILINE)
    assert found is not None, name
    return float(found[1])


def assert_loads_from_the_bucket(site: Site) -> None:
    site.lose_all()
    for checkpoint_id in ("latest", "step-2"):
        (found,) = site.cluster.run(site.load(checkpoint_id, COUNT, 2), nodes=[0])
        assert found["same"]


@pytest.mark.parametrize("kind", mark_long(BUCKET_FAULTS, keep=["refused"]))
def test_a_save_does_not_wait_for_the_bucket(moto: Server, site_of: SiteOf, kind: str) -> None:
    """During a fault of the bucket, saves take no longer, and `wait` and the agents report the cause. All is uploaded
    afterwards.
    """
    break_bucket, reason = BUCKET_FAULTS[kind]
    site = site_of(moto, 2)
    site.cluster.launch([site.save("step-1", COUNT), site.wait()], nodes=[0, 1])
    break_bucket(site)
    saves, fails = [site.save(f"step-{number}", COUNT) for number in (2, 3)], site.failing_wait(timeout_s=4)
    results = site.cluster.launch([*saves, fails], nodes=[0, 1])
    for save in saves:
        assert max(results.of(save)) < SAVE_WITHIN_S
    for failure in results.of(fails):
        assert failure["seconds"] < 20
        assert failure["types"] == ["UploadFailed"]
    assert any("step-2: object store s3://" in text for text in results.all_warnings)
    for node in (0, 1):
        pending = wait_for(partial(failing, site, node), 60, "a failing upload")
        assert all(re.search(reason, upload["error"]) for upload in pending), pending
        wait_for(partial(counts_two_of_which_some_fail, site, node), 60, "an agent that counts its failing uploads")
    site.faulty.clear()
    site.faulty.back()
    for checkpoint_id in ("step-2", "step-3"):
        site.wait_until_committed(checkpoint_id, AFTER_WITHIN_S)
    wait_for(
        lambda: metric(site, 0, "uploads_pending") == metric(site, 1, "uploads_pending") == 0, 20, "no upload left"
    )
    assert site.uploads(0)["done"] == 3
    assert metric(site, 0, "uploads_failing") == 0
    assert_loads_from_the_bucket(site)


def counts_two_of_which_some_fail(site: Site, node: int) -> bool:
    return metric(site, node, "uploads_pending") == 2 and metric(site, node, "uploads_failing") >= 1


def failing(site: Site, node: int) -> list[dict[str, Any]]:
    return [upload for upload in site.uploads(node)["pending"].values() if upload["error"]]


@pytest.mark.long
def test_a_server_that_goes_away_in_the_middle_and_comes_back(moto: Server, site_of: SiteOf) -> None:
    """After an outage in the middle of uploads, agents do not send finished parts and shards again."""
    site = site_of(moto, 2, REPLICATED_CKPT_AGENT_UPLOAD_MIB_PER_S=16)
    count = 88
    site.cluster.launch([site.save("step-2", count)], nodes=[0, 1])
    wait_for(lambda: len(site.faulty.requests("PUT", query="partNumber")) > 4, 60, "some parts")
    site.faulty.away()
    wait_for(lambda: failing(site, 0) and failing(site, 1), 30, "failures")
    time.sleep(3)
    site.faulty.back()
    site.wait_until_committed("step-2", 90)
    assert site.faulty.uploaded_bytes() < (2 * count + 6 * 16) << 20
    site.lose_all()
    (found,) = site.cluster.run(site.load("step-2", count, 2), nodes=[0])
    assert found["same"]


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2])
def test_everything_at_once(moto: Server, site_of: SiteOf, seed: int) -> None:
    """About one request in five fails throughout, in four ways: all is uploaded, and loads bit for bit."""
    site = site_of(moto, 2)
    for offset, kind in enumerate(("reset", "status", "lost_answer", "cut_answer")):
        site.faulty.add(Fault(kind, probability=0.06, seed=10 * seed + offset))  # type: ignore[arg-type]
    calls = [site.save(f"step-{number}", COUNT) for number in (1, 2)]
    site.cluster.launch(calls, nodes=[0, 1])
    for checkpoint_id in ("step-1", "step-2"):
        site.wait_until_committed(checkpoint_id, 90)
    site.faulty.clear()
    assert_loads_from_the_bucket(site)


@pytest.mark.long
def test_a_hang_of_one_request_costs_its_time_out(moto: Server, site_of: SiteOf) -> None:
    """The client aborts an unanswered upload after its time-out, and the agent uploads again."""
    site = site_of(moto, 1)
    site.faulty.add(Fault("hang", method="PUT", key="__0_0", at=1 << 20, times=1))
    found = site.cluster.launch([site.save("step-2", COUNT), site.wait()], nodes=[0], timeout_s=120)
    assert found.of(objects.wait).agreed() == ["step-2"]
    site.lose_all()
    (value,) = site.cluster.run(site.load("step-2", COUNT, 1), nodes=[0])
    assert value["same"]


@pytest.mark.long
def test_an_agent_ends_while_the_bucket_hangs(moto: Server, site_of: SiteOf) -> None:
    """On SIGTERM an agent ends although the bucket hangs, and the next agent uploads the save. The hang delays a first
    save by at most `FIRST_WAIT_S`.
    """
    site = site_of(moto, 1)
    site.faulty.away("hang")
    results = site.cluster.run(site.save("step-2", COUNT), nodes=[0])
    assert results[0] < SAVE_WITHIN_S + FIRST_WAIT_S
    site.cluster.stop_agents()
    site.faulty.back()
    site.cluster.start_agents({0: {}})
    site.wait_until_committed("step-2", AFTER_WITHIN_S)
    site.lose_all()
    assert site.cluster.run(site.load("latest", COUNT, 1), nodes=[0])[0]["same"]


def test_status_and_metrics_contain_no_secret(moto: Server, site_of: SiteOf) -> None:
    """While uploads fail, neither status nor metrics contain the secret key."""
    site = site_of(moto, 1)
    site.faulty.away()
    site.cluster.launch([site.save("step-1", COUNT)], nodes=[0])
    wait_for(lambda: failing(site, 0), 30, "a failure")
    assert SECRET not in json.dumps(site.uploads(0))
    assert SECRET.encode() not in site.asked(0, "/metrics")
