"""Short schedules with fixed steps. Most lead to one defect that random steps rarely reach.

They use seed 25: four nodes, two copies, no policy, no bucket. The oracle checks them like random schedules.
"""

from collections.abc import Sequence
from typing import Any

from replicated_ckpt.node.saves.pins import PIN_S
from tests.fault.torture.course import Course
from tests.fault.torture.damage import damage
from tests.fault.torture.disks import MANIFEST, METADATA, FoundVersion
from tests.fault.torture.simulated.faults import Outage
from tests.fault.torture.steps import (
    end_job,
    kill_agent,
    load,
    lose_trainers,
    pass_time,
    save,
    save_with_an_error,
)

SEED = 25
KILLS = 5
ERRORS_STEPS = 12
NAME = "step-1"
NODES = [0, 1, 2, 3]


def lose_trainers_often(course: Course) -> None:
    """For any seed: in some submitted saves every trainer is killed at a random step."""
    course.hands_over = True
    for _ in range(KILLS):
        lose_trainers(course)


def meet_errors_often(course: Course) -> None:
    """For any seed: in most saves a system call of a rank or agent fails. Loads and agents' rounds run between the
    saves.
    """
    save_with_an_error(course)
    for _ in range(ERRORS_STEPS):
        step = course.random.choice([save_with_an_error] * 4 + [save, load, pass_time, kill_agent, end_job])
        step(course)


def one_pair_comes_back_first(course: Course) -> None:
    """D1: one pair of nodes is killed between decision and publishing, and returns without the other pair."""
    _save(course, NODES)
    outage = Outage(frozenset({2, 3}), "off")
    course.cluster.plan_outage("coordinator.decided", 0, is_agent=False, outage=outage)
    _save(course, NODES, "nodes [2, 3] are off when it is decided")
    _switch_off(course, [0, 1])
    _switch_on(course, [2, 3])
    course.load([2, 3], "latest")


def a_copy_is_assumed(course: Course) -> None:
    """D2: a new version lies on two of three nodes, and one of its copies is damaged. The third node leaves, and is
    then lost.
    """
    nodes = [0, 1, 2]
    _save(course, nodes)
    outage = Outage(frozenset({1, 2}), "off")
    course.cluster.plan_outage("coordinator.decided", 0, is_agent=False, outage=outage)
    _save(course, nodes, "nodes [1, 2] are off when it is decided")
    course.oracle.look()
    staged = next(one for one in course.disks.find_versions() if one.node == 2 and not one.is_published)
    _damage(course, staged, _shard_of(staged, rank=1), "truncate")
    _switch_on(course, [2])
    course.cluster.nodes[0].kill()
    course.cluster.nodes[0].boot()
    course.load([0, 2], "latest")
    course.cluster.nodes[1].switch_on()
    course.cluster.nodes[1].leave()
    course.cluster.nodes[1].switch_off()
    course.cluster.wait(PIN_S + 100)  # The load above keeps the checkpoint that it read.
    course.cluster.pass_time(60)
    course.oracle.look()
    course.wiped.add(course.cluster.nodes[1].node_id())
    course.cluster.nodes[1].wipe()
    course.oracle.lost_disk(1)


def manifest_here_and_metadata_there(course: Course) -> None:
    """D5: the manifest is bad on one node, and `.metadata` on all others. Every shard is intact."""
    _save(course, NODES)
    for node, name in [(0, MANIFEST), (1, METADATA), (2, METADATA), (3, METADATA)]:
        _damage(course, _lying(course, node), name, "empty")


def a_surplus_copy_is_damaged(course: Course) -> None:
    """D12: two copies are wanted, three exist, and one of them is damaged."""
    _save(course, NODES)
    shard = _shard_of(_lying(course, 0), rank=1)
    holder = next(node for node in NODES[1:] if shard in _lying(course, node).files)
    _switch_off(course, [holder])
    course.introduce()
    course.cluster.pass_time(300)
    course.cluster.protect()
    _switch_on(course, [holder])
    course.introduce()
    _damage(course, _lying(course, holder), shard)


def _save(course: Course, nodes: Sequence[int], what: str = "") -> None:
    job: Any = course.backend.job(course.cluster, nodes, course.policy)
    course.disturbances += bool(what)
    course.save(job, NAME, what and f", {what}", overwrite=bool(course.oracle.ids()))
    job.end()


def _switch_off(course: Course, nodes: Sequence[int]) -> None:
    course.say(f"nodes {nodes} are switched off")
    course.disturbances += 1
    for node in nodes:
        course.cluster.nodes[node].switch_off()


def _switch_on(course: Course, nodes: Sequence[int]) -> None:
    course.say(f"nodes {nodes} are switched on")
    for node in nodes:
        course.cluster.nodes[node].switch_on()


def _lying(course: Course, node: int) -> FoundVersion:
    course.oracle.look()
    return next(one for one in course.disks.find_versions() if one.node == node and one.is_named)


def _shard_of(version: FoundVersion, rank: int) -> str:
    """The name of a rank's shard in the manifest, or its file name before there is a manifest."""
    names = version.files if version.manifest is None else version.manifest["shards"]
    return next(name for name in names if name.startswith(f"__{rank}_"))


def _damage(course: Course, version: FoundVersion, name: str, how: str = "flip") -> None:
    course.say(f"{how} {name} in {version.place.relative_to(course.base)}")
    course.disturbances += 1
    attempt = course.oracle.attempt_of(version)
    course.oracle.damaged(version, attempt, damage(version, name, how, course.random), is_data_intact=False)
