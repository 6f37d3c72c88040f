"""One schedule: random steps from a seed, carried out on a simulated cluster, with the oracle looking after each."""

import random
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replicated_ckpt.core.layout import ShardName
from replicated_ckpt.errors import CheckpointNotFound, MeetingFailed, ReplicatedCkptError, ShardLost
from replicated_ckpt.failpoints import POINTS
from tests.fault.torture.cluster import Cluster
from tests.fault.torture.jobs import Job, Saved
from tests.fault.torture.network import Killed
from tests.fault.torture.oracle import Oracle, Violation

STEPS = 14
RANK_POINTS = sorted(
    name for name in POINTS if not name.startswith(("adopt.", "agent.", "commit.", "restore.", "abort.", "retire."))
)
AGENT_POINTS = sorted(name for name in POINTS if name.startswith(("agent.", "commit.", "store.", "abort.", "restore.")))


@dataclass(frozen=True)
class Backend:
    """What schedules run on: a cluster of nodes, and jobs on it. The simulated and the real one have the same methods."""

    cluster: Callable[[Path, int, int], Any]
    job: Callable[[Any, Sequence[int], int], Any]


SIMULATION = Backend(Cluster, Job)


class Schedule:
    """What happens is a function of the seed alone. `lines` tells it step by step, `counts` what there was."""

    def __init__(self, seed: int, base: Path, backend: "Backend") -> None:
        self.random = random.Random(seed)
        self.copies = self.random.choice([2, 2, 3])
        self._backend = backend
        self.cluster = backend.cluster(base, self.random.randint(3, 5), seed)
        self.oracle = Oracle()
        self.job: Any = None
        self.lines: list[str] = [f"seed {seed}: {len(self.cluster.nodes)} nodes, {self.copies} copies"]
        self.counts: Counter[str] = Counter()
        self._ids = 0

    def run(self, steps: int = STEPS) -> None:
        """Raises Violation where a promise was broken."""
        with self.cluster.installed():
            for node in self.cluster.nodes:
                node.boot()
            self._save()
            for _ in range(steps):
                self._step()
                self._check()
            self._end()

    def _step(self) -> None:
        steps: list[tuple[int, Callable[[], None]]] = [
            (6, self._save),
            (4, self._save_with_a_kill),
            (3, self._load_somewhere),
            (2, self._kill_agent),
            (2, self._restart),
            (2, self._wipe),
            (3, self._damage),
            (2, self._cut_or_heal),
            (4, self._protect),
            (1, self._end_job),
        ]
        weights, actions = zip(*steps, strict=True)
        (action,) = self.random.choices(actions, weights)
        self.counts["steps"] += 1
        action()
        if self.random.random() < 0.7:
            self.cluster.background()

    def _say(self, text: str) -> None:
        self.lines.append(text)

    # Steps -------------------------------------------------------------------------------------------------------

    def _reachable(self) -> list[int]:
        return [node.index for node in self.cluster.nodes if node.index not in self.cluster.network.cut]

    def _out_of_reach(self) -> set[int]:
        cut: set[int] = self.cluster.network.cut
        return {node.index for node in self.cluster.nodes if not node.is_up} | cut

    def _current_job(self) -> Any:
        """The job that goes on, or a new one on some of the nodes that can reach each other, in any order."""
        if self.job is not None and not self.job.is_dead and self.random.random() < 0.6:
            return None if set(self.job.nodes) & self.cluster.network.cut else self.job
        self._end_job()
        nodes = self._reachable()
        if not nodes:
            return None
        chosen = self.random.sample(nodes, self.random.randint(min(2, len(nodes)), len(nodes)))
        world = [node for node in chosen for _ in range(self.random.choice([1, 1, 2]))]
        self.job = self._backend.job(self.cluster, world, self.copies)
        return self.job

    def _end_job(self) -> None:
        if self.job is not None:
            self._say("the job ends")
            self.job.end()
            self.job = None

    def _save(self) -> None:
        self._saved(None)

    def _save_with_a_kill(self) -> None:
        job = self._current_job()
        if job is None:
            return
        is_agent = self.random.random() < 0.5
        name = self.random.choice(AGENT_POINTS if is_agent else RANK_POINTS)
        node = self.random.choice(job.nodes)
        self.cluster.plan_kill(name, node, is_agent=is_agent)
        self._saved(job, f", {'agent' if is_agent else 'rank'} of node {node} to be killed at {name}")

    def _saved(self, job: Any, with_what: str = "") -> None:
        job = job or self._current_job()
        if job is None:
            return
        known = sorted(self.oracle.newest)
        overwrite = bool(known) and self.random.random() < 0.4
        if overwrite:
            checkpoint_id = self.random.choice(known)
        else:
            self._ids += 1
            checkpoint_id = f"step-{self._ids}"
        attempt = self.oracle.began(checkpoint_id, len(job.nodes))
        is_calm = not with_what and all(self.cluster.nodes[node].is_up for node in job.nodes)
        saved = job.save(checkpoint_id, attempt, overwrite=overwrite)
        killed = self.cluster.settle_kill()
        self.counts["saves"] += 1
        self.counts["kills"] += killed is not None
        who = "" if killed is None else f"; killed: {'agent' if killed.is_agent else 'rank'} of node {killed.node}"
        how = "acknowledged" if saved.error is None else f"{type(saved.error).__name__}"
        self._say(f"save {checkpoint_id} (attempt {attempt}) by nodes {job.nodes}{with_what}: {how}{who}")
        if job.is_dead:
            self.job = None
        if saved.error is None:
            self._acknowledge(job, checkpoint_id, attempt, saved)
        elif is_calm:
            raise Violation(f"a save that nothing disturbed failed: {saved.error!r}")
        elif isinstance(saved.error, ReplicatedCkptError | Killed) and killed is None:
            raise Violation(f"a save failed outside of DCP's steps: {saved.error!r}")

    def _acknowledge(self, job: Any, checkpoint_id: str, attempt: int, saved: Saved) -> None:
        ids = {self.cluster.nodes[node].node_id(): node for node in job.nodes}
        unpublished = {
            ids[node_id] for node_id in ids for text in saved.warnings if f"node {node_id} has not published" in text
        }
        wanted = self.copies
        self.oracle.acknowledged(
            checkpoint_id, attempt, copies=saved.copies_made, wanted=wanted, unpublished=unpublished
        )
        self.counts["acknowledged"] += 1

    def _load_somewhere(self) -> None:
        nodes = self._reachable()
        if not nodes:
            return
        group = self.random.sample(nodes, self.random.randint(1, len(nodes)))
        checkpoint_id = self.random.choice(["latest", *sorted(self.oracle.newest)])
        self._load(group, checkpoint_id)

    def _kill_agent(self) -> None:
        node = self.random.choice(self.cluster.nodes)
        self._say(f"agent of node {node.index} is killed")
        node.kill()

    def _restart(self) -> None:
        node = self.random.choice(self.cluster.nodes)
        self._say(f"agent of node {node.index} is started")
        node.boot()

    def _wipe(self) -> None:
        node = self.random.choice(self.cluster.nodes)
        self._say(f"node {node.index} is lost with its disk, and comes back blank")
        if self.job is not None and node.index in self.job.nodes:
            self._end_job()
        node.wipe()
        self.oracle.hit(node.index)
        if self.random.random() < 0.7:
            node.boot()
            self._introduce()

    def _introduce(self) -> None:
        """A load of all nodes that can be reached tells a blank node and the others of each other."""
        group = [node.index for node in self.cluster.nodes if node.is_up and node.index in self._reachable()]
        if group:
            self._load(group, "latest")

    def _damage(self) -> None:
        node = self.random.choice(self.cluster.nodes)
        files = sorted(
            path
            for path in (node.root.rglob("*") if node.root.is_dir() else ())
            if path.is_file() and path.parent.parent == node.root and path.parent.name.startswith("step-")
        )
        if not files:
            return
        path = self.random.choice(files)
        how = self.random.choice(["flip", "flip", "truncate", "empty", "delete", "swap"])
        self._say(f"{how} {path.relative_to(self.cluster.base)}")
        shards = [other for other in files if other.parent == path.parent and ShardName.parse(other.name)]
        damage(path, how, shards, self.random)
        self.oracle.hit(node.index)

    def _cut_or_heal(self) -> None:
        network = self.cluster.network
        if network.cut and self.random.random() < 0.7:
            self._say("the network is whole again")
            network.cut = set()
        else:
            node = self.random.choice(self.cluster.nodes).index
            self._say(f"node {node} is cut off")
            network.cut = {node}

    def _protect(self) -> None:
        self._introduce()  # agents take copies of those whom they have met
        said = self.cluster.protect()
        up = [node for node in self.cluster.nodes if node.is_up and node.index not in self.cluster.network.cut]
        done = bool(said) and all(found.is_complete for found in said)
        self._say(f"re-protection: {'done' if done else 'not done'}: {said}")
        if done and up and not self.cluster.network.cut:
            self.oracle.protected(self._out_of_reach(), len(up))

    # What must hold ----------------------------------------------------------------------------------------------

    def _check(self) -> None:
        """The newest acknowledged checkpoints within their envelope load, by "latest" and by name."""
        out_of_reach = self._out_of_reach()
        group = [node.index for node in self.cluster.nodes if node.index not in out_of_reach]
        if not group:
            return
        self.random.shuffle(group)
        safe = self.oracle.safe(out_of_reach)
        self.counts["beyond"] += len(self.oracle.newest) - len(safe)
        found = self._load(group, "latest", readers=2)
        if safe and (found is None or found < safe[0].attempt):
            raise Violation(f'"latest" gave {found}, and attempt {safe[0].attempt} was acknowledged; safe: {safe}')
        for save in self.random.sample(safe, min(1, len(safe))):
            found = self._load(group, save.checkpoint_id, readers=1)
            if found is None or found < save.attempt:
                raise Violation(f"{save.checkpoint_id} gave {found}, and attempt {save.attempt} was acknowledged")

    def _load(self, group: list[int], checkpoint_id: str, readers: int = 9) -> int | None:
        """Loads on these nodes; the attempt that was found, None if the load said that it is lost. Never wrong bytes."""
        job = self._backend.job(self.cluster, group, self.copies)
        self.counts["loads"] += 1
        try:
            loaded = job.load(checkpoint_id, readers)
        except (ShardLost, CheckpointNotFound) as exc:
            self._say(f"load {checkpoint_id} on nodes {group}: {type(exc).__name__}: {exc.message}")
            return None
        except MeetingFailed as exc:
            raise Violation(f"a load did not end: {exc}") from exc
        finally:
            job.end()
        attempts = {attempt for attempt, _ in loaded}
        self._say(f"load {checkpoint_id} on nodes {group}: attempt {sorted(attempts)}")
        if len(attempts) != 1:
            raise Violation(f"the ranks of one load got different attempts: {attempts}")
        for attempt, state in loaded:
            self.oracle.check_bytes(checkpoint_id, attempt, state)
        return int(attempts.pop())

    def _end(self) -> None:
        """When all is quiet nothing is left half done."""
        self._end_job()
        self.cluster.network.cut = set()
        for node in self.cluster.nodes:
            node.boot()
        self.cluster.wait(200)
        self._load([node.index for node in self.cluster.nodes], "latest")
        self.cluster.protect()
        for node in self.cluster.nodes:
            for name in (".staging", ".trash", ".incoming"):
                left = [str(path) for path in (node.root / name).rglob("*")] if (node.root / name).is_dir() else []
                if left:
                    raise Violation(f"left on node {node.index}: {left}")
        self._check()


def damage(path: Path, how: str, shards: list[Path], chance: random.Random) -> None:
    """Damages one file as disks and people do."""
    raw = bytearray(path.read_bytes())
    other = next((shard for shard in shards if shard != path), None)
    if how == "swap" and path in shards and other is not None:
        spare = path.with_name("spare")
        path.rename(spare)
        other.rename(path)
        spare.rename(other)
    elif how == "truncate":
        path.write_bytes(raw[: chance.randrange(len(raw) or 1)])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "delete":
        path.unlink()
    elif raw:
        raw[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
        fresh = path.with_name("fresh")
        fresh.write_bytes(raw)
        shutil.move(fresh, path)
