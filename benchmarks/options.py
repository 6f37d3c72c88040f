"""The command line options of the benchmark."""

import argparse
from dataclasses import dataclass
from pathlib import Path

SUITES = ("save", "load", "small", "repeat", "replicas", "parts", "growth", "emulated", "bucket", "peers", "stall")
MEDIA = ("tmpfs", "disk")
_PARALLEL_EXAMPLE = "save,load"


@dataclass(frozen=True)
class Options:
    """`rounds` is the largest number of rounds of a case. `seconds` is about the time of all suites together."""

    suites: tuple[str, ...]
    media: tuple[str, ...]
    rounds: int
    size_bytes: int
    items: int
    seconds: float
    disk: Path
    device: str
    server: str
    is_quick: bool
    json: Path | None
    write_readme: Path | None


def parsed(arguments: list[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Saves and loads, ours compared with stock torch and others; benchmarks/README.md",
    )
    parser.add_argument("--suite", help=f"some of {','.join(SUITES)}, as in --suite {_PARALLEL_EXAMPLE} (default: all)")
    parser.add_argument("--medium", choices=MEDIA, help="only on this one (default: both; tmpfs with --quick)")
    parser.add_argument("--rounds", type=int, help="how often each case runs at most (default: 5; 1 with --quick)")
    parser.add_argument("--size-mib", type=int, help="size of the state over all ranks (default: 954; 32 with --quick)")
    parser.add_argument("--items", type=int, help="how many small tensors (default: 10000; 1000 with --quick)")
    parser.add_argument("--minutes", type=float, default=15.0, help="about how long all may take (default: 15)")
    parser.add_argument(
        "--disk", type=Path, default=Path("/var/tmp"), help="a directory on the disk (default: /var/tmp)"
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where the state of the stall suite is (default: cpu)"
    )
    parser.add_argument("--server", choices=("radosgw", "moto"), help="which S3 server (default: radosgw, moto if not)")
    parser.add_argument(
        "--quick", action="store_true", help="one small round of everything, within a minute: does it run?"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="every sample, for machines")
    parser.add_argument(
        "--write-readme",
        type=Path,
        metavar="FILE",
        help="measure nothing: put this file's figures into the documents",
    )
    taken = parser.parse_args(arguments)
    suites = tuple(taken.suite.split(",")) if taken.suite else SUITES
    if unknown := set(suites) - set(SUITES):
        parser.error(f"no such suite: {', '.join(sorted(unknown))}; there are {', '.join(SUITES)}")
    return Options(
        suites=suites,
        media=(taken.medium,) if taken.medium else MEDIA[:1] if taken.quick else MEDIA,
        rounds=taken.rounds or (1 if taken.quick else 5),
        size_bytes=(taken.size_mib or (32 if taken.quick else 954)) << 20,
        items=taken.items or (1_000 if taken.quick else 10_000),
        seconds=taken.minutes * 60,
        disk=taken.disk,
        device=taken.device,
        server=taken.server or ("moto" if taken.quick else "radosgw"),
        is_quick=taken.quick,
        json=taken.json,
        write_readme=taken.write_readme,
    )
