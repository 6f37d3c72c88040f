"""Decides from the ranks' reports whether a scenario held. Pure: evidence in, report out."""

import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from replicated_ckpt.drill.evidence import Evidence, LoadRecord, SaveRecord
from replicated_ckpt.drill.plan import DrillPlan, Promise, ResumePlan, RunPlan, checkpoint_id
from replicated_ckpt.wording import list_some

LOSS_TOLERANCE = 1e-3  # relative; another number of ranks sums gradients in another order
SHARD_LOST_LIMIT_S = 30.0  # a rank that takes longer to raise counts as hanging
LATEST_REFUSALS = {"ShardLost", "CheckpointNotFound"}  # errors of "latest" if no checkpoint is complete
NAMED_MAX = 3
MESSAGE_CHARACTERS_MAX = 300

RankProblem = tuple[int, str]


@dataclass(frozen=True, slots=True)
class ScenarioReport:
    """One line of the table. The scenario held exactly if `problems` is empty."""

    scenario: str
    promise: str
    ranks_before: int
    ranks_after: int
    shards_lost: int = 0
    shards: int = 0
    bytes_local: int = 0
    bytes_peer: int = 0
    bytes_object: int = 0
    save_s: float | None = None
    detect_s: float | None = None
    restore_s: float | None = None
    wait_s: float | None = None
    tensors_verified: int = 0
    problems: tuple[str, ...] = ()

    @property
    def held(self) -> bool:
        """Whether the scenario met its promise."""
        return not self.problems

    def as_json(self) -> dict[str, Any]:
        """The report as JSON."""
        return asdict(self) | {"held": self.held}


def report_failure(run: RunPlan, resume: ResumePlan, problem: str) -> ScenarioReport:
    """The report of a scenario that the drill could not carry out."""
    return ScenarioReport(resume.scenario, resume.promise, run.ranks, resume.ranks, problems=(problem,))


def judge(
    plan: DrillPlan, run: RunPlan, resume: ResumePlan, *, before: Evidence, after: Evidence, detect_s: float | None
) -> ScenarioReport:
    """Compares the resumed ranks' reports with the save, and with the uninterrupted end of the run."""
    step = plan.schedule.last_save_step
    saves = [(report.rank, save) for report in before.reports for save in report.saves if save.step == step]
    owned = [(rank, shard) for rank, save in saves for shard in save.shards]
    lost = tuple(sorted(shard for rank, shard in owned if run.is_rank_lost(rank)))
    if resume.promise is Promise.SHARD_LOST:
        findings, verified = _shard_lost_problems(resume, after, lost), 0
    else:
        findings, verified = _carried_on_problems(plan, resume, before, after), _equal_tensors(before, after, step)
    if run.is_total:
        findings = (*_by_problem(_upload_problems(plan, before)), *_by_problem(_origin_problems(after)), *findings)
    loads = [report.loads[0] for report in after.reports if report.loads]
    return ScenarioReport(
        scenario=resume.scenario,
        promise=resume.promise,
        ranks_before=run.ranks,
        ranks_after=resume.ranks,
        shards_lost=len(lost),
        shards=len(owned),
        bytes_local=sum(load.bytes_local for load in loads),
        bytes_peer=sum(load.bytes_peer for load in loads),
        bytes_object=sum(load.bytes_object for load in loads),
        save_s=max((save.seconds for _, save in saves), default=None),
        detect_s=detect_s,
        restore_s=max((load.seconds for load in loads), default=None),
        wait_s=max((report.wait.seconds for report in before.reports if report.wait), default=None),
        tensors_verified=verified,
        problems=(*_save_problems(plan, run, saves), *findings),
    )


def _save_problems(plan: DrillPlan, run: RunPlan, saves: list[tuple[int, SaveRecord]]) -> Iterator[str]:
    wanted = plan.options.copies
    if len(saves) != run.ranks:
        yield f"{len(saves)} of {run.ranks} ranks reported the last save"
    yield from _by_problem(
        (rank, f"the save made {save.copies_made} of {wanted} copies")
        for rank, save in saves
        if save.copies_made != wanted
    )


def _upload_problems(plan: DrillPlan, before: Evidence) -> Iterator[RankProblem]:
    """Checkpoints that `wait` did not return before the nodes died."""
    wanted = [checkpoint_id(step) for step in plan.schedule.save_steps]
    for report in before.reports:
        if missing := [name for name in wanted if report.wait is None or name not in report.wait.checkpoint_ids]:
            yield report.rank, f"wait() did not return {list_some(missing, NAMED_MAX)} as uploaded"


def _origin_problems(after: Evidence) -> Iterator[RankProblem]:
    """Loads with bytes of a node, although all nodes were killed."""
    for report in after.reports:
        for load in report.loads:
            is_fetched = load.bytes_object or load.bytes_shared  # by this rank, or by another rank of its node
            if load.raised is None and (load.bytes_local or load.bytes_peer or not is_fetched):
                found = f"{load.bytes_local} bytes from its own store, {load.bytes_peer} from peers"
                yield report.rank, f"loaded {found} and {load.bytes_object} from the object store, the only one left"


