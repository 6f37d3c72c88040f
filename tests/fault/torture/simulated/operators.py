"""Actions of operators: they remove checkpoints from nodes, drain nodes, and start jobs with other arguments."""

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
from tests.fault.torture.steps import lose_disk, save_and_take_steps


def remove_and_drain_often(course: Course) -> None:
    """For any seed: checkpoints are removed and nodes are drained, between saves, loads and faults."""
    save_and_take_steps(course, _OWN_STEPS, _WEIGHTS)


def remove(course: Course) -> None:
    """An operator runs `replicated-ckpt rm ID` on some nodes, or on all running ones."""
    up = course.up()
    ids = sorted({found.checkpoint_id for found in course.oracle.attempts if found.readable_on})
    if not up or not ids:
        return
    checkpoint_id = course.random.choice(ids)
    nodes = _draw_nodes(course, up)
    force = course.random.random() < 0.4
    said_as = f"rm {checkpoint_id}{' --force' if force else ''}"
    _remove_on(course, nodes, rm, said_as, id=checkpoint_id, save=None, force=force)


def prune_some(course: Course) -> None:
    """An operator runs `replicated-ckpt prune --keep-last N` on some nodes, or on all running ones."""
    up = course.up()
    if not up:
        return
    keep_last = course.random.choice([1, 2])
    nodes, said_as = _draw_nodes(course, up), f"prune --keep-last {keep_last}"
    _remove_on(course, nodes, prune, said_as, keep_last=keep_last, keep_every=None, force=False)


def _draw_nodes(course: Course, up: Sequence[int]) -> list[int]:
    return course.random.sample(up, course.random.choice([len(up), course.random.randint(1, len(up))]))


def _remove_on(course: Course, nodes: Sequence[int], verb: ModuleType, said_as: str, **arguments: Any) -> None:
    course.disturbances += 1  # A save of the removed checkpoint may be running.
    for node in nodes:
        course.oracle.look()
        code, said = _run(course, node, verb, object_store=None, keep_in_bucket=False, dry_run=False, **arguments)
        told = {name: said[name] for name in ("removed", "not_here", "kept") if said.get(name)}
        course.say(f"{said_as} on node {node}: {code}: {told}")
        if said:
            _tell_oracle(course, said, node)


def _tell_oracle(course: Course, said: Mapping[str, Any], node: int) -> None:
    """Records the removed checkpoints. If one version of several is kept, the output does not show which."""
    went = {*said["removed"], *said["not_here"]}
    for checkpoint_id in {row["checkpoint_id"] for row in said["plan"]}:
        rows = [row for row in said["plan"] if row["checkpoint_id"] == checkpoint_id and not row.get("is_kept")]
        why = said["kept"].get(checkpoint_id, "")
        if checkpoint_id in went or "it is removed when" in why:
            course.oracle.removed([row["save_id"] for row in rows], node, is_done=not why)


def drain_and_lose(course: Course) -> None:
    """Drains a node. If the command allows it, the node is taken down. If it ever returns, it is empty."""
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
        return  # Ranks save on this node again.
    course.oracle.look()
    alone = _find_only_there(course, node)
    if alone:
        raise Violation(f"node {node} may be taken down, and alone has {alone}")
    course.disturbances += 1
    lose_disk(course, course.cluster.nodes[node])
    course.say(f"node {node} is taken down, and its disk is gone")


def forget_lost(course: Course) -> None:
    """An operator runs `replicated-ckpt forget NODE` for a node whose disk is lost."""
    up = course.up()
    if not up or not course.wiped:
        return
    node, lost = course.random.choice(up), course.random.choice(sorted(course.wiped))
    code, said = _run(course, node, forget, node=lost, force=course.random.random() < 0.3)
    course.say(f"forget {lost} on node {node}: {code}: {said.get('losses', '')}")


def change_policy(course: Course) -> None:
    """The run continues with other arguments."""
    course.end_job()
    copies, keep_last = course.random.choice([2, 2, 3]), course.random.choice([None, 1, 2, 3])
    acks: Sequence[Literal["local", "peer"]] = ["local", "peer", "peer"]
    ack = course.random.choice(acks)
    course.policy = replace(course.policy, copies=copies, keep_last=keep_last, ack=ack)
    course.oracle.change_policy(keep_last)
    course.say(f"from now on {copies} copies, ack {ack}, keep_last {keep_last}")


def _find_only_there(course: Course, node: int) -> list[str]:
    """Checkpoints that must load, and of which each version has a part that was seen on no other disk."""
    oracle = course.oracle
    kept = [found for found in oracle.ids() if oracle.must_load(found)]
    return [
        checkpoint_id
        for checkpoint_id in kept
        if all({node} in attempt.nodes_by_part.values() for attempt in oracle.surviving(checkpoint_id))
    ]


def _run(course: Course, where: int, verb: ModuleType, **arguments: Any) -> tuple[str, dict[str, Any]]:
    """Runs a verb. Returns its exit code or the error that it raised, and its output."""
    root = str(course.cluster.nodes[where].root)
    printed = io.StringIO()
    with course.cluster.network.acting(Actor(where, is_agent=False)), contextlib.redirect_stdout(printed):
        try:
            code = int(verb.run(argparse.Namespace(root=root, json=True, given=[], **arguments)))
        except ReplicatedCkptError as exc:
            return repr(exc), {}
    return str(code), json.loads(printed.getvalue())


_OWN_STEPS: Mapping[str, Callable[[Course], None]] = {
    "remove": remove,
    "prune_some": prune_some,
    "drain_and_lose": drain_and_lose,
    "forget_lost": forget_lost,
    "change_policy": change_policy,
}
_WEIGHTS = {
    "save": 6,
    "remove": 7,
    "prune_some": 2,
    "drain_and_lose": 3,
    "forget_lost": 2,
    "change_policy": 1,
    "save_with_a_kill": 2,
    "overwrite_with_an_outage": 2,
    "begin_slowly": 2,
    "go_on": 1,
    "load": 2,
    "kill_agent": 2,
    "leave": 2,
    "restart": 1,
    "return_some": 4,
    "trade_places": 1,
    "wipe": 1,
    "cut_or_heal": 2,
    "damage": 1,
    "protect": 2,
    "pass_time": 3,
    "end_job": 1,
}
"""How often each step is drawn, these and those of `steps`."""
