"""Operators change the files of stores by hand: they copy, move, remove and touch versions.

They also restore stores from old backups, and swap them. Agents run meanwhile, or were killed before.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from replicated_ckpt.core.layout import AGENT_DIR, NODE_NAME, STAGING_DIR, is_save_id
from replicated_ckpt.stores.local.directories.intent import Intent
from tests.fault.torture.course import Course
from tests.fault.torture.disks import FoundVersion
from tests.fault.torture.simulated.cluster import Node
from tests.fault.torture.simulated.faults import Outage
from tests.fault.torture.steps import save_and_take_steps

AWAY, BACKUPS = "away", "backups"
MOMENTS_S = [0.0, 1e9, 4e9]
"""Times that `touch` sets: 1970, 2001 and 2096."""


def touch_files_often(course: Course) -> None:
    """For any seed: operators change files of stores between saves, loads and faults."""
    save_and_take_steps(course, _OWN_STEPS, _WEIGHTS)
    group = course.up()
    for alias in sorted(course.oracle.alias_ids()) if group else ():
        course.load(group, alias, readers=1)


def copy_to_name(course: Course) -> None:
    """`cp -r` of a checkpoint to a new name, on every node that has it or on one."""
    version = _draw_version(course)
    if version is None:
        return
    alias = f"copy-{len(course.lines)}"
    same = [
        one for one in course.disks.find_versions() if one.is_named and one.save_id == version.save_id and one.save_id
    ]
    some = course.random.choice([same, [version]])
    for one in some:
        with _hands_on(course, one.node, f"cp -r {one.checkpoint_id} {alias}"):
            shutil.copytree(one.place, one.place.with_name(alias), dirs_exist_ok=True)


def copy_to_node(course: Course) -> None:
    """`rsync -a` of a checkpoint to another node, over the version that has its name there, or instead of it."""
    version = _draw_version(course)
    if version is None:
        return
    target = course.random.choice([node for node in course.cluster.nodes if node.index != version.node])
    place, is_instead = target.root / version.checkpoint_id, course.random.random() < 0.5
    how = " --delete" if is_instead else ""
    with _hands_on(course, target.index, f"rsync -a{how} node{version.node}/{version.checkpoint_id}"):
        if is_instead:
            shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(version.place, place, dirs_exist_ok=True)


def move_away(course: Course) -> None:
    """`mv` of a version out of the store."""
    version = _draw_version(course)
    if version is not None:
        away = course.base / AWAY / f"{len(course.lines)}" / str(version.node) / version.checkpoint_id
        away.parent.mkdir(parents=True)
        with _hands_on(course, version.node, f"mv {version.checkpoint_id} away"):
            version.place.rename(away)


def move_back(course: Course) -> None:
    """`mv` of a version that was moved out back to its name, if the name is free."""
    away = sorted((course.base / AWAY).glob("*/*/*"))
    if not away:
        return
    path = course.random.choice(away)
    node = course.cluster.nodes[int(path.parent.name)]
    if node.root.is_dir() and not (node.root / path.name).exists():
        with _hands_on(course, node.index, f"mv {path.name} back"):
            path.rename(node.root / path.name)


def remove_by_hand(course: Course) -> None:
    """`rm -r` of a version with a name, or `rm` of the files of a replaced version."""
    course.oracle.look()
    found = [version for version in course.disks.find_versions() if version.is_published]
    if found:
        version = course.random.choice(found)
        which = "" if version.is_named else f", but only of save {version.save_id}"
        with _hands_on(course, version.node, f"rm -r {version.place.relative_to(course.base)}{which}"):
            if version.is_named:
                shutil.rmtree(version.place)
            for path in version.paths.values() if not version.is_named else ():
                path.unlink()


def change_times(course: Course) -> None:
    """`touch` of all files of a version, and `chmod` to read-only. No byte changes."""
    version = _draw_version(course)
    if version is None:
        return
    moment = course.random.choice(MOMENTS_S)
    with _hands_on(course, version.node, f"touch and chmod a-w {version.checkpoint_id}/*"):
        for path in (*version.place.iterdir(), version.place):
            os.utime(path, (moment, moment))
            path.chmod(path.stat().st_mode & ~0o222)


def back_up(course: Course) -> None:
    """`rsync -a` of a whole store to a backup, without the agent's tokens as SECURITY.md advises, or with them."""
    node, without = course.random.choice(course.cluster.nodes), course.random.choice(["", AGENT_DIR])
    if node.root.is_dir():
        course.say(f"node{node.index} is backed up{' without ' * bool(without)}{without}")
        backup = course.base / BACKUPS / f"{len(course.lines)}" / str(node.index)
        shutil.copytree(node.root, backup, symlinks=True, ignore=shutil.ignore_patterns(without))


def restore(course: Course) -> None:
    """`rsync -a` of an old backup over the store, with or without `--delete`, while nothing runs on the node."""
    backups = sorted((course.base / BACKUPS).glob("*/*"))
    if not backups:
        return
    backup = course.random.choice(backups)
    node = course.cluster.nodes[int(backup.name)]
    if not _is_idle(course, node):
        return
    is_instead = course.random.random() < 0.6
    has_duplicate = _identity(backup) in {_identity(other.root) for other in course.cluster.nodes if other is not node}
    is_another = has_duplicate or _holds_an_open_save(backup) or course.random.random() < 0.5
    put_back(course, node, backup, is_instead=is_instead, is_another=is_another)


def _holds_an_open_save(backup: Path) -> bool:
    """Whether the backup was made during a save that this node coordinated. The save may have been decided a moment
    later.
    """
    paths = [path for path in (backup / STAGING_DIR).glob("*.json") if is_save_id(path.stem)]
    return any(Intent.read_intent(path.stem, path).coordinator in (_identity(backup), "") for path in paths)