def _carried_on_problems(plan: DrillPlan, resume: ResumePlan, before: Evidence, after: Evidence) -> tuple[str, ...]:
    step = plan.schedule.last_save_step
    if load_problems := (*_missing(resume, after), *_by_problem(_load_problems(after, step))):
        return load_problems  # other problems would only be their consequences
    name = checkpoint_id(step)
    problems = [*_digest_problems("as saved", before.digests.get(f"saved-{name}"), after.digests.get(f"loaded-{name}"))]
    if resume.promise is Promise.SAME_BITS:
        problems += _digest_problems("as never interrupted", before.digests.get("end"), after.digests.get("end"))
    problems += _by_problem(_loss_problems(plan, resume, before, after))
    return tuple(problems)


def _missing(resume: ResumePlan, after: Evidence) -> Iterator[str]:
    if len(after.reports) != resume.ranks:
        yield f"{len(after.reports)} of {resume.ranks} ranks reported"


def _by_problem(problems: Iterable[RankProblem]) -> Iterator[str]:
    """Each problem once, with all its ranks."""
    ranks_by_problem: dict[str, list[int]] = {}
    for rank, problem in problems:
        ranks_by_problem.setdefault(problem, []).append(rank)
    for problem, ranks in ranks_by_problem.items():
        yield f"rank {', '.join(map(str, ranks))}: {problem}"


def _load_problems(after: Evidence, step: int) -> Iterator[RankProblem]:
    for report in after.reports:
        for load in report.loads:
            if load.raised is not None:
                yield report.rank, f"could not load: {_first_failure(load)}"
            elif (load.checkpoint_id, load.step) != (checkpoint_id(step), step):
                yield report.rank, f"loaded {load.checkpoint_id} (step {load.step}), not {checkpoint_id(step)}"
            elif load.bad_copies:
                yield report.rank, f"met bad copies: {list_some(load.bad_copies, NAMED_MAX)}"
        if not report.loads:
            yield report.rank, "loaded nothing"


def _first_failure(load: LoadRecord) -> str:
    message = next((f"{failure.type_name}: {failure.message}" for failure in load.failures), str(load.raised))
    return textwrap.shorten(message, MESSAGE_CHARACTERS_MAX, placeholder=" ...")


def _digest_problems(moment: str, wanted: Mapping[str, str] | None, found: Mapping[str, str] | None) -> Iterator[str]:
    if not wanted or not found:
        yield f"not {moment}: no digests to compare"
        return
    if missing := sorted(wanted.keys() ^ found.keys()):
        yield f"not {moment}: only on one side: {list_some(missing, NAMED_MAX)}"
    if different := sorted(fqn for fqn in wanted.keys() & found.keys() if wanted[fqn] != found[fqn]):
        yield f"not {moment}: {len(different)} tensors differ: {list_some(different, NAMED_MAX)}"


def _equal_tensors(before: Evidence, after: Evidence, step: int) -> int:
    name = checkpoint_id(step)
    saved, loaded = before.digests.get(f"saved-{name}", {}), after.digests.get(f"loaded-{name}", {})
    return sum(1 for fqn, digest in saved.items() if loaded.get(fqn) == digest)


def _loss_problems(plan: DrillPlan, resume: ResumePlan, before: Evidence, after: Evidence) -> Iterator[RankProblem]:
    # The same number of ranks sums in the same order: any difference means a wrong byte.
    tolerance = 0.0 if resume.promise is Promise.SAME_BITS else LOSS_TOLERANCE
    wanted = before.reports[0].loss_by_step
    for report in after.reports:
        for step in range(plan.schedule.last_save_step + 1, plan.schedule.end_step + 1):
            loss, reference = report.loss_by_step.get(step, math.nan), wanted.get(step, math.nan)
            if not abs(loss - reference) <= tolerance * abs(reference):  # not `>`: NaN must be a problem, too
                yield report.rank, f"loss at step {step} is {loss!r}, it was {reference!r}"
                break


def _shard_lost_problems(resume: ResumePlan, after: Evidence, lost: tuple[str, ...]) -> tuple[str, ...]:
    problems: list[RankProblem] = []
    for report in after.reports:
        if len(report.loads) == 2:
            problems += [(report.rank, problem) for problem in _refusal_problems(*report.loads, lost)]
        else:
            problems.append((report.rank, f"tried {len(report.loads)} of 2 loads"))
    return (*_missing(resume, after), *_by_problem(problems))


def _refusal_problems(named: LoadRecord, latest: LoadRecord, lost: tuple[str, ...]) -> Iterator[str]:
    refusals = [failure for failure in named.failures if failure.type_name == "ShardLost"]
    # Each rank names the shards that it needs: together they must name all lost ones.
    unnamed = set(lost).difference(*(failure.shards for failure in refusals))
    if named.raised != "CheckpointException":
        yield f"loading {named.requested} raised {named.raised}, not CheckpointException"
    elif not refusals:
        yield f"loading {named.requested} failed without ShardLost: {_first_failure(named)}"
    elif unnamed:
        yield f"ShardLost does not name {list_some(sorted(unnamed), NAMED_MAX)}"
    # For a waiting job, an error after minutes is a hang.
    if named.seconds > SHARD_LOST_LIMIT_S:
        yield f"loading {named.requested} failed only after {named.seconds:.0f} s"
    if not LATEST_REFUSALS.intersection({latest.raised, *(failure.type_name for failure in latest.failures)}):
        yield f"loading {latest.requested} was not refused: {_first_failure(latest)}"
