"""One schedule: random steps from a seed on a cluster, and the checks after each step and at the end."""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from replicated_ckpt.agent.repair.audit import Audit, Auditor
from replicated_ckpt.cli.checkpoints.repair import list_known_nodes
from replicated_ckpt.cli.checkpoints.verify import exit_code
from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.core.layout import AGENT_DIR, MANIFEST_NAME, replaced_name
from replicated_ckpt.core.upkeep.repair_plan import Action, RestoreManifest
from replicated_ckpt.node.state.policies import PolicyBook
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.local.versions.readers import is_read
from tests.fault.torture.attempt import Attempt
from tests.fault.torture.course import SIMULATION, Backend, Course
from tests.fault.torture.disks import GONE, METADATA, REPLACED, STAGING
from tests.fault.torture.oracle import FOREIGN, Violation, is_before
from tests.fault.torture.simulated.cluster import AWAY_AFTER_S, LOST_AFTER_S
from tests.fault.torture.simulated.jobs import Policy
from tests.fault.torture.steps import HANDING, NEED_A_PAUSE, STEPS, THEMES

STEP_COUNT = 14
TRIES = 3
PASSING = (f"{GONE}*", "*.part", "*.tmp", "*.distcp.*", f"{MANIFEST_NAME}.*")
"""Names of temporary files in the directory of a checkpoint. None is left when all work is done."""


