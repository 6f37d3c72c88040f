"""What people do with the command line: they remove checkpoints from nodes, and take nodes down for good."""

import argparse
import contextlib
import io
import json
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from replicated_ckpt.cli.nodes import drain
from replicated_ckpt.cli.removal import rm
from replicated_ckpt.errors import ReplicatedCkptError
from tests.fault.torture.course import Course
from tests.fault.torture.oracle import Violation
from tests.fault.torture.simulated.network import Actor
from tests.fault.torture.steps import (
    begin_slowly,
    cut_or_heal,
    damage_a_file,
    end_job,
    go_on,
    kill_agent,
    leave,
    load,
    overwrite_with_an_outage,
    pass_time,
    protect,
    restart,
    return_some,
    save,
    save_with_a_kill,
    trade_places,
    wipe,
)

STEPS_COUNT = 14


def remove_and_drain_often(course: Course) -> None:
    """For any seed: checkpoints are removed and nodes drained, between saves, loads and faults."""
    save(course)
    weights = {step: weight for step, weight in _STEPS.items() if not (course.hands_over and step in _PAUSING)}
    for _ in range(STEPS_COUNT):
        (step,) = course.random.choices(list(weights), list(weights.values()))
        step(course)
        course.collect_slow()
        course.oracle.look()
        course.learn()
        if course.random.random() < 0.7:
            course.cluster.background()


def remove(course: Course) -> None:
    """A person runs `replicated-ckpt rm ID` on some nodes, or on all that are up."""
    up = course.up()
    ids = sorted({found.checkpoint_id for found in course.oracle.attempts if found.readable_on})
    if not up or not ids:
        return
    checkpoint_id = course.random.choice(ids)
    nodes = course.random.sample(up, course.random.choice([len(up), course.random.randint(1, len(up))]))
    force = course.random.random() < 0.4
    course.disturbances += 1  # a save of it may be under way
    for node in nodes:
        course.oracle.look()
        arguments = {"object_store": None, "keep_in_bucket": False, "force": force, "dry_run": False}
        code, said = _run(course, node, rm, id=checkpoint_id, **arguments)
        told = {name: said[name] for name in ("removed", "not_here", "kept") if said.get(name)}
        course.say(f"rm {checkpoint_id}{' --force' if force else ''} on node {node}: {code}: {told or ''}")
        if said:
            _tell_oracle(course, said, node)


def _tell_oracle(course: Course, said: Mapping[str, Any], node: int) -> None:
    """The oldest version goes first; with one that is kept the newer ones are. One that a process reads goes later."""
    oldest_first = [row["save_id"] for row in reversed(said["plan"])]
    gone = len(said["removed"]) + len(said["not_here"])
    course.oracle.removed(oldest_first[:gone], node)
    if any("it goes when" in why for why in said["kept"].values()):
        course.oracle.removed(oldest_first[gone : gone + 1], node, is_done=False)


def drain_and_lose(course: Course) -> None:
    """A node is drained; if the command says that it may be taken down, it is, and comes back blank if at all."""
    up = course.up()
    if not up:
        return
    node = course.random.choice(up)
    course.introduce()
    code, _ = _run(course, node, drain, dry_run=False)
    course.say(f"drain on node {node}: {code}")
    if code != "0":
        return
    if course.job is not None and node in course.job.nodes:
        course.end_job()
    jobs = [slow.job for slow in course.slow] + [load.job for load in course.slow_loads]
    if any(node in job.nodes for job in jobs):
        return  # ranks save there again
    course.oracle.look()
    alone = _find_only_there(course, node)
    if alone:
        raise Violation(f"node {node} may be taken down, and alone has {alone}")
    course.disturbances += 1
    course.wiped.add(course.cluster.nodes[node].node_id())
    course.cluster.nodes[node].switch_off()
    course.cluster.nodes[node].wipe()
    course.oracle.lost_disk(node)
    course.knows[node] = 0
    course.say(f"node {node} is taken down, and its disk is gone")


def _find_only_there(course: Course, node: int) -> list[str]:
    """Checkpoints that must load, and of each version of which a part was seen on no other disk."""
    oracle = course.oracle
    kept = [found for found in oracle.ids() if oracle.must_load(found)]
    return [
        checkpoint_id
        for checkpoint_id in kept
        if all({node} in attempt.nodes_by_part.values() for attempt in oracle.standing(checkpoint_id))
    ]


def _run(course: Course, node: int, verb: ModuleType, **arguments: Any) -> tuple[str, dict[str, Any]]:
    """A verb's exit code, or the error that it raised, and what it printed."""
    root = str(course.cluster.nodes[node].root)
    printed = io.StringIO()
    with course.cluster.network.acting(Actor(node, is_agent=False)), contextlib.redirect_stdout(printed):
        try:
            code = int(verb.run(argparse.Namespace(root=root, json=True, **arguments)))
        except ReplicatedCkptError as exc:
            return repr(exc), {}
    return str(code), json.loads(printed.getvalue())


_STEPS: Mapping[Callable[[Course], None], int] = {
    save: 6,
    remove: 7,
    drain_and_lose: 3,
    save_with_a_kill: 2,
    overwrite_with_an_outage: 2,
    begin_slowly: 2,
    go_on: 1,
    load: 2,
    kill_agent: 2,
    leave: 2,
    restart: 1,
    return_some: 4,
    trade_places: 1,
    wipe: 1,
    cut_or_heal: 2,
    damage_a_file: 1,
    protect: 2,
    pass_time: 3,
    end_job: 1,
}
"""How often each is drawn."""
_PAUSING = (begin_slowly, go_on)
"""Only where no job hands its saves over."""
