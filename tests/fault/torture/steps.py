"""The steps of a schedule: random actions of operators, jobs, agents and faults."""

import errno
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from replicated_ckpt.failpoints import POINTS
from tests.fault.torture.course import Course, SlowLoad, SlowSave
from tests.fault.torture.damage import choose, damage
from tests.fault.torture.disks import MANIFEST
from tests.fault.torture.simulated.faults import Outage

ERRORS = [errno.EIO, errno.ENOSPC, errno.EROFS, errno.EMFILE, errno.EACCES]
RANK_POINTS = sorted(name for name in POINTS if name.startswith(("rank.", "coordinator.", "store.")))
AGENT_STEPS = "agent.", "commit.", "store.", "abort.", "restore.", "retire."
AGENT_POINTS = sorted(name for name in POINTS if name.startswith(AGENT_STEPS))
DECIDING_POINTS = ["coordinator.metadata-staged", "coordinator.decided", "coordinator.decided", "coordinator.published"]
PUBLISHING_POINTS = sorted(name for name in POINTS if name.startswith(("agent.decision", "commit.")))
RANK_HANDING_POINTS = ["rank.handing-over", "rank.submitted", "rank.written", "rank.receipted"]
RANK_HANDING_POINTS += sorted(name for name in POINTS if name.startswith("coordinator."))
AGENT_HANDING_POINTS = ["agent.submitted", "agent.writing", "agent.finishing", "agent.decided", "agent.finished"]
AGENT_HANDING_POINTS += ["store.shard-fsynced", "store.shard-named", "agent.receiving", "commit.named", "commit.done"]
PAUSING_POINTS = ["coordinator.drawn", "coordinator.opened", "coordinator.placed", "rank.writing", "rank.written"]
PAUSING_POINTS += ["store.opened", "store.shard-fsynced", "agent.receiving", "coordinator.decided", "commit.checked"]
PAUSING_POINTS += ["commit.described", "commit.prepared"]
BACKGROUND_POINTS = ["store.opened", "store.opened", "restore.copied", "commit.checked", "commit.named", "commit.done"]
BACKGROUND_POINTS += ["commit.described", "retire.gone", "retire.recycled"]
REPAIR_POINTS = sorted(name for name in POINTS if name.startswith(("commit.", "store.opened")))

# Saves -----------------------------------------------------------------------------------------------------------


def save(course: Course) -> None:
    job = course.current_job()
    if job is not None:
        checkpoint_id, overwrite = course.draw_id()
        course.save(job, checkpoint_id, overwrite=overwrite)


def save_with_a_kill(course: Course) -> None:
    """A save in which a rank or an agent is killed at one step."""
    job = course.current_job()
    if job is None:
        return
    is_agent, name, node = _draw_point(course, job)
    course.cluster.plan_kill(name, node, is_agent=is_agent)
    course.disturbances += 1
    checkpoint_id, overwrite = course.draw_id()
    what = f", {'agent' if is_agent else 'rank'} of node {node} to be killed at {name}"
    course.save(job, checkpoint_id, what, overwrite=overwrite)


def _draw_point(course: Course, job: Any) -> tuple[bool, str, int]:
    """Draws where a fault happens: to an agent or a rank, at which step of a save, and on which node."""
    is_agent = course.random.random() < 0.5
    name = course.random.choice(AGENT_POINTS if is_agent else RANK_POINTS)
    return is_agent, name, course.random.choice(job.nodes)


def save_with_an_error(course: Course) -> None:
    """A save in which one system call of a rank or agent fails once."""
    job = course.current_job()
    if job is None:
        return
    is_agent, name, node = _draw_point(course, job)
    error = course.random.choice(ERRORS)
    course.cluster.plan_error(name, node, is_agent=is_agent, error=error)
    course.disturbances += 1
    checkpoint_id, overwrite = course.draw_id()
    what = f", {'agent' if is_agent else 'rank'} of node {node} to get {errno.errorcode[error]} at {name}"
    course.save(job, checkpoint_id, what, overwrite=overwrite)


def kill_with_a_shard(course: Course) -> None:
    """Kills an agent that has accepted a shard. Its rank starts the agent again, and submits the shard again."""
    job = course.current_job()
    if job is None:
        return
    name, node = course.random.choice(["agent.submitted", "agent.writing"]), course.random.choice(job.nodes)
    course.cluster.plan_kill(name, node, is_agent=True)
    course.disturbances += 1
    course.agent_alone_dies = course.are_all_up(job.nodes)
    checkpoint_id, overwrite = course.draw_id()
    course.save(job, checkpoint_id, f", agent of node {node} to be killed at {name}", overwrite=overwrite)
    course.agent_alone_dies = False


