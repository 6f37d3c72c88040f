"""The plan of a drill: its runs, losses and promises, made before anything starts. Pure: no I/O, clock or process."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from replicated_ckpt.core.protocol.placement import PlacedNode, place_copies
from replicated_ckpt.errors import ConfigInvalid, ReplicatedCkptError

GLOBAL_BATCH_MIN = 48
STEPS_MIN = 3
MOTO = "moto"
"""The value of --object-store for the drill's own S3 server, in memory."""
NO_MOTO = "moto is not installed (pip install 'moto[server]'), and no --object-store is named"
UPLOAD_LIMIT_S = 120.0
"""Time-out of a rank's wait for its uploads."""
WIDTH_BY_MODEL_SIZE = {"small": 8, "medium": 32, "large": 96}


class Scenario(StrEnum):
    """A loss between the last save and the resume, and the nodes that resume."""

    SHRINK = "shrink"
    REPLACE = "replace"
    COORDINATOR = "coordinator"
    GROW = "grow"
    BEYOND = "beyond"
    CLUSTER = "cluster"


class Promise(StrEnum):
    """The condition that a resume must meet."""

    SAME_BITS = "same bits"
    SAME_LOSS = "same loss"
    SHARD_LOST = "shard lost"


@dataclass(frozen=True, slots=True)
class DrillOptions:
    """The user's options. `plan_drill` checks them.

    `victim` is the node that dies; None: the last one. `object_store` is a URL or MOTO; None: MOTO, if it is installed.
    """

    scenarios: tuple[Scenario, ...] = tuple(Scenario)
    nodes: int = 2
    ranks_per_node: int = 4
    victim: int | None = None
    copies: int = 2
    steps: int = 12
    model_size: str = "small"
    object_store: str | None = None
    seed: int = 7


@dataclass(frozen=True, slots=True)
class Schedule:
    """Steps of the saves, in ascending order, and the run's last step. Invariant: every save is before `end_step`."""

    save_steps: tuple[int, ...]
    end_step: int

    @property
    def last_save_step(self) -> int:
        """The step at which a resume must continue."""
        return self.save_steps[-1]


@dataclass(frozen=True, slots=True)
class Seat:
    """One node of a resumed job: the number of its store, and whether that store is empty."""

    node: int
    blank: bool


@dataclass(frozen=True, slots=True)
class ResumePlan:
    """One scenario: the nodes that take part after the loss, and the promise."""

    scenario: Scenario
    promise: Promise
    seats: tuple[Seat, ...]
    ranks_per_node: int

    @property
    def ranks(self) -> int:
        """World size after the loss."""
        return len(self.seats) * self.ranks_per_node


@dataclass(frozen=True, slots=True)
class RunPlan:
    """One job that trains, saves and then loses the nodes `dies`. Each resume starts from the stores of the survivors."""

    name: str
    nodes: int
    ranks_per_node: int
    dies: tuple[int, ...]
    resumes: tuple[ResumePlan, ...]

    @property
    def ranks(self) -> int:
        """World size before the loss."""
        return self.nodes * self.ranks_per_node

    @property
    def is_total(self) -> bool:
        """Whether every node dies, so that only the object store is left. Only such a run saves to it."""
        return not self.survivors

    @property
    def survivors(self) -> tuple[int, ...]:
        """Nodes that keep their store, in rank order."""
        return tuple(node for node in range(self.nodes) if node not in self.dies)

    def is_rank_lost(self, rank: int) -> bool:
        """Whether this rank's node dies."""
        return rank // self.ranks_per_node in self.dies


@dataclass(frozen=True, slots=True)
class DrillPlan:
    """All runs of one drill. Every world size in it divides `global_batch` evenly, so that losses can be compared."""

    options: DrillOptions
    schedule: Schedule
    global_batch: int
    runs: tuple[RunPlan, ...]
    object_store: str | None = None
    """A URL or MOTO; None exactly if no run is total."""
    skipped: Mapping[Scenario, str] = field(default_factory=dict)
    """Requested scenarios that cannot run here, with the reason."""

    @property
    def ranks_max(self) -> int:
        """The largest world that the plan starts."""
        return max(_worlds(self.runs))


def checkpoint_id(step: int) -> str:
    """Name of the checkpoint saved after `step` steps."""
    return f"step-{step}"


