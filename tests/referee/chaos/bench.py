"""`python -m tests.referee.chaos.bench`: runs the targets of `ckpt-chaos bench` with our integrations, and prints a
table.
"""

import argparse
import contextlib
import importlib.util
import io
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from ckpt_chaos import runner

from replicated_ckpt.core.layout import MANIFEST_NAME
from tests.harness.zygote import stop_the_zygotes
from tests.referee.chaos.__main__ import ROOT, VERDICTS, end_agent
from tests.referee.chaos.forking import CLIENT, forker

NEEDS = {
    "hf_trainer": "transformers",
    "lightning_trainer": "lightning",
    "accelerate_loop": "accelerate",
    "dcp_ddp": "torch",
    "loop_ddp": "torch",
}
ONE_RANK_ONLY = ("accelerate_loop",)
"""ckpt-chaos' program of it has no ranks."""
_STEP = re.compile(r"(?:checkpoint-|step-|ck-step=)(\d+)(?:\.ckpt)?")


def newest_published(out: Path, healthy: dict[str, int]) -> int:
    """The highest step of a checkpoint whose manifest is on any node. A node publishes the manifest last."""
    del healthy
    published = (path.parent.name for form in ("*", "node-*/*") for path in out.glob(f"{form}/{MANIFEST_NAME}"))
    return max((int(found[1]) for name in published if (found := _STEP.search(name))), default=0)


class _Sample:
    """Replaces ckpt-chaos' function that runs one kill, and runs only every `every`-th. The first is the control."""

    def __init__(self, every: int) -> None:
        self._every, self._run_point = every, runner._run_point

    def __call__(self, how: dict[str, Any], order: int, point: Any) -> object:
        if not how["ref_final"].exists():
            logs = how["ref_final"].parents[1].glob("*.log")
            raise RuntimeError("the run without a kill failed:\n" + "\n".join(log.read_text()[-3000:] for log in logs))
        return self._run_point(how, order, point) if order % self._every == 0 else None


def judge(target: str, ranks: int, folder: Path, jobs: int) -> Counter[str]:
    """The number of runs with each verdict: a kill at each file event of each rank, and a control. Leaves no agent
    behind.

    Raises:
        RuntimeError: a process that ckpt-chaos should kill ended by itself.
    """
    os.environ.update(CHAOS_TARGET=target, OMP_NUM_THREADS="1", REPLICATED_CKPT_AGENT_IDLE_S="2")
    runner.ROOT = ROOT
    runner.TARGETS[target] = CLIENT
    runner.NEWEST[target] = newest_published
    try:
        with (
            forker("tests.referee.chaos.targets", target) as path,
            contextlib.redirect_stdout(io.StringIO()) as printed,
        ):
            os.environ["CHAOS_FORKER"] = path
            rows = runner.run_matrix(folder, jobs, ranks, target)
            runner.print_table(rows)
    finally:
        for root in [*folder.glob("*/out"), *folder.glob("*/out/node-*")]:
            end_agent(root)
    (folder / "report.txt").write_text(printed.getvalue())
    if "[DID NOT CRASH]" in printed.getvalue():
        raise RuntimeError(f"ckpt-chaos has not killed a rank in some runs of {target}:\n{printed.getvalue()}")
    return Counter(row.verdict for row in rows)


def main(words: Sequence[str] | None = None) -> int:
    """Returns 1 if a run did not pass, else 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--targets", default=",".join(NEEDS), help="default: %(default)s")
    parser.add_argument("--ranks", default="1,2", metavar="NUMBERS", help="default: %(default)s")
    parser.add_argument("--every", type=int, default=1, help="only each n-th kill (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="runs at one time (default: %(default)s)")
    parser.add_argument("--work", type=Path, help="keep the runs and their reports here")
    arguments = parser.parse_args(words)
    with (
        tempfile.TemporaryDirectory(prefix="chaos-") as temporary,
        mock.patch.object(runner, "_run_point", _Sample(arguments.every)),
        contextlib.ExitStack() as stack,
    ):
        stack.callback(stop_the_zygotes)
        work, failed = (arguments.work or Path(temporary)).resolve(), False
        print("| target | ranks | runs | " + " | ".join(VERDICTS[:4]) + " |", "|---|---|---|" + "---|" * 4, sep="\n")
        for target in arguments.targets.split(","):
            if importlib.util.find_spec(NEEDS[target]) is None:
                print(f"{target} needs {NEEDS[target]}: make frameworks", file=sys.stderr)
                failed = True
                continue
            for ranks in [1] if target in ONE_RANK_ONLY else map(int, arguments.ranks.split(",")):
                found = judge(target, ranks, work / f"{target}-{ranks}", arguments.jobs)
                failed |= found.keys() != {"PASS"}
                counts = " | ".join(str(found[verdict]) for verdict in VERDICTS[:4])
                print(f"| {target} | {ranks} | {sum(found.values())} | {counts} |", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
