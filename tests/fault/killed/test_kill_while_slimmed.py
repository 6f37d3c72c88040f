"""SIGKILL while checkpoints lose their optimizer, at each failpoint and at random moments: each checkpoint stays full
or becomes slim, and is intact.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from replicated_ckpt import Retention, failpoints
from replicated_ckpt.stores.local.directories.committed import open_committed_save
from replicated_ckpt.stores.local.store import LocalStore
from tests.agent.agents import HOME
from tests.agent.checkpoints import METADATA, WEIGHTS, checkpointed, findings, held, shard, with_optimizer
from tests.agent.repair.test_retention import PAIR, agents, set_policy
from tests.marks import mark_long

pytestmark = [pytest.mark.fault, pytest.mark.timeout(120)]
POINTS = [name for name in failpoints.POINTS if name.startswith("slim.")]
RANKS, STEPS, KILLS = 12, range(1, 9), 12
MANY = range(1, 41)
SLIM = """
import sys
from pathlib import Path
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.local.versions.remove import slim
root = Path(sys.argv[1])
LocalStore(root).tidy(is_alone=True)
print("begun", flush=True)
for name, manifest in list(LocalStore(root).catalog.committed()):
    slim(root, name, manifest.save_id, recycles=manifest.sequence % 2 == 0)
"""


def slimming(store: LocalStore, **environment: str) -> "subprocess.Popen[str]":
    """Starts a process that slims every checkpoint. Returns once the process has begun."""
    words = [sys.executable, "-c", SLIM, str(store.root)]
    process = subprocess.Popen(
        words, env={**os.environ, "PYTHONPATH": str(HOME), **environment}, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    return process


def stored(folder: Path) -> LocalStore:
    store = LocalStore(folder)
    whole = with_optimizer({shard(rank): (0,) for rank in range(RANKS)})
    for number in STEPS:
        checkpointed([store], number, whole, checkpoint_id=f"step-{number}", size_bytes=3000)
    return store


def count_slim(store: LocalStore) -> int:
    """Returns the number of slim checkpoints. Checks that all files are intact, and that readers get the metadata that
    belongs to the manifest.
    """
    assert findings(store) == []
    for number in STEPS:
        manifest = store.catalog.manifest(f"step-{number}")
        assert held(store, f"step-{number}") == set(manifest.shards)
        assert len(manifest.shards) == RANKS if manifest.is_slim else 2 * RANKS
        with open_committed_save(store.root, f"step-{number}", manifest.save_id) as (version, _):
            assert version.raw_metadata(manifest) == (WEIGHTS if manifest.is_slim else METADATA + WEIGHTS)
    return sum(manifest.is_slim for _, manifest in store.catalog.committed())


def check_end(store: LocalStore) -> None:
    """Lets the slimming finish, and checks that only the weights are left."""
    with slimming(store) as process:
        assert process.wait(60) == 0
    assert count_slim(store) == len(STEPS)
    weights = {".metadata", ".manifest.json", *(shard(rank) for rank in range(RANKS))}
    assert all({path.name for path in (store.root / f"step-{number}").iterdir()} == weights for number in STEPS)
    assert all((store.root / f"step-{number}" / ".metadata").read_bytes() == WEIGHTS for number in STEPS)


@pytest.mark.parametrize("point", POINTS)
def test_a_kill_at_each_step(tmp_path: Path, point: str) -> None:
    """The third checkpoint is full if the kill is before the rename, and slim if it is after."""
    store = stored(tmp_path / "store")
    with slimming(store, **{failpoints.ENV: f"{point}=kill@3"}) as process:
        assert process.wait(60) == -signal.SIGKILL
    assert count_slim(store) == (2 if point == "slim.described" else 3)
    check_end(store)


def test_kills_at_random_moments(tmp_path: Path) -> None:
    """Repeated kills on one store, until all checkpoints are slim."""
    store, drawn = stored(tmp_path / "store"), random.Random(0)
    before = 0
    for _ in range(KILLS):
        with slimming(store) as process:
            time.sleep(drawn.uniform(0.0, 0.03))
            process.kill()
        after = count_slim(store)
        assert after >= before
        before = after
    check_end(store)


def count_slim_of_many(store: LocalStore) -> int:
    """Returns the number of slim checkpoints. Checks that all files are intact."""
    assert findings(store) == []
    slimmed = 0
    for number in MANY:
        manifest = store.catalog.manifest(f"step-{number}")
        assert held(store, f"step-{number}") == set(manifest.shards)
        assert len(manifest.shards) == len(PAIR) * (1 if manifest.is_slim else 2)
        slimmed += manifest.is_slim
    assert not store.catalog.manifest(f"step-{MANY[-1]}").is_slim
    return slimmed


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kills", mark_long([4, 900], keep=[4]))
def test_kills_of_two_agents_that_slim(tmp_path: Path, kills: int) -> None:
    """The agents of both nodes are killed at random moments after they got the policy. The newest checkpoint stays
    full.
    """
    drawn, done, amid = random.Random(kills), 0, 0
    while done < kills:
        stores = [LocalStore(tmp_path / f"{done}" / f"node{index}") for index in range(2)]
        for number in MANY:
            checkpointed(stores, number, with_optimizer(PAIR), checkpoint_id=f"step-{number}", size_bytes=3000)
        slimmed = [0, 0]
        while min(slimmed) < len(MANY) - 1:
            with agents(stores) as running:
                for agent in running:
                    set_policy(agent, Retention(keep_last=len(MANY), full_last=1), revision=MANY[-1])
                time.sleep(drawn.uniform(0.0, 0.3))
                for agent in running:
                    agent.process.kill()
            after = [count_slim_of_many(store) for store in stores]
            amid += sum(0 < count < len(MANY) - 1 for count in after)
            assert [max(pair) for pair in zip(slimmed, after, strict=True)] == after
            slimmed, done = after, done + len(stores)
    assert amid >= kills // 10  # enough kills were between the first and the last checkpoint
