"""A save receives no more bytes than its opening announced, whatever its peers send."""

import http.client
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan

from replicated_ckpt import ReplicatedWriter
from replicated_ckpt.dcp.agreement.decision import OBJECTS_BYTES_MAX, announce
from replicated_ckpt.errors import PeerProtocolError
from replicated_ckpt.stores.local.directories.intent import NOTHING_ANNOUNCED, Announced, Intent
from replicated_ckpt.testing.shards import table_of
from tests.agent.agents import RunningAgent, running_agent, wait_for
from tests.agent.checkpoints import shard
from tests.fault.hostile.test_peers_token import OPENING, SAVE, logged_refusals

pytestmark = [pytest.mark.fault, pytest.mark.timeout(120)]


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[RunningAgent]:
    with running_agent(tmp_path / "a") as running:
        yield running


SHARD_MAX, SAVE_MAX = 3000, 5000


def file_of(size_bytes: int) -> bytes:
    data = b"d" * size_bytes
    return data + table_of([data]).encode()


@pytest.fixture
def opened(agent: RunningAgent) -> RunningAgent:
    """An agent with an open save that announced few bytes."""
    announced = {"shard_bytes_max": SHARD_MAX, "save_bytes_max": SAVE_MAX}
    with agent.client() as client:
        client.call("POST", f"/v1/saves/{SAVE}", {**OPENING, "announced": announced})
    return agent


def upload_shard(agent: RunningAgent, rank: int, raw: bytes, *, is_sized: bool) -> None:
    """Uploads a shard in chunks, as a peer does, or with a Content-Length if `is_sized`."""
    path = f"/v1/saves/{SAVE}/{shard(rank)}"
    with agent.peer() as client:
        if is_sized:
            client.put("PUT", path, raw)
        else:
            upload = client.start_upload(path, {})
            upload.send(memoryview(raw))
            upload.finish_upload()


def staged(agent: RunningAgent) -> list[str]:
    return sorted(path.name for path in (agent.root / ".staging" / SAVE).iterdir())


@pytest.mark.parametrize("is_sized", [True, False], ids=["sized", "chunked"])
def test_a_shard_has_no_more_bytes_than_were_announced(opened: RunningAgent, *, is_sized: bool) -> None:
    """The upload fails with an error, one line is logged, and no file is left. Shards within the limit are still
    accepted.
    """
    with pytest.raises(PeerProtocolError, match=f"more than {SHARD_MAX} bytes") as raised:
        upload_shard(opened, 0, file_of(SHARD_MAX), is_sized=is_sized)
    assert "tensors" in raised.value.hint
    assert staged(opened) == []
    assert len(logged_refusals(opened, f"saves/{SAVE}/{shard(0)}")) == 1
    upload_shard(opened, 0, file_of(1000), is_sized=is_sized)
    assert staged(opened) == [shard(0)]


@pytest.mark.parametrize("is_sized", [True, False], ids=["sized", "chunked"])
def test_a_save_has_no_more_bytes_than_were_announced(opened: RunningAgent, *, is_sized: bool) -> None:
    """The limit is for all shards together. A shard that is sent again counts once, and a refused shard does not count."""
    for _ in range(3):
        upload_shard(opened, 0, file_of(2000), is_sized=is_sized)
        upload_shard(opened, 1, file_of(2000), is_sized=is_sized)
        with pytest.raises(PeerProtocolError, match=f"more than {SAVE_MAX} bytes"):
            upload_shard(opened, 2, file_of(2000), is_sized=is_sized)
    assert staged(opened) == [shard(0), shard(1)]
    upload_shard(opened, 2, file_of(500), is_sized=is_sized)
    assert staged(opened) == [shard(0), shard(1), shard(2)]


def test_uploads_at_once_are_counted_together(agent: RunningAgent) -> None:
    """Bytes of uploads in flight count, whatever their names. A broken upload frees its bytes."""
    announced = {"shard_bytes_max": 6 << 20, "save_bytes_max": 8 << 20}
    piece = memoryview(bytes(5 << 20))
    with agent.client() as client:
        client.call("POST", f"/v1/saves/{SAVE}", {**OPENING, "announced": announced})
    part = agent.root / ".staging" / SAVE / f"{shard(3)}.part"
    with agent.peer() as first, agent.peer() as second:
        uploads = [
            client.start_upload(f"/v1/saves/{SAVE}/{shard(rank)}", {}) for rank, client in ((3, first), (4, second))
        ]
        uploads[0].send(piece)
        wait_for(lambda: part.exists() and part.stat().st_size >= 4 << 20, 40, "the first bytes")
        uploads[1].send(piece)
        with pytest.raises(PeerProtocolError, match=f"more than {8 << 20} bytes"):
            uploads[1].finish_upload()
    wait_for(lambda: staged(agent) == [], 10, "the removal of the broken upload")
    upload_shard(agent, 0, file_of(5 << 20), is_sized=False)


