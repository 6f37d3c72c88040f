"""The bucket's keys are in the memory of ranks and agents and in one file of each agent, and nowhere else."""

import os
import stat
import threading
from pathlib import Path

import pytest

from tests.agent.agents import wait_for
from tests.buckets.faults import Fault
from tests.buckets.servers import Server
from tests.harness.cluster import call
from tests.marks import mark_long
from tests.object_tier.conftest import SiteOf
from tests.steps import objects

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(240)]

COUNT = 3  # MiB of each rank
SECRET = b"testsecret"
KEEPER = "uploads.json"


def processes_that_show(secret: bytes) -> list[str]:
    """The command lines on this machine that contain the secret. Every user can read command lines."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes()
        except OSError:
            continue
        is_server = b"radosgw" in line  # a concurrent test's server, with the same secret
        if secret in line and not is_server and path.parent.name != str(os.getpid()):
            found.append(line.decode(errors="replace"))
    return found


def files_that_show(base: Path, secret: bytes) -> set[str]:
    return {path.name for path in base.rglob("*") if path.is_file() and secret in path.read_bytes()}


@pytest.mark.parametrize("trouble", mark_long(["none", "denied", "away"], keep=["denied"]))
def test_the_secret_key_stays_where_it_is_needed(moto: Server, site_of: SiteOf, trouble: str) -> None:
    """No log, command line, manifest, error, warning, status or object contains the key. Only its owner can read the
    agent's file.
    """
    site = site_of(moto, 2)
    calls = [site.save("step-1", COUNT), site.wait()]
    if trouble == "denied":
        site.faulty.add(Fault("status", status=403, code="SignatureDoesNotMatch"))
    if trouble == "away":
        site.faulty.away()
    if trouble != "none":
        fails = call(objects.load_fails, checkpoint_id="step-9", count=COUNT, ranks=2, where=site.where)
        calls = [site.save("step-1", COUNT), site.failing_wait(timeout_s=3), fails]
    results = site.cluster.launch(calls, nodes=[0, 1])
    shown = str(results.reports).encode()
    assert processes_that_show(SECRET) == []
    for node in (0, 1):
        shown += site.asked(node, "/v1/status") + site.asked(node, "/metrics")
        shown += site.asked(node, "/v1/holdings")
        keeper = site.cluster.nodes[node].disk / ".agent" / KEEPER
        assert stat.S_IMODE(keeper.stat().st_mode) == 0o600
        assert SECRET in keeper.read_bytes()
    assert SECRET not in shown
    for name in site.bucket.client.list_keys("step-1/").sizes:
        assert SECRET not in site.body(site.key("step-1", name))
    site.cluster.stop_agents()
    for spec in site.cluster.base.glob("launch*/spec.json"):
        spec.unlink()  # the test's own file, which passes the bucket to its ranks
    assert files_that_show(site.cluster.base, SECRET) == {KEEPER}
    if trouble == "none":
        site.lose_all()
        assert files_that_show(site.cluster.base, SECRET) == set()
        loaded = site.cluster.run(site.load("latest", COUNT, 2), nodes=[0, 1])
        assert all(value["same"] for value in loaded)


@pytest.mark.long
def test_a_bucket_that_is_opened_again_is_found_by_the_next_wait(moto: Server, site_of: SiteOf, tmp_path: Path) -> None:
    """After a `wait` failed because the bucket denied access, the next `wait` tries again, and succeeds once access is
    granted.
    """
    site = site_of(moto, 1)
    site.faulty.add(Fault("status", status=403, code="AccessDenied", method="PUT", key="__0_0"))

    def open_again() -> None:
        wait_for((tmp_path / "reached").exists, 90, "the wait that fails")
        site.faulty.clear()
        (tmp_path / "go").touch()

    opening = threading.Thread(target=open_again)
    opening.start()
    pause = call(objects.pause, folder=str(tmp_path))
    calls = [site.save("step-1", COUNT), site.failing_wait(timeout_s=60), pause, site.wait(timeout_s=60)]
    results = site.cluster.launch(calls, nodes=[0], timeout_s=200)
    opening.join()
    assert "AccessDenied" in results.of(objects.wait_fails)[0]["message"]
    assert results.of(objects.wait) == [["step-1"]]
    site.lose_all()
    assert site.cluster.run(site.load("step-1", COUNT, 1), nodes=[0])[0]["same"]


def test_a_wrong_key_is_denied_at_once_and_a_right_one_goes_on(moto: Server, site_of: SiteOf) -> None:
    """With a wrong key, `wait` fails at once. As soon as a later rank passes a right key, the agent uploads both saves."""
    site = site_of(moto, 1)
    site.faulty.add(Fault("status", status=403, code="InvalidAccessKeyId"))
    results = site.cluster.launch([site.save("step-1", COUNT), site.failing_wait(timeout_s=60)], nodes=[0])
    (failure,) = results.of(objects.wait_fails)
    assert failure["seconds"] < 20
    assert "InvalidAccessKeyId" in failure["message"]
    site.faulty.clear()
    options = {**site.where["storage_options"], "key": "another"}
    where = {**site.where, "storage_options": options}
    site.cluster.launch([call(objects.save, checkpoint_id="step-2", count=COUNT, where=where)], nodes=[0])
    for checkpoint_id in ("step-1", "step-2"):
        site.wait_until_committed(checkpoint_id, 20)
    site.lose_all()
    assert site.cluster.run(site.load("step-1", COUNT, 1), nodes=[0])[0]["same"]