def plan_drill(options: DrillOptions, *, has_moto: bool = True) -> DrillPlan:
    """Plans one run for all scenarios with the same loss.

    `has_moto`: whether moto is installed. Without it, `cluster` is skipped unless the options name an object store.

    Raises:
        ConfigInvalid: the options contradict each other, or no scenario can run.
    """
    _check(options)
    _check_object_store(options, has_moto=has_moto)
    skips = Scenario.CLUSTER in options.scenarios and options.object_store is None and not has_moto
    skipped = {Scenario.CLUSTER: NO_MOTO} if skips else {}
    victim = options.nodes - 1 if options.victim is None else options.victim
    # One run for all scenarios with the same loss: each run costs a training.
    losses: dict[tuple[int, int, tuple[int, ...]], list[ResumePlan]] = {}
    for scenario in dict.fromkeys(options.scenarios):
        if scenario in skipped:
            continue
        nodes, ranks_per_node, dies = _loss(scenario, options, victim)
        resume = _resume(scenario, nodes, ranks_per_node, dies)
        losses.setdefault((nodes, ranks_per_node, dies), []).append(resume)
    runs = tuple(
        RunPlan(f"run-{number}", nodes, ranks_per_node, dies, tuple(resumes))
        for number, ((nodes, ranks_per_node, dies), resumes) in enumerate(losses.items(), start=1)
    )
    named = MOTO if options.object_store is None else options.object_store
    object_store = named if any(run.is_total for run in runs) else None
    schedule = Schedule(save_steps=(options.steps // 3, 2 * options.steps // 3), end_step=options.steps)
    return DrillPlan(options, schedule, _global_batch(_worlds(runs)), runs, object_store, skipped)


def _loss(scenario: Scenario, options: DrillOptions, victim: int) -> tuple[int, int, tuple[int, ...]]:
    if scenario is Scenario.COORDINATOR:
        return options.nodes, options.ranks_per_node, (0,)
    if scenario is Scenario.BEYOND:
        # Two placement groups: all nodes of the second die, and the first still has `.metadata`.
        nodes = 2 * options.copies
        groups = place_copies([PlacedNode(str(node)) for node in range(nodes)], options.copies).groups
        return nodes, 1, tuple(sorted(int(node) for node in groups[-1]))
    if scenario is Scenario.CLUSTER:
        return options.nodes, options.ranks_per_node, tuple(range(options.nodes))
    return options.nodes, options.ranks_per_node, (victim,)


def _resume(scenario: Scenario, nodes: int, ranks_per_node: int, dies: tuple[int, ...]) -> ResumePlan:
    survivors = tuple(Seat(node, blank=False) for node in range(nodes) if node not in dies)
    same_world = tuple(Seat(node, blank=node in dies) for node in range(nodes))
    match scenario:
        case Scenario.SHRINK:
            return ResumePlan(scenario, Promise.SAME_LOSS, survivors, ranks_per_node)
        case Scenario.GROW:
            seats = (*same_world, Seat(nodes, blank=True))
            return ResumePlan(scenario, Promise.SAME_LOSS, seats, ranks_per_node)
        case Scenario.BEYOND:
            return ResumePlan(scenario, Promise.SHARD_LOST, survivors, ranks_per_node)
        case Scenario.CLUSTER:
            # Always another number of ranks: half as many on each node, or two instead of one.
            return ResumePlan(scenario, Promise.SAME_LOSS, same_world, ranks_per_node // 2 or 2)
        case Scenario.REPLACE | Scenario.COORDINATOR:
            return ResumePlan(scenario, Promise.SAME_BITS, same_world, ranks_per_node)


def _worlds(runs: Iterable[RunPlan]) -> list[int]:
    return [ranks for run in runs for ranks in (run.ranks, *(resume.ranks for resume in run.resumes))]


def _global_batch(worlds: Iterable[int]) -> int:
    # A multiple of every world size: otherwise worlds train on different batches, and losses cannot be compared.
    unit = math.lcm(*worlds)
    return unit * math.ceil(GLOBAL_BATCH_MIN / unit)


def _check(options: DrillOptions) -> None:
    problems = {
        "--scenario: name at least one": not options.scenarios,
        "--nodes: at least 2, because a copy lies on another node": options.nodes < 2,
        "--ranks-per-node: at least 1": options.ranks_per_node < 1,
        f"--copies: between 2 and the number of nodes ({options.nodes})": not 2 <= options.copies <= options.nodes,
        f"--steps: at least {STEPS_MIN}, for two saves and an end": options.steps < STEPS_MIN,
        f"--victim: a node between 0 and {options.nodes - 1}": not 0 <= (options.victim or 0) < options.nodes,
        f"--model-size: one of {', '.join(WIDTH_BY_MODEL_SIZE)}": options.model_size not in WIDTH_BY_MODEL_SIZE,
    }
    for problem, is_real in problems.items():
        if is_real:
            raise ConfigInvalid(f"{problem}.", "Correct the option; `replicated-ckpt drill --help` has the defaults.")


def _check_object_store(options: DrillOptions, *, has_moto: bool) -> None:
    named, scenarios = options.object_store, set(options.scenarios)
    if named is not None and Scenario.CLUSTER not in scenarios:
        raise ConfigInvalid(
            "--object-store: only the scenario cluster uses a bucket.", "Use --scenario cluster, or all."
        )
    if not has_moto and (named == MOTO or (named is None and scenarios == {Scenario.CLUSTER})):
        raise ConfigInvalid(
            "--object-store moto: moto is not installed.",
            "pip install 'moto[server]', or name a bucket: --object-store s3://bucket/prefix.",
        )


class DrillError(ReplicatedCkptError):
    """A step of the drill failed. The scenarios that need this step did not hold."""

    default_hint = "Run it again with --keep and read the logs in the work directory."

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message, hint)
        self.message = message  # unescaped: it quotes logs of the drill's own processes, with their line breaks


class MotoFailed(DrillError):
    """The embedded object store did not start."""

    default_hint = "Try `pip install 'moto[server]'`, or name a bucket: --object-store s3://bucket/prefix."


class DatasetUnusable(DrillError):
    """The folder of --data has no readable FashionMNIST."""

    default_hint = (
        "Point --data at a folder with FashionMNIST/raw/ or with FashionMNIST's four idx files, gzipped or not."
    )
