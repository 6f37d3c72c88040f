"""`python -m tests.referee`: runs torch's tests with stock storage and with ours, and prints a verdict."""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch

from replicated_ckpt.agent.state.endpoint import read_endpoint
from tests.referee import sources, verdict

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MODES = (verdict.STOCK, "together", "scattered")
TOO_SLOW = "compile_True"  # torch.compile says nothing about storage and takes minutes on a CPU


def environment(mode: str, folder: Path) -> dict[str, str]:
    paths = [HERE / "inject", ROOT, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "TMPDIR": str(folder / "tmp"),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "REFEREE_MODE": mode,
        "REFEREE_ROOTS": str(folder / "roots"),
        "REFEREE_USED": str(folder / "used"),
        "REFEREE_OUTCOMES": str(folder / "outcomes"),
    }


def run(mode: str, tests: Path, names: list[str], folder: Path, timeout_s: float, test_s: float) -> dict[str, str]:
    """Runs torch's tests once. Returns the outcome of each test. No process is left."""
    for name in ("tmp", "roots"):
        (folder / name).mkdir(parents=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.referee.record"]
    command += [
        "--timeout",
        f"{test_s}",
        "-c",
        os.devnull,
        "--rootdir",
        str(tests),
        "-k",
        f"not {TOO_SLOW}",
        *(names or ["."]),
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=tests, env=environment(mode, folder), stdout=log, stderr=log, start_new_session=True
        )
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            print(f"{mode}: not done after {timeout_s:.0f} s; what did not run counts as not passed")
        finally:
            end(process, [folder / "tmp", *(folder / "roots").iterdir()])
    return verdict.outcomes_in(folder / "outcomes")


def end(process: "subprocess.Popen[bytes]", roots: Iterable[Path]) -> None:
    """Ends the run, its ranks and the agents that they started."""
    with contextlib.suppress(ProcessLookupError):  # all of them have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for root in roots:
        endpoint = read_endpoint(root / ".agent")
        if endpoint is not None and b"replicated_ckpt" in command_line(endpoint.pid):
            os.kill(endpoint.pid, signal.SIGTERM)


def command_line(pid: int) -> bytes:
    path = Path(f"/proc/{pid}/cmdline")
    return path.read_bytes() if path.exists() else b""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.referee", description=__doc__)
    parser.add_argument("--torch-tests", type=Path, help="a checkout of PyTorch; default: fetched, and kept in --cache")
    parser.add_argument("--cache", type=Path, default=ROOT / ".referee")
    parser.add_argument("--keep", type=Path, help="folder for logs and outcomes of each run; default: none are kept")
    parser.add_argument("--timeout-s", type=float, default=3600.0, help="of each of the runs")
    parser.add_argument("--test-s", type=float, default=200.0, help="for one test; more on a busy machine")
    parser.add_argument("names", nargs="*", help="files or tests; default: all")
    arguments = parser.parse_args()
    checkout = arguments.torch_tests
    tests = sources.tests_in(checkout) if checkout is not None else sources.downloaded(arguments.cache)
    outcomes = {}
    with tempfile.TemporaryDirectory(prefix="referee-", ignore_cleanup_errors=True) as scratch:
        kept = (arguments.keep or Path(scratch)).absolute()
        for mode in MODES:
            outcomes[mode] = run(mode, tests, arguments.names, kept / mode, arguments.timeout_s, arguments.test_s)
            passed = sum(outcome == verdict.PASSED for outcome in outcomes[mode].values())
            print(f"{mode}: {passed} of {len(outcomes[mode])} passed", flush=True)
        use = verdict.use_in(kept / mode / "used" for mode in MODES)
    found = verdict.judged(outcomes, verdict.expectations())
    print(f"torch {torch.__version__}, tests in {tests}\n\n{verdict.table(outcomes, use.alone)}\n")
    passing = {test for test, outcome in outcomes[verdict.STOCK].items() if outcome == verdict.PASSED}
    for title, entries in (
        ("expected", found.known),
        ("uses stock's storage, says nothing of ours", sorted(use.stock & passing)),
        ("EXPECTED, BUT PASSES", found.stale),
        ("DEFECT", found.defects),
    ):
        for entry in entries:
            print(f"{title}: {entry}")
    shortage = None if arguments.names else verdict.describe_shortage(found.judged, len(use.alone & passing))
    if shortage:
        print(f"TOO FEW: {shortage}")
    return int(not found.is_good or shortage is not None)


if __name__ == "__main__":
    sys.exit(main())