def put_back(course: Course, node: Node, backup: Path, *, is_instead: bool, is_another: bool) -> None:
    """Restores a backup. `is_another`: from then on the node has a new identity."""
    was = _identity(node.root)
    said_as = f"rsync -a{' --delete' if is_instead else ''} of an old backup{', as another node' if is_another else ''}"
    with _hands_on(course, node.index, said_as, is_down=True):
        if is_instead:
            shutil.rmtree(node.root, ignore_errors=True)
        shutil.copytree(backup, node.root, symlinks=True, dirs_exist_ok=True)
        if is_another:
            make_another_node(node.root)
        course.wiped = (course.wiped | {was} - {""}) - {_identity(node.root)}
    course.knows[node.index] = 0


def make_another_node(root: Path) -> None:
    """Gives the store a new identity, as docs/limits.md demands after a restore of an earlier state."""
    (root / NODE_NAME).unlink(missing_ok=True)
    shutil.rmtree(root / AGENT_DIR, ignore_errors=True)


def swap_stores(course: Course) -> None:
    """Swaps the disks of two nodes."""
    nodes = [node for node in course.cluster.nodes if not node.is_off and node.root.is_dir() and _is_idle(course, node)]
    if len(nodes) < 2:
        return
    one, other = course.random.sample(nodes, 2)
    spare = course.base / "spare"
    with (
        _hands_on(course, one.index, f"gets the disk of node{other.index}", is_down=True),
        _hands_on(course, other.index, f"gets the disk of node{one.index}", is_down=True),
    ):
        one.root.rename(spare)
        other.root.rename(one.root)
        spare.rename(other.root)
    for node in (one, other):
        course.knows[node.index] = 0
        node.boot()


def _draw_version(course: Course) -> FoundVersion | None:
    course.oracle.look()
    found = [version for version in course.disks.find_versions() if version.is_named and version.manifest is not None]
    return course.random.choice(found) if found else None


def _is_idle(course: Course, node: Node) -> bool:
    """Whether no save or load runs on the node. It would continue with files of another time."""
    jobs = [slow.job for slow in course.slow] + [load.job for load in course.slow_loads]
    return not any(node.index in job.nodes for job in jobs)


def _identity(root: Path) -> str:
    with contextlib.suppress(OSError, ValueError):
        return str(json.loads((root / NODE_NAME).read_bytes())["node_id"])
    return ""


@contextlib.contextmanager
def _hands_on(course: Course, index: int, what: str, *, is_down: bool = False) -> Iterator[None]:
    """In the block an operator changes files of this node. Its agent runs, or was killed, and may be started
    afterwards.

    Parts that lay only in these files may be lost. The oracle records which ones are gone.
    """
    node = course.cluster.nodes[index]
    how = course.random.choice(["killed", "told to stop"] if is_down else ["runs", "runs", "killed"])
    course.disturbances += 1
    if is_down and course.job is not None and index in course.job.nodes:
        course.end_job()
    if how != "runs":
        node.leave() if how == "told to stop" else node.kill()
    course.say(f"node{index}, whose agent {how if how == 'runs' else f'was {how}'}: {what}")
    course.oracle.look()
    before = course.oracle.parts_on(index)
    yield
    course.oracle.gone(before - course.oracle.parts_on(index), index)
    course.oracle.look()
    if not node.is_off and course.random.random() < 0.6:
        node.boot()


_OWN_STEPS: Mapping[str, Callable[[Course], None]] = {
    "copy_to_name": copy_to_name,
    "copy_to_node": copy_to_node,
    "move_away": move_away,
    "move_back": move_back,
    "remove_by_hand": remove_by_hand,
    "change_times": change_times,
    "back_up": back_up,
    "restore": restore,
    "swap_stores": swap_stores,
}
_WEIGHTS = {
    "save": 6,
    "copy_to_name": 1,
    "copy_to_node": 2,
    "move_away": 2,
    "move_back": 2,
    "remove_by_hand": 3,
    "change_times": 1,
    "back_up": 4,
    "restore": 5,
    "swap_stores": 2,
    "save_with_a_kill": 2,
    "overwrite_with_an_outage": 3,
    "begin_slowly": 2,
    "go_on": 1,
    "load": 2,
    "kill_agent": 2,
    "leave": 2,
    "restart": 1,
    "return_some": 4,
    "trade_places": 2,
    "wipe": 1,
    "cut_or_heal": 2,
    "damage": 1,
    "protect": 1,
    "pass_time": 3,
    "end_job": 1,
}
"""How often each step is drawn, these and those of `steps`."""


SEED = 25
"""For the script below: four nodes, two copies, no policy, no bucket."""


def a_coordinator_goes_back(course: Course) -> None:
    """A node that had staged a part of a save returns. The coordinator's store was restored to a state before that
    save, and the node that has published the save is off. The coordinator's identity is unchanged.
    """
    job = course.backend.job(course.cluster, [0, 1, 2], course.policy)
    course.save(job, "step-1", overwrite=False)
    back, silent, late = course.cluster.nodes[:3]
    backup = course.base / BACKUPS / "0"
    shutil.copytree(back.root, backup, symlinks=True)
    killed = Outage(frozenset({late.index}), "agents")
    course.cluster.plan_outage("coordinator.decided", back.index, is_agent=False, outage=killed)
    course.disturbances += 1
    course.save(job, "step-2", f", agent of node {late.index} killed when it is decided", overwrite=False)
    job.end()
    late.switch_off()
    put_back(course, back, backup, is_instead=True, is_another=False)
    back.boot()
    silent.switch_off()
    late.switch_on()
    course.load([back.index, late.index], "latest")
    course.cluster.pass_time(90)
    silent.switch_on()
    course.introduce()