def lose_trainers(course: Course) -> None:
    """Kills every trainer at one step of a submitted save, and in some cases some agents, too."""
    job = course.current_job()
    if job is None:
        return
    is_agent = course.random.random() < 0.5
    name = course.random.choice(AGENT_HANDING_POINTS if is_agent else RANK_HANDING_POINTS)
    nodes = list(dict.fromkeys(job.nodes))
    node = nodes[0] if name.startswith("coordinator.") else course.random.choice(nodes)
    how = course.random.choice(["trainers", "trainers", "trainers and agents"])
    some = frozenset(course.random.sample(nodes, course.random.randint(1, len(nodes))))
    course.cluster.plan_outage(name, node, is_agent=is_agent, outage=Outage(some, how))
    course.disturbances += 1
    course.trainers_alone_die = how == "trainers"
    checkpoint_id, overwrite = course.draw_id()
    victims = "" if course.trainers_alone_die else f" and agents of {sorted(some)}"
    course.save(job, checkpoint_id, f", all trainers{victims} to be killed at {name} on {node}", overwrite=overwrite)
    course.trainers_alone_die = False


def overwrite_with_an_outage(course: Course) -> None:
    """Several nodes die, are switched off or are cut off at once while a save decides or publishes."""
    job = course.current_job()
    if job is None:
        return
    is_agent = course.random.random() < 0.4
    name = course.random.choice(PUBLISHING_POINTS if is_agent else DECIDING_POINTS)
    node = course.random.choice(job.nodes) if is_agent else job.nodes[0]
    nodes = list(dict.fromkeys(job.nodes))
    middle = len(nodes) // 2  # Neighbours share a rack: they hold copies for each other, and fail together.
    some = course.random.sample(nodes, course.random.randint(1, len(nodes)))
    victims = frozenset(course.random.choice([some, nodes[:middle], nodes[middle:]]))
    outage = Outage(victims, course.random.choice(["agents", "off", "off", "cut"]))
    course.cluster.plan_outage(name, node, is_agent=is_agent, outage=outage)
    course.disturbances += 1
    checkpoint_id, overwrite = course.draw_id(overwrite=course.random.random() < 0.9)
    where = f"{'agent' if is_agent else 'rank'} of node {node} is at {name}"
    what = f", nodes {sorted(victims)}: {outage.how} when {where}"
    course.save(job, checkpoint_id, what, overwrite=overwrite)
    if outage.how == "agents" and course.random.random() < 0.7:
        for victim in victims:
            course.cluster.nodes[victim].switch_off()


def begin_slowly(course: Course) -> None:
    """Begins a save with a slow planner, with a slow disk, or in the background. Other steps run before it ends."""
    if len(course.slow) > 1:
        return
    job = course.new_job()
    if job is None:
        return
    checkpoint_id, overwrite = course.draw_id()
    is_alone = not any(slow.attempt.checkpoint_id == checkpoint_id for slow in course.slow)
    is_calm = is_alone and course.are_all_up(job.nodes)
    _begin(course, job, checkpoint_id, overwrite=overwrite, is_calm=is_calm)


def _begin(course: Course, job: object, checkpoint_id: str, *, overwrite: bool, is_calm: bool) -> SlowSave:
    point = course.random.choice(PAUSING_POINTS)
    nodes = job.nodes  # type: ignore[attr-defined]
    attempt = course.oracle.began(checkpoint_id, len(nodes), nodes=nodes)
    disturbed = course.disturbances
    operation = course.cluster.begin(
        f"save {attempt.number}",
        lambda: course.saved(job, attempt, overwrite=overwrite),
        point,
    )
    slow = SlowSave(job, operation, attempt, is_calm, disturbed)
    if operation.is_over:
        course.end_slow(slow)
        return slow
    course.say(f"save {checkpoint_id} (attempt {attempt.number}) by nodes {nodes} begins, and pauses at {point}")
    course.slow.append(slow)
    return slow


def save_twice_at_once(course: Course) -> None:
    """Two jobs save under one id at the same time."""
    first = course.new_job()
    if first is None or len(course.slow) > 1:
        return
    checkpoint_id, _ = course.draw_id()
    course.disturbances += 1
    _begin(course, first, checkpoint_id, overwrite=True, is_calm=False)
    second = course.new_job()
    if second is not None:
        course.save(second, checkpoint_id, ", while another job saves it", overwrite=True)
        second.end()


