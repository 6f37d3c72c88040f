"""`python -m tests.referee.chaos`: runs ckpt-chaos on two ranks, with stock DCP and with ours, and prints the table."""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from replicated_ckpt.agent.state.endpoint import read_endpoint
from tests.harness.processes import end
from tests.harness.zygote import stop_the_zygotes
from tests.referee.chaos.forking import forker

CLIENT_FILE = Path(__file__).with_name("forked.py")
ROOT = CLIENT_FILE.parents[3]
WAYS = ("stock", "manager", "manager-async")
VERDICTS = ("PASS", "LOST_WORK", "SILENT_DIVERGENCE", "HARD_FAIL", "CONTROL_FAIL")
TIMEOUT_S = 3 * 3600


def judge(way: str, crash_rank: int, folder: Path, points: int, jobs: int) -> dict[str, int]:
    """The number of runs with each verdict. The first run is a control, which is not killed. Leaves no agent behind.

    Raises:
        RuntimeError: ckpt-chaos printed no verdicts, or a rank that it should kill ended by itself.
    """
    kept = "step-*" if way == "stock" else "node-0/step-*"
    command = [sys.executable, "-m", "ckpt_chaos", "run", "--ranks", "2", "--crash-rank", str(crash_rank)]
    command += ["--jobs", str(jobs), "--max-points", str(points), "--timeout", "300", "--work", str(folder)]
    command += [
        "--step-regex",
        r"resumed from step (\d+)",
        "--checkpoint-glob",
        f"{{out}}/{kept}",
        "--ckpt-ignore-size",
    ]
    command += ["--result-file", "{out}/final-0.pt", "--", sys.executable, "-S", str(CLIENT_FILE)]
    command += ["--save", way, "--out", "{out}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "REPLICATED_CKPT_AGENT_IDLE_S": "2"}
    # `run` of 0.1.8 leaves it out, and kills no other rank than 0.
    environment["CKPT_CHAOS_CRASH_RANK"] = str(crash_rank)
    try:
        with forker("tests.referee.chaos.program") as path:
            environment["CHAOS_FORKER"] = path
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S, env=environment, cwd=ROOT
            )
    finally:
        for root in folder.glob("*/out/node-*"):
            end_agent(root)
    found = {name: int(count) for name, count in re.findall(r"\b([A-Z_]+): (\d+)", done.stdout.splitlines()[-1])}
    if not found.keys() <= set(VERDICTS) or not found:
        raise RuntimeError(f"ckpt-chaos ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    (folder / "report.txt").write_text(done.stdout)
    # Such a run counts as PASS there, and shows nothing.
    if "[DID NOT CRASH]" in done.stdout:
        raise RuntimeError(f"ckpt-chaos has not killed rank {crash_rank} in some runs:\n{done.stdout[-3000:]}")
    return found


def end_agent(root: Path) -> None:
    endpoint = read_endpoint(root / ".agent")
    if endpoint is not None:
        end([endpoint.pid])


def main(words: Sequence[str] | None = None) -> int:
    """Returns 1 if a run with our manager did not pass, else 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ways", default=",".join(WAYS), help="default: %(default)s")
    parser.add_argument("--killed", default="0,1", metavar="RANKS", help="ranks to kill (default: %(default)s)")
    parser.add_argument("--points", type=int, default=100, help="kills for each way and rank (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="runs at one time (default: %(default)s)")
    parser.add_argument("--work", type=Path, help="keep the runs and their reports here")
    arguments = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="chaos-") as temporary:
        work, failed = arguments.work or Path(temporary), False
        print("| save | killed | runs | " + " | ".join(VERDICTS[:4]) + " |", "|---|---|---|" + "---|" * 4, sep="\n")
        for way in arguments.ways.split(","):
            for rank in map(int, arguments.killed.split(",")):
                found = judge(way, rank, work / f"{way}-{rank}", arguments.points, arguments.jobs)
                failed |= way != "stock" and found.keys() != {"PASS"}
                counts = " | ".join(str(found.get(verdict, 0)) for verdict in VERDICTS[:4])
                print(f"| {way} | rank {rank} | {sum(found.values())} | {counts} |", flush=True)
    stop_the_zygotes()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
