"""`replicated-ckpt drill`: several nodes on this machine, broken on purpose. Imports no torch; the ranks do."""

import argparse
import json
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import NoReturn

from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.drill.drill import Drill, drill_directory
from replicated_ckpt.drill.plan import WIDTH_BY_MODEL_SIZE, DrillOptions, Scenario, plan_drill
from replicated_ckpt.drill.table import as_json, render

HELP = "kill nodes with their disks on this machine, resume from what survived, and check every tensor"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `drill`."""
    defaults = DrillOptions()
    add = parser.add_argument
    add(
        "--scenario",
        choices=[*(scenario.value for scenario in Scenario), "all"],
        default="all",
        help="what happens to the nodes (default: all, in turn)",
    )
    add("--nodes", type=int, default=defaults.nodes, help="nodes to simulate (default: %(default)s)")
    add("--ranks-per-node", type=int, default=defaults.ranks_per_node, help="ranks on each (default: %(default)s)")
    add(
        "--victim",
        type=int,
        metavar="NODE",
        help="which node dies; coordinator and beyond choose their own (default: the last)",
    )
    add("--copies", type=int, default=defaults.copies, help="copies of every shard (default: %(default)s)")
    add("--steps", type=int, default=defaults.steps, help="training steps, two saves among them (default: %(default)s)")
    add("--model-size", choices=list(WIDTH_BY_MODEL_SIZE), default=defaults.model_size, help="default: %(default)s")
    add("--data", type=Path, metavar="DIR", help="folder with FashionMNIST (default: Debian's package, else download)")
    add(
        "--workdir", type=Path, metavar="DIR", help="new or empty folder for stores and logs (default: a temporary one)"
    )
    add("--keep", action="store_true", help="keep the work directory, to look at the stores afterwards")
    add("--json", action="store_true", help="print the result as JSON instead of as a table")


def run(args: argparse.Namespace) -> int:
    """Carry out the drill. The exit code is OK only if every scenario held.

    Raises: ConfigInvalid for options that contradict each other, DrillError when the drill itself cannot go on, and
    KeyboardInterrupt on SIGINT and SIGTERM; no process and, without --keep, no file is left in any case.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    started = time.monotonic()

    def progress(line: str) -> None:
        print(f"[{time.monotonic() - started:6.1f} s] {line}", file=sys.stderr, flush=True)

    plan = plan_drill(_options(args))
    with drill_directory(args.workdir, keep=args.keep) as workdir:
        result = Drill(plan, workdir, data=args.data, progress=progress).run()
        if args.keep:
            progress(f"kept: {workdir}")
    seconds = time.monotonic() - started
    if args.json:
        print(json.dumps(as_json(plan, result.reports, data=result.data, seconds=seconds), indent=2))
    else:
        notes = (f"Trained on {result.data}. {seconds:.0f} s in all.",)
        print("\n" + render(result.reports, notes))
    return ExitCode.OK if all(report.held for report in result.reports) else ExitCode.FAILED


def _options(args: argparse.Namespace) -> DrillOptions:
    return DrillOptions(
        scenarios=tuple(Scenario) if args.scenario == "all" else (Scenario(args.scenario),),
        nodes=args.nodes,
        ranks_per_node=args.ranks_per_node,
        victim=args.victim,
        copies=args.copies,
        steps=args.steps,
        model_size=args.model_size,
    )


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