def go_on(course: Course) -> None:
    """A paused save runs to its end."""
    if course.slow:
        course.go_on(course.random.choice(course.slow))


# Loads -----------------------------------------------------------------------------------------------------------


def load(course: Course) -> None:
    nodes = course.reachable()
    if nodes:
        group = course.random.sample(nodes, course.random.randint(1, len(nodes)))
        course.load(group, course.random.choice(["latest", *course.oracle.ids()]))


def load_slowly(course: Course) -> None:
    """A load chooses its checkpoint. Other steps run before it reads."""
    group = course.up()
    ids = [found for found in course.oracle.ids() if course.oracle.must_load(found, group)]
    if not ids or course.slow_loads:
        return
    checkpoint_id = course.random.choice(ids)
    job = course.backend.job(course.cluster, course.random.sample(group, len(group)), course.policy)
    operation = course.cluster.begin(f"load {checkpoint_id}", lambda: job.load(checkpoint_id, 1), "load.planned")
    course.say(f"load {checkpoint_id} on nodes {job.nodes} begins, and pauses when it has found it")
    now = course.cluster.now()
    load = SlowLoad(job, operation, checkpoint_id, job.nodes, course.disturbances, len(course.oracle.attempts), now)
    course.slow_loads.append(load)


def read_on(course: Course) -> None:
    """A paused load runs to its end."""
    if course.slow_loads:
        course.read_on(course.slow_loads[0])


def bucket_comes_and_goes(course: Course) -> None:
    course.cluster.is_bucket_down = not course.cluster.is_bucket_down
    course.say(f"the bucket is {'down' if course.cluster.is_bucket_down else 'back'}")


# Nodes come and go -----------------------------------------------------------------------------------------------


def kill_agent(course: Course) -> None:
    node = course.random.choice(course.cluster.nodes)
    course.say(f"agent of node {node.index} is killed")
    course.disturbances += 1
    node.kill()


def leave(course: Course) -> None:
    """Switches nodes off. Their agents leave in good order, or are killed."""
    nodes = [node for node in course.cluster.nodes if not node.is_off]
    chosen = course.random.sample(nodes, course.random.randint(0, len(nodes)))
    how = course.random.choice(["in good order", "in good order", "without a word"])
    _switch_off(course, chosen, how)


def _switch_off(course: Course, nodes: Sequence[Any], how: str) -> None:
    course.say(f"nodes {sorted(node.index for node in nodes)} are switched off {how}")
    course.disturbances += 1
    for node in nodes:
        if how == "in good order":
            node.leave()
        node.switch_off()
    if course.job is not None and course.job.is_dead:
        course.end_job()


def trade_places(course: Course) -> None:
    """Switches all running nodes off, and then all others on. The two groups never run together."""
    off = [node for node in course.cluster.nodes if node.is_off]
    if off:
        on = [node for node in course.cluster.nodes if not node.is_off]
        _switch_off(course, on, course.random.choice(["in good order", "without a word"]))
        course.say(f"nodes {[node.index for node in off]} are switched on")
        for node in course.random.sample(off, len(off)):
            node.switch_on()


def restart(course: Course) -> None:
    node = course.random.choice(course.cluster.nodes)
    if not node.is_off:
        course.say(f"agent of node {node.index} is started")
        node.boot()


def return_some(course: Course) -> None:
    """Switches some of the stopped nodes on, in random order. Others may stop."""
    off = [node for node in course.cluster.nodes if node.is_off]
    chosen = course.random.sample(off, course.random.randint(min(1, len(off)), len(off)))
    if not chosen:
        return
    if course.random.random() < 0.3:
        leave(course)
    course.say(f"nodes {[node.index for node in chosen]} are switched on")
    for node in chosen:
        node.switch_on()


def wipe(course: Course) -> None:
    """A node is lost with its disk, and returns empty."""
    node = course.random.choice(course.cluster.nodes)
    course.say(f"node {node.index} is lost with its disk, and comes back blank")
    course.disturbances += 1
    if course.job is not None and node.index in course.job.nodes:
        course.end_job()
    course.oracle.look()
    lose_disk(course, node)
    node.is_off = False
    if course.random.random() < 0.7:
        node.boot()
        course.introduce()


def lose_disk(course: Course, node: Any) -> None:
    """The stopped node loses its disk."""
    if (node.root / "node.json").exists():
        course.wiped.add(node.node_id())
    node.switch_off()
    node.wipe()
    course.oracle.lost_disk(node.index)
    course.knows[node.index] = 0