@pytest.mark.parametrize("size", [(8 << 30) + 1, 10**17])
def test_metadata_beyond_the_limit_is_refused(opened: RunningAgent, size: int) -> None:
    """An upload that is too large is refused by its Content-Length, before its body is read."""
    connection = http.client.HTTPConnection("127.0.0.1", opened.endpoint.port, timeout=10)
    connection.putrequest("PUT", f"/v1/saves/{SAVE}/.metadata")
    connection.putheader("Authorization", f"Bearer {opened.endpoint.owner_token}")
    connection.putheader("Content-Length", str(size))
    connection.endheaders()
    response = connection.getresponse()
    assert response.status == 400
    assert b"bytes, the limit" in response.read()
    connection.close()
    assert staged(opened) == []


# Announcements -----------------------------------------------------------------------------------------------------


DTYPES = (torch.int8, torch.bfloat16, torch.complex128)
STATES: dict[str, dict[str, Any]] = {
    "tensors": {f"t{n}": torch.zeros(n, 3) for n in range(50)},
    "many small ones": {f"t{n}": torch.tensor(n) for n in range(3000)},
    "one large": {"t": torch.zeros(3 << 20)},
    "objects": {"a": os.urandom(5 << 20), "b": {"c": [1, 2]}, "t": torch.zeros(3)},
    "of other dtypes": {str(dtype): torch.zeros(999, dtype=dtype) for dtype in DTYPES},
}


@pytest.mark.filterwarnings("ignore::replicated_ckpt.errors.ReplicatedCkptWarning")
@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_a_save_is_smaller_than_its_announcement(tmp_path: Path, state: dict[str, Any]) -> None:
    """A limit that is too low would cost the save its copies."""
    writer = ReplicatedWriter(tmp_path, copies=1)
    dcp.save(state, checkpoint_id="step-1", storage_writer=writer, no_dist=True)
    sizes = [path.stat().st_size for path in (tmp_path / "step-1").glob("*.distcp")]
    found = announce([create_default_local_save_plan(state, is_coordinator=True)])
    assert 0 < sum(sizes) < found.save_bytes_max == found.shard_bytes_max
    tensors = sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor))
    objects = 0 if len(state) > 3 or "a" not in state else OBJECTS_BYTES_MAX
    assert found.save_bytes_max <= 2 * tensors + 4096 * (len(state) + 1) + objects + (1 << 20)


def test_all_shards_and_the_largest_are_announced() -> None:
    """Several ranks announce the sum and the maximum of their shards. They announce nothing if DCP's plan cache
    withheld a plan.
    """
    plans = [create_default_local_save_plan({"t": torch.zeros(n << 20)}, is_coordinator=True) for n in (1, 3)]
    single = [announce([plan]).shard_bytes_max for plan in plans]
    assert announce(plans) == Announced(max(single), sum(single))
    planner = DefaultSavePlanner(enable_plan_caching=True)
    planner._cached_plans_key = "of this test"
    for usable in (True, False):
        planner.set_up_planner({"t": torch.zeros(3)}, None, True)
        delta, _ = planner.create_global_plan([planner.create_local_plan()])
        planner.finish_plan(delta[0])
        assert (announce(delta) != NOTHING_ANNOUNCED) == usable
    assert announce([]) == NOTHING_ANNOUNCED


def test_a_restart_does_not_lift_the_bound(opened: RunningAgent) -> None:
    """The limit is stored with the save: the node's next agent applies it, too."""
    path = opened.root / ".staging" / f"{SAVE}.json"
    assert Intent.read_intent(SAVE, path).announced == Announced(SHARD_MAX, SAVE_MAX)
    opened.process.kill()
    opened.process.wait()
    with running_agent(opened.root) as again, pytest.raises(PeerProtocolError, match=f"more than {SHARD_MAX} bytes"):
        upload_shard(again, 0, file_of(SHARD_MAX), is_sized=False)


@pytest.mark.parametrize("wrong", [-1, "x", None, [], 1.5])
def test_an_invalid_announcement_opens_no_save(agent: RunningAgent, wrong: object) -> None:
    """The opening is refused, and no staging directory is created."""
    for document in ({"shard_bytes_max": wrong}, {"save_bytes_max": wrong}, [wrong]):
        with agent.client() as client, pytest.raises(PeerProtocolError):
            client.call("POST", f"/v1/saves/{SAVE}", {**OPENING, "announced": document})
    assert not (agent.root / ".staging" / SAVE).exists()