class Schedule:
    """Runs and checks one schedule, which is a function of the seed alone."""

    def __init__(self, seed: int, base: Path, backend: Backend = SIMULATION) -> None:
        self.course = Course(seed, base, backend, sorted(THEMES))
        weights = THEMES[self.course.theme] | (HANDING if self.course.hands_over else {})
        can_pause = backend.can_pause and not self.course.hands_over
        self._names = [name for name in weights if can_pause or name not in NEED_A_PAUSE]
        self._weights = [weights[name] for name in self._names]

    def follow(self, script: Callable[[Course], None]) -> None:
        """Like `run`, with the steps of a script instead of random ones."""
        with self.course.cluster.installed():
            for node in self.course.cluster.nodes:
                node.boot()
            script(self.course)
            self.course.oracle.look()
            self._check()
            self._end()

    def run(self, steps: int = STEP_COUNT) -> None:
        """Raises Violation: a promise was broken."""
        course = self.course
        with course.cluster.installed():
            for node in course.cluster.nodes:
                node.boot()
            if course.theme == "histories":
                self._run_another()
            STEPS["save"][1](course)
            for _ in range(steps):
                self._step()
                self._check()
            self._end()

    def _step(self) -> None:
        course = self.course
        (name,) = course.random.choices(self._names, self._weights)
        course.counts["steps"] += 1
        STEPS[name][1](course)
        course.finish_step()

    def _run_another(self) -> None:
        """Lets another run use one node alone before it joins this cluster with its disk as it is."""
        course = self.course
        node = course.random.choice(course.cluster.nodes)
        job = course.backend.job(course.cluster, [node.index], Policy(course.policy.copies))
        prefix = course.random.choice(["other", "other", "step"])
        for number in range(course.random.randint(1, 6)):
            course.save(job, f"{prefix}-{number + 1}", overwrite=False, run=FOREIGN)
        job.end()
        course.say(f"node {node.index} was of {FOREIGN}")
        node.switch_off()

    # Checks ----------------------------------------------------------------------------------------------

    def _check(self) -> None:
        """Checks that the reachable nodes load what they must: "latest", and one checkpoint by name."""
        course = self.course
        group = course.up()
        course.random.shuffle(group)
        if group:
            how = {"with_bucket": course.has_bucket and course.random.random() < 0.5}
            self._check_latest(group, group, **how)
            ids = [found for found in course.oracle.ids() if course.oracle.must_load(found, group, **how)]
            course.counts["beyond"] += len(course.oracle.ids()) - len(ids)
            for checkpoint_id in course.random.sample(ids, min(len(ids), course.random.choice([0, 1]))):
                self._check_id(group, checkpoint_id, **how)

    def _check_latest(self, group: list[int], nodes: list[int] | None, *, with_bucket: bool = False) -> None:
        oracle = self.course.oracle
        newest = oracle.newest(nodes, with_bucket=with_bucket)
        readers = self.course.random.choice([1, 1, 2])
        found = self.course.load(group, "latest", readers, with_bucket=with_bucket)
        for number in range(TRIES if newest is not None and oracle.has_newer(newest) else 0):
            if found is None:  # The newer one is damaged, and this load is the first to notice.
                if number:  # If its manifest is lost, too, it first looks as if a user had removed it.
                    self.course.cluster.wait(LOST_AFTER_S + 5)
                self.course.cluster.background()
                found = self.course.load(group, "latest", readers=1, with_bucket=with_bucket)
        if newest is not None and (found is None or is_before(oracle.attempts[found - 1], newest)):
            raise Violation(f'"latest" gave {found}, and {newest} was acknowledged')

    def _check_id(self, group: list[int], checkpoint_id: str, *, with_bucket: bool = False) -> None:
        found = self.course.load(group, checkpoint_id, readers=1, with_bucket=with_bucket)
        current = self.course.oracle.current(checkpoint_id)
        if found not in [attempt.number for attempt in current]:
            raise Violation(f"{checkpoint_id} gave {found}, and not one of {current}")

    def _end(self) -> None:
        """Checks the end, once all disks are back and all nodes were up long enough: the last acknowledged save loads,
        and nothing is unfinished.
        """
        course, cluster = self.course, self.course.cluster
        course.end_all_slow()
        course.end_job()
        cluster.network.cut = set()
        for node in course.random.sample(cluster.nodes, len(cluster.nodes)):
            node.switch_on()
        group = [node.index for node in cluster.nodes]
        cluster.wait(130.0)
        course.load(group, "latest", readers=1)
        course.oracle.look()  # A checkpoint that the load completed may be removed by a policy soon.
        cluster.protect()
        for node in cluster.nodes if course.wiped else ():  # Lost disks never answer.
            cluster.repair(node.index, lost=sorted(course.wiped & list_known_nodes(LocalStore(node.root))))
        if course.policy.object_store is not None:  # The other nodes do not know yet what the last node has brought.
            cluster.is_bucket_down = False
            cluster.name_bucket(course.policy.object_store)
            cluster.pass_time(60)
            cluster.protect()  # Then the nodes remove, one after the other, what they kept for that.
        cluster.wait(AWAY_AFTER_S + 100)  # Nodes that left and were then lost no longer count.
        said = cluster.protect()
        course.oracle.look()
        course.say(f"in the end: {said}")
        for checkpoint_id in course.oracle.ids():
            if course.oracle.must_load(checkpoint_id):
                course.counts["held"] += 1
                self._check_id(group, checkpoint_id)
            else:
                course.counts["lost"] += 1
        self._check_latest(group, nodes=None)
        self._check_done(is_done=all(found.is_complete for found in said))
        if course.policy.object_store is not None:
            self._check_bucket()

    def _check_bucket(self) -> None:
        """Checks that all acknowledged saves are in the bucket, and load from it when every node is lost.

        Exception: a save whose name another run's unseen save has in the bucket. No upload overwrites that.
        """
        course = self.course
        course.cluster.pass_time(300)
        course.oracle.look()
        ids, taken = [found for found in course.oracle.ids() if course.oracle.must_load(found)], set[str]()
        for checkpoint_id in ids:
            surviving = course.oracle.surviving(checkpoint_id)
            if not any(attempt.is_in_bucket for attempt in surviving):
                if not self._is_anothers(checkpoint_id, surviving):
                    raise Violation(f"{checkpoint_id} is not in the bucket: {surviving}")
                taken.add(checkpoint_id)
        for node in course.cluster.nodes:
            node.wipe()
        for checkpoint_id in ids:
            if checkpoint_id in taken:
                continue
            self._check_id([0, 1], checkpoint_id, with_bucket=True)

    def _is_anothers(self, checkpoint_id: str, surviving: Sequence[Attempt]) -> bool:
        lineages = {attempt.lineage for attempt in surviving}
        others = (attempt for attempt in self.course.oracle.of_id(checkpoint_id) if attempt.lineage not in lineages)
        return any(attempt.is_in_bucket for attempt in others)

    def _check_done(self, *, is_done: bool) -> None:
        """Checks that the reports of agents and of the command line are true, and that no work is left."""
        course = self.course
        audits = {node.index: Auditor(LocalStore(node.root)).audit() for node in course.cluster.nodes}
        codes = {index: exit_code(audit) for index, audit in audits.items()}
        course.say(f"verify: {codes}")
        current = [attempt for attempt in course.oracle.attempts if not course.oracle.is_superseded(attempt)]
        published = [attempt for attempt in current if attempt.readable_on]
        unread = [
            attempt for attempt in current if attempt.parts and not attempt.readable_on and self._is_left(attempt)
        ]
        gone = {ExitCode.UNREACHABLE} if course.wiped else set()  # The former disk of that node never answers.
        is_mended = all(attempt.has_all_parts() for attempt in (*published, *unread))
        if any(found.was_removed and not found.has_all_parts() for found in course.oracle.attempts):
            gone.add(ExitCode.SHARD_LOST)  # removed from some nodes; the others lacked a part
        if is_done and not set(codes.values()) <= {ExitCode.OK} | gone:
            found = {str(finding) for audit in audits.values() for finding in (*audit.findings, *audit.plan.short)}
            raise Violation(f"re-protection says that all is done, and verify says {codes}: {sorted(found)}")
        left = course.oracle.find_removed_by_operators()
        for attempt in published if is_done else ():
            if self._is_retired_elsewhere(attempt):
                continue
            if self._is_kept_for_loads(attempt) or attempt.checkpoint_id in left:
                continue
            course.oracle.check_copies(attempt, len(course.cluster.nodes))
        if is_done:
            course.oracle.check_files({each.number for each in course.oracle.attempts if self._is_kept_for_loads(each)})
        course.oracle.check_stays_removed()
        if not is_done and is_mended:
            self._check_conflicting_runs(audits)
        self._check_nothing_left(current, is_done=is_done, is_mended=is_mended)

    def _check_nothing_left(self, current: Sequence[Attempt], *, is_done: bool, is_mended: bool) -> None:
        oracle = self.course.oracle
        copied = self._find_published(is_done=is_done)
        unnamed = {found.save_id for found in oracle.attempts if found.readable_on and not self._is_left(found)}
        named = (
            []
            if is_done
            else [found for found in oracle.attempts if found.readable_on and oracle.has_conflicting_run(found)]
        )
        lost_ids = {found.checkpoint_id for found in (*current, *named) if found.parts and not found.has_all_parts()}
        lost_ids |= oracle.find_removed_by_operators()
        lost = {found.save_id for found in oracle.attempts if found.checkpoint_id in lost_ids}
        unidentified = set() if is_done else oracle.unidentified_manifests()
        aliases = (
            oracle.alias_ids()
        )  # A copy under another name includes the versions that the original had replaced. They stay.
        can_tell = is_done or not oracle.has_nameless()  # Otherwise the staged save cannot be identified.
        is_known = is_mended and not oracle.forgotten_ids()  # Otherwise the version that it replaces waits, too.
        for node in self.course.cluster.nodes:
            waits = lost | {one.save_id for one in named if (node.root / one.checkpoint_id).is_dir()}
            left = [path for name in PASSING for path in node.root.glob(f"[!.]*/{name}")]
            left += _staged_in(node.root, waits) if can_tell else []
            replaced = _replaced_in(node.root, copied | waits | unnamed, unidentified) if is_known else []
            left += [path for path in replaced if path.parent.name not in aliases]
            left += self._list_strays(node.index) if is_done else []
            if left:
                raise Violation(f"left on node {node.index}: {sorted(map(str, left))}")

    def _list_strays(self, node: int) -> list[Path]:
        """Files on this node that lie next to a version and belong to none."""
        found = [
            version for version in self.course.disks.find_versions() if version.node == node and version.is_published
        ]
        named = {version.place for version in found if version.is_named and version.manifest is not None}
        strays = [version for version in found if version.place in named and not version.save_id]
        ids = {version.save_id for version in found}
        kept = [path for place in named for path in place.glob(f"{METADATA}.*") if path.name.split(".")[2] not in ids]
        kept = [] if self.course.oracle.has_lost_manifests else kept  # Nothing identifies its owner.
        return [*kept, *(path for version in strays for path in version.paths.values())]

    def _is_retired_elsewhere(self, attempt: Attempt) -> bool:
        """Whether a part of a retired save stays on nodes whose ranks have named no policy: of stock torch, or restored
        from a backup.
        """
        if attempt.is_stock:
            return self.course.policy.keep_last is not None
        if self.course.oracle.is_kept(attempt.checkpoint_id):
            return False
        books = [PolicyBook(self.course.cluster.nodes[node].root / AGENT_DIR) for node in attempt.readable_on]
        return not any(book.read_all() for book in books)

    def _is_kept_for_loads(self, attempt: Attempt) -> bool:
        """Whether a retired or replaced save is kept only for a recent load. Real schedules do not wait until that
        ends, and no copies are made of such a save.
        """
        stores = [LocalStore(node.root) for node in self.course.cluster.nodes]
        replaced = [store.root / attempt.checkpoint_id / replaced_name(attempt.save_id) for store in stores]
        aside = [path for path in replaced if path.exists()]
        has_name = any(store.catalog.save_id_of(attempt.checkpoint_id) == attempt.save_id for store in stores)
        if aside and not has_name and self.course.oracle.is_replaced(attempt):
            return all(map(is_read, aside))
        named = [store for store in stores if (store.root / attempt.checkpoint_id).is_dir()]
        return not self.course.oracle.is_kept(attempt.checkpoint_id) and all(
            any(map(is_read, self._versions_in(store, attempt.checkpoint_id))) for store in named
        )

    def _versions_in(self, store: LocalStore, checkpoint_id: str) -> list[Path]:
        """Manifests of the version with the name, and of replaced versions, which stay while a load reads them."""
        place = store.root / checkpoint_id
        return [place / MANIFEST_NAME, *place.glob(f"{REPLACED}*.json")]

    def _is_left(self, attempt: Attempt) -> bool:
        """Whether anything lies under its name, including files whose manifest is bad on every node."""
        return any((node.root / attempt.checkpoint_id).is_dir() for node in self.course.cluster.nodes)

    def _find_published(self, *, is_done: bool) -> set[str]:
        """The saves that are published on some node. Their replaced versions may stay on other nodes.

        A save that waits for a bucket keeps all its copies. While the cluster waits for an operator, retention may have
        made a replaced version of a node the newest.
        """
        if is_done and self.course.policy.object_store is None:
            return set()
        catalogs = [LocalStore(node.root).catalog for node in self.course.cluster.nodes]
        return {manifest.save_id for catalog in catalogs for _, manifest in catalog.committed()}

    def _is_blocked_by_reader(self, action: Action) -> bool:
        """Whether a version that a load reads has a file of the same name. The node then gets no manifest for at most
        PIN_S.
        """
        if not isinstance(action, RestoreManifest):
            return False
        stores = [LocalStore(node.root) for node in self.course.cluster.nodes]
        (there,) = (store for store in stores if store.node_id() == action.node_id)
        manifests = [manifest for store in stores for _, manifest in store.catalog.committed()]
        shards = {name for manifest in manifests if manifest.save_id == action.save_id for name in manifest.shards}
        read = [manifest for _, manifest in there.catalog.read_replaced() if not shards.isdisjoint(manifest.shards)]
        place = there.root / action.checkpoint_id
        return any(is_read(place / replaced_name(manifest.save_id)) for manifest in read)

    def _check_conflicting_runs(self, audits: Mapping[int, Audit]) -> None:
        """Checks that only two saves under one name keep re-protection from ending, and that `verify` reports them.

        They belong to two runs, or the run and the time of the older one cannot be determined any more.
        """
        conflicting_runs = self.course.oracle.conflicting_ids() | self.course.oracle.forgotten_ids()
        conflicting_runs |= self.course.oracle.find_removed_by_operators() | self.course.oracle.alias_ids()
        short = {short.checkpoint_id for audit in audits.values() for short in audit.plan.short}
        planned = {action for audit in audits.values() for action in audit.plan.actions}
        blocked = {action for action in planned if self._is_blocked_by_reader(action)}
        is_busy = bool(planned - blocked)
        if blocked and not is_busy and not short:
            return
        if is_busy or not short or not short <= conflicting_runs:
            raise Violation(
                f"nothing is damaged beyond repair, and re-protection is not done: {sorted(short - conflicting_runs)}"
            )
        self.course.counts["conflicting_runs"] += 1


def _staged_in(root: Path, waits: Collection[str]) -> list[Path]:
    """Staged saves on this node. A decided save `waits` if the schedule destroyed the last copy of a part of it or of
    its replacement, or if another run's save has its name. An operator can resolve both.
    """
    return [path for path in (root / STAGING).glob("*") if path.name.partition(".")[0] not in waits]


def _replaced_in(root: Path, stays: Collection[str], unidentified: Collection[Path]) -> list[Path]:
    """Manifests of replaced versions on this node, except those that an agent keeps for minutes for a load. Real
    schedules do not wait for those to end.

    A version `stays` if another node has it under its name, if a part of its replacement is lost, or if an operator
    removed the replacement on every node. An `unidentified` version, whose manifest is unreadable, stays until all is done.
    """
    found = [path for path in root.glob(f"[!.]*/{REPLACED}*.json") if path not in unidentified and not is_read(path)]
    return [path for path in found if path.name.removeprefix(REPLACED).partition(".")[0] not in stays]
