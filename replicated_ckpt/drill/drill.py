"""Carries out a drill plan: trains, kills the nodes, resumes, and judges the result."""

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from replicated_ckpt.drill.cluster import Cluster
from replicated_ckpt.drill.evidence import Evidence, JobSpec
from replicated_ckpt.drill.object_store import ObjectStore, Progress
from replicated_ckpt.drill.plan import (
    UPLOAD_LIMIT_S,
    WIDTH_BY_MODEL_SIZE,
    DrillError,
    DrillPlan,
    Promise,
    ResumePlan,
    RunPlan,
    checkpoint_id,
)
from replicated_ckpt.drill.verdict import ScenarioReport, judge, report_failure
from replicated_ckpt.errors import ConfigInvalid

DATASET_LIMIT_S = 180.0
DETECT_LIMIT_S = 60.0
END_LIMIT_S = 60.0
JOB_LIMIT_S = 120.0
STEP_LIMIT_S = 5.0
AGENT_DIR = ".agent"


@dataclass(frozen=True, slots=True)
class DrillResult:
    """One report per scenario, in the order of the plan's runs, and the source of the training data."""

    reports: tuple[ScenarioReport, ...]
    data: str | None


@dataclass(frozen=True, slots=True)
class _Dataset:
    path: Path
    source: str
    gpus: int


@dataclass(frozen=True, slots=True)
class _Loss:
    """A run after its loss: the ranks' reports from before it, and the time until the surviving ranks had ended."""

    before: Evidence
    detect_s: float | None