def lose_checkpoint(course: Course) -> None:
    """An operator removes a checkpoint's directory from one node, and its agent is restarted. The agent must fetch the
    checkpoint again.
    """
    node = course.random.choice(course.cluster.nodes)
    if node.is_off:
        return
    course.disturbances += 1
    node.kill()
    course.oracle.look()
    found = [version for version in course.disks.find_versions() if version.node == node.index and version.is_named]
    if not found:
        return
    version = course.random.choice(found)
    course.say(f"node{node.index}/{version.checkpoint_id} is removed, and the agent killed and started")
    for one in [
        one
        for one in course.disks.find_versions()
        if one.node == node.index and one.checkpoint_id == version.checkpoint_id
    ]:
        if one.place == version.place:
            attempt = course.oracle.attempt_of(one)
            course.oracle.damaged(one, attempt, [*one.files, MANIFEST], is_data_intact=False)
    shutil.rmtree(version.place)
    node.boot()


def cut_or_heal(course: Course) -> None:
    network = course.cluster.network
    course.disturbances += 1
    if network.cut and course.random.random() < 0.7:
        course.say("the network is whole again")
        network.cut = set()
    else:
        nodes = [node.index for node in course.cluster.nodes]
        some = course.random.sample(nodes, course.random.choice([1, 1, 2]))
        course.say(f"nodes {some} are cut off")
        if len(some) > 1 and course.random.random() < 0.5:
            network.split(some)
        else:
            network.cut = set(some)


# Disks -----------------------------------------------------------------------------------------------------------


def damage_a_file(course: Course) -> None:
    course.oracle.look()
    found = [version for version in course.disks.find_versions() if version.is_published]
    if not found:
        return
    version = course.random.choice(found)
    name, how = choose(sorted(version.files), course.random)
    course.say(f"{how} {name} of {version.save_id or 'a save'} in {version.place.relative_to(course.base)}")
    course.disturbances += 1
    attempt = course.oracle.attempt_of(version)
    bad = damage(version, name, how, course.random)
    course.oracle.damaged(version, attempt, bad, is_data_intact=how == "footer" and version.manifest is not None)


# Background ------------------------------------------------------------------------------------------------------


def protect(course: Course) -> None:
    """Gives the agents time to read everything and to do all work."""
    course.introduce()  # Agents copy from nodes that they have met.
    said = course.cluster.protect()
    done = bool(said) and all(found.is_complete for found in said)
    course.counts["protected"] += done
    course.say(f"re-protection: {'done' if done else 'not done'}: {said}")


def pass_time(course: Course) -> None:
    seconds = course.random.choice([8, 40, 90])
    course.say(f"{seconds} s pass")
    course.cluster.pass_time(seconds)


def round_slowly(course: Course) -> None:
    """The background work of one agent pauses in the middle, as on a slow disk, while other operations continue."""
    nodes = [node for node in course.cluster.nodes if node.is_up]
    if not nodes:
        return
    node, point = course.random.choice(nodes), course.random.choice(BACKGROUND_POINTS)
    operation = course.cluster.begin(f"round of node {node.index}", lambda: course.cluster.round_of([node]), point)
    if operation.is_over:
        if operation.error is not None:
            raise operation.error
        return
    course.say(f"the background work of node {node.index} pauses at {point}")
    course.disturbances += 1
    while course.slow:
        course.go_on(course.slow[0])
    if course.random.random() < 0.5:
        save(course)
    if not operation.is_over:
        course.cluster.resume(operation)
    course.say(f"the background work of node {node.index} goes on")
    if operation.error is not None:
        raise operation.error


# Stock torch -----------------------------------------------------------------------------------------------------


def scatter(course: Course) -> None:
    """A job with torch's own writer leaves a checkpoint on the nodes' disks."""
    nodes = course.reachable()
    if len(nodes) < 2:
        return
    world = course.random.sample(nodes, course.random.randint(2, len(nodes)))
    job = course.backend.job(course.cluster, world, course.policy)
    checkpoint_id = f"stock-{len(course.oracle.attempts)}"
    attempt = course.oracle.began(checkpoint_id, len(world), is_stock=True)
    job.save_with_stock_torch(checkpoint_id, attempt.number)
    job.end()
    course.oracle.end(attempt, is_acknowledged=True)
    course.say(f"stock torch saves {checkpoint_id} (attempt {attempt.number}) on nodes {world}")


