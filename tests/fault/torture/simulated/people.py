"""What people do: they remove checkpoints from nodes, take nodes down for good, and start jobs with other arguments."""

import argparse
import contextlib
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any, Literal

from replicated_ckpt.cli.nodes import drain, forget
from replicated_ckpt.cli.removal import prune, rm
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
        course.say(f"rm {checkpoint_id}{' --force' if force else ''} on node {node}: {code}: {_tell(said)}")
        if said:
            _tell_oracle(course, said, node)


def prune_some(course: Course) -> None:
    """A person runs `replicated-ckpt prune --keep-last N` on some nodes, or on all that are up."""
    up = course.up()
    if not up:
        return
    keep_last = course.random.choice([1, 2])
    nodes = course.random.sample(up, course.random.choice([len(up), course.random.randint(1, len(up))]))
    course.disturbances += 1
    for node in nodes:
        course.oracle.look()
        arguments = {"object_store": None, "keep_in_bucket": False, "force": False, "dry_run": False}
        code, said = _run(course, node, prune, keep_last=keep_last, keep_every=None, **arguments)
        course.say(f"prune --keep-last {keep_last} on node {node}: {code}: {_tell(said)}")
        if said:
            _tell_oracle(course, said, node)


def _tell(said: Mapping[str, Any]) -> dict[str, Any]:
    return {name: said[name] for name in ("removed", "not_here", "kept") if said.get(name)}


def _tell_oracle(course: Course, said: Mapping[str, Any], node: int) -> None:
    """What was removed there. Where one version of several is kept, the output does not say which."""
    went = {*said["removed"], *said["not_here"]}
    for checkpoint_id in {row["checkpoint_id"] for row in said["plan"]}:
        rows = [row for row in said["plan"] if row["checkpoint_id"] == checkpoint_id and not row.get("is_kept")]
        why = said["kept"].get(checkpoint_id, "")
        if checkpoint_id in went or "it goes when" in why:
            course.oracle.removed([row["save_id"] for row in rows], node, is_done=not why)


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


def forget_lost(course: Course) -> None:
    """A person runs `replicated-ckpt forget NODE` on a node, for one whose disk is gone."""
    up = course.up()
    if not up or not course.wiped:
        return
    node, lost = course.random.choice(up), course.random.choice(sorted(course.wiped))
    code, said = _run(course, node, forget, node=lost, force=course.random.random() < 0.3)
    course.say(f"forget {lost} on node {node}: {code}: {said.get('losses', '')}")


def change_policy(course: Course) -> None:
    """The run goes on with other arguments."""
    course.end_job()
    copies, keep_last = course.random.choice([2, 2, 3]), course.random.choice([None, 1, 2, 3])
    acks: Sequence[Literal["local", "peer"]] = ["local", "peer", "peer"]
    ack = course.random.choice(acks)
    course.policy = replace(course.policy, copies=copies, keep_last=keep_last, ack=ack)
    course.oracle.change_policy(keep_last)
    course.say(f"from now on {copies} copies, ack {ack}, keep_last {keep_last}")


def _find_only_there(course: Course, node: int) -> list[str]:
    """Checkpoints that must load, and of each version of which a part was seen on no other disk."""
    oracle = course.oracle
    kept = [found for found in oracle.ids() if oracle.must_load(found)]
    return [
        checkpoint_id
        for checkpoint_id in kept
        if all({node} in attempt.nodes_by_part.values() for attempt in oracle.standing(checkpoint_id))
    ]


def _run(course: Course, where: int, verb: ModuleType, **arguments: Any) -> tuple[str, dict[str, Any]]:
    """A verb's exit code, or the error that it raised, and what it printed."""
    root = str(course.cluster.nodes[where].root)
    printed = io.StringIO()
    with course.cluster.network.acting(Actor(where, is_agent=False)), contextlib.redirect_stdout(printed):
        try:
            code = int(verb.run(argparse.Namespace(root=root, json=True, **arguments)))
        except ReplicatedCkptError as exc:
            return repr(exc), {}
    return str(code), json.loads(printed.getvalue())


_STEPS: Mapping[Callable[[Course], None], int] = {
    save: 6,
    remove: 7,
    prune_some: 2,
    drain_and_lose: 3,
    forget_lost: 2,
    change_policy: 1,
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
