"""`replicated-ckpt drill`: several nodes on this machine, broken on purpose. Imports no torch; the ranks do."""

import argparse
import json
import sys
import time
from pathlib import Path

from replicated_ckpt.cli.exit_codes import ExitCode, stop_on_sigterm
from replicated_ckpt.cli.printing import add_output_argument
from replicated_ckpt.drill.drill import Drill, DrillResult, drill_directory
from replicated_ckpt.drill.object_store import has_moto, object_store
from replicated_ckpt.drill.plan import WIDTH_BY_MODEL_SIZE, DrillOptions, DrillPlan, Scenario, plan_drill
from replicated_ckpt.drill.table import as_json, render

HELP = "Kill simulated nodes with their disks on this machine, resume from what survived, and check every tensor."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = DrillOptions()
    add = parser.add_argument
    add(
        "--scenario",
        choices=[*(scenario.value for scenario in Scenario), "all"],
        default="all",
        help="shrink: one node is lost. replace: a lost node returns with an empty disk. coordinator: the same, with rank "
        "0's node. grow: a lost node returns empty, and another node joins. beyond: all holders of a shard are lost. "
        "cluster: all nodes are lost, and only the bucket is left (default: all, in turn)",
    )
    add("--nodes", type=int, default=defaults.nodes, help="nodes to simulate (default: %(default)s)")
    add("--ranks-per-node", type=int, default=defaults.ranks_per_node, help="ranks on each node (default: %(default)s)")
    add(
        "--victim",
        type=int,
        metavar="NODE",
        help="node that dies (default: the last); the scenarios coordinator, beyond and cluster choose their own",
    )
    add("--copies", type=int, default=defaults.copies, help="copies of every shard (default: %(default)s)")
    add("--steps", type=int, default=defaults.steps, help="training steps, with two saves (default: %(default)s)")
    add(
        "--model-size",
        choices=list(WIDTH_BY_MODEL_SIZE),
        default=defaults.model_size,
        help="size of the model that the job trains (default: %(default)s)",
    )
    add(
        "--object-store",
        metavar="URL",
        help="bucket for the scenario cluster, such as s3://bucket/prefix, with credentials from the environment. The "
        "drill makes and removes its own prefix there. 'moto': an S3 server in memory (default: moto if it is "
        "installed, else cluster is skipped)",
    )
    add("--data", type=Path, metavar="DIR", help="folder with FashionMNIST (default: Debian's package, else download)")
    add(
        "--workdir", type=Path, metavar="DIR", help="new or empty folder for stores and logs (default: a temporary one)"
    )
    add(
        "--keep",
        action="store_true",
        help="keep the work directory and the bucket's content",
    )
    add_output_argument(parser)


@stop_on_sigterm()
def run(args: argparse.Namespace) -> int:
    """Runs the drill. The exit code is OK only if every scenario held.

    Afterwards, also after an error, no process is left, and without `--keep` no file.

    Raises:
        ConfigInvalid: options contradict each other. DrillError: the drill itself cannot go on. StoreError: the named
            object store cannot be used. KeyboardInterrupt: SIGINT or SIGTERM.
    """
    started = time.monotonic()

    def progress(line: str) -> None:
        print(f"[{time.monotonic() - started:6.1f} s] {line}", file=sys.stderr, flush=True)

    plan = plan_drill(_options(args), has_moto=has_moto())
    for scenario, reason in plan.skipped.items():
        progress(f"{scenario}: SKIPPED, {reason}")
    with (
        drill_directory(args.workdir, keep=args.keep) as workdir,
        object_store(plan.object_store, workdir, keep=args.keep, progress=progress) as bucket,
    ):
        result = Drill(plan, workdir, object_store=bucket, data=args.data, progress=progress).run()
        if args.keep:
            progress(f"kept: {workdir}")
    about = bucket.about if bucket else None
    _show(plan, result, seconds=time.monotonic() - started, about=about, as_value=args.json)
    return ExitCode.OK if all(report.held for report in result.reports) else ExitCode.FAILED


def _show(plan: DrillPlan, result: DrillResult, *, seconds: float, about: str | None, as_value: bool) -> None:
    if as_value:
        value = as_json(plan, result.reports, data=result.data, seconds=seconds, object_store=about)
        print(json.dumps(value, indent=2))
    else:
        objects = f" Objects in {about}." if about else ""
        notes = (f"Trained on {result.data}.{objects} {seconds:.0f} s in all.",)
        print("\n" + render(result.reports, notes, skipped=plan.skipped))


def _options(args: argparse.Namespace) -> DrillOptions:
    return DrillOptions(
        scenarios=tuple(Scenario) if args.scenario == "all" else (Scenario(args.scenario),),
        nodes=args.nodes,
        ranks_per_node=args.ranks_per_node,
        victim=args.victim,
        copies=args.copies,
        steps=args.steps,
        model_size=args.model_size,
        object_store=args.object_store,
    )