def run_repair(course: Course) -> None:
    """An operator runs `replicated-ckpt repair` on a node. A process may be killed at any step."""
    up = course.up()
    if not up:
        return
    node = course.random.choice(up)
    course.introduce()
    victim = course.random.choice([None, None, *up])
    point = course.random.choice(REPAIR_POINTS)
    if victim is not None:
        course.cluster.plan_kill(point, victim, is_agent=True)
        course.disturbances += 1
    code = course.cluster.repair(node)
    killed = course.cluster.settle_kill()
    course.say(
        f"repair on node {node}: {code}" + (f"; agent of node {killed.node} killed at {point}" if killed else "")
    )


def end_job(course: Course) -> None:
    course.end_job()


STEPS: dict[str, tuple[int, Callable[[Course], None]]] = {
    "save": (6, save),
    "save_with_a_kill": (4, save_with_a_kill),
    "overwrite_with_an_outage": (2, overwrite_with_an_outage),
    "begin_slowly": (2, begin_slowly),
    "save_twice_at_once": (1, save_twice_at_once),
    "go_on": (1, go_on),
    "load": (3, load),
    "load_slowly": (1, load_slowly),
    "read_on": (1, read_on),
    "bucket_comes_and_goes": (0, bucket_comes_and_goes),
    "kill_agent": (2, kill_agent),
    "leave": (1, leave),
    "restart": (2, restart),
    "return_some": (2, return_some),
    "trade_places": (1, trade_places),
    "wipe": (2, wipe),
    "lose_checkpoint": (1, lose_checkpoint),
    "cut_or_heal": (2, cut_or_heal),
    "damage": (3, damage_a_file),
    "protect": (3, protect),
    "pass_time": (1, pass_time),
    "round_slowly": (1, round_slowly),
    "scatter": (0, scatter),
    "repair": (1, run_repair),
    "end_job": (1, end_job),
    "lose_trainers": (0, lose_trainers),
    "kill_with_a_shard": (0, kill_with_a_shard),
}
"""By name: how often it is drawn where anything may happen, and what it does."""

NEED_A_PAUSE = {
    "begin_slowly",
    "save_twice_at_once",
    "go_on",
    "round_slowly",
    "load_slowly",
    "read_on",
    "bucket_comes_and_goes",
}
"""Steps for simulations only: an operation pauses in the middle, or a bucket does not answer."""
ANYTHING = {name: weight for name, (weight, _) in STEPS.items()}
HANDING = {"lose_trainers": 5, "kill_with_a_shard": 2}
"""Additional weights of steps if jobs submit their saves."""
THEMES: dict[str, dict[str, int]] = {
    "anything": ANYTHING,
    "outages": {
        "overwrite_with_an_outage": 5,
        "return_some": 5,
        "trade_places": 4,
        "leave": 3,
        "pass_time": 4,
        "load": 1,
        "save": 1,
    },
    "slowness": {
        "begin_slowly": 6,
        "round_slowly": 6,
        "go_on": 2,
        "save_twice_at_once": 2,
        "lose_checkpoint": 5,
        "wipe": 2,
        "save": 2,
        "pass_time": 2,
        "load": 1,
    },
    "damage": {
        "damage": 8,
        "protect": 5,
        "leave": 2,
        "return_some": 3,
        "save": 2,
        "pass_time": 2,
        "lose_checkpoint": 1,
    },
    "histories": {"save": 6, "return_some": 6, "trade_places": 1, "leave": 3, "load": 3, "pass_time": 3, "wipe": 1},
    "stock": ANYTHING | {"scatter": 8, "repair": 8},
    "retention": {"save": 8, "load_slowly": 4, "read_on": 2, "pass_time": 4, "leave": 2, "return_some": 3, "wipe": 1},
    "bucket": ANYTHING | {"bucket_comes_and_goes": 3, "wipe": 4, "pass_time": 4, "save": 8},
}
"""What a schedule is about: how often each step is drawn."""


SCRIPT_STEPS = 14


def save_and_take_steps(
    course: Course, own_steps: Mapping[str, Callable[[Course], None]], weights: Mapping[str, int]
) -> None:
    """One save, then steps drawn by these weights: a script's own, and those of all schedules."""
    save(course)
    names = [name for name in weights if not (course.hands_over and name in NEED_A_PAUSE)]
    for _ in range(SCRIPT_STEPS):
        (name,) = course.random.choices(names, [weights[name] for name in names])
        (own_steps[name] if name in own_steps else STEPS[name][1])(course)
        course.finish_step()