class Drill:
    """One drill in one work directory. `run` ends every process that it started. The caller removes the directory."""

    def __init__(
        self,
        plan: DrillPlan,
        workdir: Path,
        *,
        object_store: ObjectStore | None,
        data: Path | None,
        progress: Progress,
    ) -> None:
        self._plan = plan
        self._workdir = workdir
        self._object_store = object_store
        self._data = data
        self._progress = progress
        self._cluster = Cluster(workdir)

    def run(self) -> DrillResult:
        """Carries out every run of the plan. A run or scenario that fails becomes a report that did not hold."""
        reports: list[ScenarioReport] = []
        try:
            dataset = self._prepare()
            for run in self._plan.runs:
                reports += self._reports(run, dataset)
        finally:
            self._cluster.end()
        return DrillResult(tuple(reports), dataset.source)

    def _prepare(self) -> _Dataset:
        out = self._workdir / "data"
        given = () if self._data is None else ("--data", str(self._data.resolve()))
        command = (sys.executable, "-m", "replicated_ckpt.drill.job.dataset", "--out", str(out), *given)
        self._cluster.run_alone("dataset", command, DATASET_LIMIT_S)
        about = json.loads((out / "about.json").read_text())
        self._progress(f"data: {about['source']}")
        return _Dataset(out / "images.pt", about["source"], about["gpus"])

    def _reports(self, run: RunPlan, dataset: _Dataset) -> Iterator[ScenarioReport]:
        try:
            loss = self._lose(run, dataset)
        except DrillError as exc:
            self._progress(f"{run.name}: failed\n{exc}")
            # Hung processes of this run would disturb the next one.
            self._cluster.end()
            # Every scenario of the run gets its line: without one it would look as if it had not been requested.
            yield from (report_failure(run, resume, _headline(exc)) for resume in run.resumes)
            return
        for resume in run.resumes:
            try:
                report = self._resume(run, resume, loss, dataset)
            except DrillError as exc:
                self._progress(f"{resume.scenario}: failed\n{exc}")
                self._cluster.end()
                report = report_failure(run, resume, _headline(exc))
            if not self._cluster.stop_agents():
                self._progress(f"{resume.scenario}: an agent ignored SIGTERM and was killed")
            self._progress(f"{resume.scenario}: {'held' if report.held else 'FAILED'}")
            yield report

    def _lose(self, run: RunPlan, dataset: _Dataset) -> _Loss:
        """Trains and saves on all nodes, then kills the plan's nodes and deletes their stores while the others train on."""
        stores = [self._workdir / run.name / f"node-{node}" for node in range(run.nodes)]
        self._progress(f"{run.name}: {run.nodes} nodes x {run.ranks_per_node} ranks train and save")
        spec = self._spec(run, dataset, loads=(), save_steps=self._plan.schedule.save_steps, trains_on=True)
        job = self._cluster.start(run.name, spec, stores, ranks_per_node=run.ranks_per_node)
        before = job.wait_until_reported(self._limit_s(run))
        dead = [stores[node] for node in run.dies]
        self._progress(f"{run.name}: SIGKILL to {_names(dead)}, agents included; their stores are deleted")
        killed = time.monotonic()
        self._cluster.kill_nodes(dead)
        # No rank survives that could notice the loss.
        if run.is_total:
            self._progress(f"{run.name}: no node, no process and no store is left")
            return _Loss(before, detect_s=None)
        # Only the survivors: the torchruns of the dead nodes were killed.
        job.wait_until_ended(DETECT_LIMIT_S, except_on=dead)
        detect_s = time.monotonic() - killed
        self._progress(f"{run.name}: {_names([stores[node] for node in run.survivors])} noticed after {detect_s:.1f} s")
        # Before the first resume, which changes the survivors' stores.
        for resume in run.resumes[1:]:
            self._copy_survivors(run, resume)
        return _Loss(before, detect_s)

    def _resume(self, run: RunPlan, resume: ResumePlan, loss: _Loss, dataset: _Dataset) -> ScenarioReport:
        self._progress(f"{resume.scenario}: {run.ranks} -> {resume.ranks} ranks resume on {_describe_seats(resume)}")
        loads: tuple[str, ...] = ("latest",)
        if resume.promise is Promise.SHARD_LOST:
            # A load by name must raise ShardLost, and "latest" must find no complete checkpoint.
            loads = (checkpoint_id(self._plan.schedule.last_save_step), "latest")
        spec = self._spec(run, dataset, resume=resume, loads=loads, save_steps=(), trains_on=False)
        folder = self._folder(run, resume)
        stores = [folder / f"node-{seat.node}" for seat in resume.seats]
        job = self._cluster.start(resume.scenario, spec, stores, ranks_per_node=resume.ranks_per_node)
        after = job.wait_until_reported(self._limit_s(run))
        job.wait_until_ended(END_LIMIT_S)
        return judge(self._plan, run, resume, before=loss.before, after=after, detect_s=loss.detect_s)

    def _folder(self, run: RunPlan, resume: ResumePlan) -> Path:
        """The first resume uses the survivors' own stores, where their agents still run. The other resumes use copies."""
        is_first = resume is run.resumes[0]
        return self._workdir / (run.name if is_first else f"{run.name}-{resume.scenario}")

    def _copy_survivors(self, run: RunPlan, resume: ResumePlan) -> None:
        for node in run.survivors:
            source = self._workdir / run.name / f"node-{node}"
            target = self._folder(run, resume) / source.name
            # Without `.agent`, which belongs to the running agent of the original store.
            shutil.copytree(source, target, ignore=shutil.ignore_patterns(AGENT_DIR))

    def _spec(
        self,
        run: RunPlan,
        dataset: _Dataset,
        *,
        resume: ResumePlan | None = None,
        loads: tuple[str, ...],
        save_steps: tuple[int, ...],
        trains_on: bool,
    ) -> JobSpec:
        options = self._plan.options
        # In other runs, the bytes must come from peers.
        bucket = self._object_store if run.is_total else None
        name = run.name if resume is None else f"{run.name}-{resume.scenario}"
        return JobSpec(
            results=str(self._workdir / "results" / name),
            data=str(dataset.path),
            # NCCL allows one rank per GPU. All worlds use the same device, so that losses can be compared.
            device="cuda" if dataset.gpus >= self._plan.ranks_max else "cpu",
            width=WIDTH_BY_MODEL_SIZE[options.model_size],
            seed=options.seed,
            global_batch=self._plan.global_batch,
            copies=options.copies,
            loads=loads,
            save_steps=save_steps,
            end_step=self._plan.schedule.end_step,
            trains_on=trains_on,
            limit_s=self._limit_s(run) + DETECT_LIMIT_S + END_LIMIT_S,
            object_store=bucket.url if bucket else None,
            storage_options=bucket.storage_options if bucket else None,
        )

    def _limit_s(self, run: RunPlan) -> float:
        upload_s = UPLOAD_LIMIT_S if run.is_total else 0.0
        return JOB_LIMIT_S + STEP_LIMIT_S * self._plan.schedule.end_step + upload_s


@contextmanager
def drill_directory(given: Path | None, *, keep: bool) -> Iterator[Path]:
    """An empty work directory, `given` or a temporary one, which is removed at the end unless `keep`.

    Raises:
        ConfigInvalid: `given` is not empty, and the drill deletes only its own files; or it cannot be created.
    """
    if given is None:
        workdir = Path(tempfile.mkdtemp(prefix="replicated-ckpt-drill-"))
    else:
        workdir = given.resolve()
        try:
            workdir.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise ConfigInvalid(
                f"--workdir {given} cannot be created: {exc.strerror}.", "Name a folder that you may write."
            ) from exc
        if any(workdir.iterdir()):
            raise ConfigInvalid(
                f"--workdir {given} is not empty.", "Name a new or an empty folder: the drill removes it at the end."
            )
    try:
        yield workdir
    finally:
        if not keep:
            shutil.rmtree(workdir, ignore_errors=True)


def _headline(exc: DrillError) -> str:
    return exc.message.splitlines()[0]


def _names(stores: list[Path]) -> str:
    return " and ".join(store.name for store in stores)


def _describe_seats(resume: ResumePlan) -> str:
    return ", ".join(f"node-{seat.node}{' (blank)' if seat.blank else ''}" for seat in resume.seats)
