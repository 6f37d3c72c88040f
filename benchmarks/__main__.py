"""Saves and loads, ours compared with stock torch and others, in one run: tables, JSON, plots.

python -m benchmarks [--quick] [--suite save,load,...] [--medium tmpfs] [--json FILE]
python -m benchmarks --write-readme FILE
"""

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import NoReturn

from benchmarks.machine import HOME, described
from benchmarks.options import SUITES, Options, parsed
from benchmarks.report.documents import written
from benchmarks.report.table import printed
from benchmarks.suites.bucket import bucket_suite
from benchmarks.suites.emulated import emulated_suite
from benchmarks.suites.growth import growth_suite
from benchmarks.suites.loading import load_suite
from benchmarks.suites.parts import parts_suite
from benchmarks.suites.peers import peers_suite
from benchmarks.suites.replicas import replicas_suite
from benchmarks.suites.results import Results, Row, from_json
from benchmarks.suites.saving import repeat_suite, save_suite, small_suite
from benchmarks.suites.setup import TMPFS, Unavailable
from benchmarks.suites.stale_files import remove_stale_files
from benchmarks.training_stall import stall_suite
from tests.harness.zygote import stop_the_zygotes

RUN: Mapping[str, Callable[[Options], list[Row]]] = {
    "save": save_suite,
    "load": load_suite,
    "small": small_suite,
    "repeat": repeat_suite,
    "replicas": replicas_suite,
    "parts": parts_suite,
    "growth": growth_suite,
    "emulated": emulated_suite,
    "bucket": bucket_suite,
    "peers": peers_suite,
    "stall": stall_suite,
}
INTERRUPTED = 130  # as a shell returns it
_REPORT_CHARACTERS = 6_000


def main(arguments: list[str] | None = None) -> int:
    options = parsed(arguments)
    if options.write_readme:
        results = from_json(json.loads(options.write_readme.read_text()))
        print(*written(results, HOME), sep="\n")
        return 0
    try:
        results = measured(options)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    print(printed(results))
    if options.json:
        options.json.write_text(json.dumps(results.to_json(), indent=1, default=str))
    return 1 if results.failed else 0


def measured(options: Options) -> Results:
    """Runs all requested suites. A suite that cannot run on this machine is listed in `skipped`, with the reason."""
    before = signal.signal(signal.SIGTERM, _interrupted)  # SIGTERM cleans up as well
    results = Results(described(options), {name: str(value) for name, value in asdict(options).items()})
    for name in remove_stale_files([TMPFS, options.disk]):
        print(f"removed the remains of a killed run: {name}", file=sys.stderr)
    try:
        for suite in (name for name in SUITES if name in options.suites):
            start = time.monotonic()
            try:
                results.rows += RUN[suite](options)
            except Unavailable as exc:
                results.skipped.append(f"{suite}: {exc}")
            except AssertionError as exc:  # ranks failed; the other suites' results are kept
                print(str(exc)[-_REPORT_CHARACTERS:], file=sys.stderr)
                results.failed.append(suite)
            print(f"{suite}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):  # the zygote is then killed
            stop_the_zygotes()
        signal.signal(signal.SIGTERM, before)
    return results


def _interrupted(*_: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
