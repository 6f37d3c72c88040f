"""Speed and cost of our clients of a bucket, compared with s3fs and obstore, in one run against one real S3 server.

    python -m benchmarks.bucket [--quick] [--mib 512] [--rounds 5] [--json FILE] [--server moto]
    python -m benchmarks.bucket --agent-memory [--mib 2048]

Each case runs once per round in its own process, in an order that differs by round. The table has the medians. MB is
10^6 bytes, and `--mib` counts 2^20 bytes.
"""

import argparse
import importlib.util
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.bucket_agent import is_within_bounds
from benchmarks.bucket_case import READS, UPLOADS, Job, Sample
from benchmarks.shard_on_disk import written_shard
from tests.buckets.servers import REGION, Server, Unavailable, moto_server, radosgw_server

HOME = Path(__file__).resolve().parents[1]
BUCKET = "bench"
_CASE_TIMEOUT_S = 120
_COLUMNS = ("MB/s", "x s3fs", "CPU s/GB", "extra MB")
Samples = Mapping[str, list[Sample]]


def main() -> int:
    arguments = _arguments()
    try:
        with _server(arguments.server) as server:
            server.make_bucket(BUCKET)
            with tempfile.TemporaryDirectory(prefix="rckpt-bench-") as directory:
                if arguments.agent_memory:
                    return 0 if is_within_bounds(server, BUCKET, Path(directory), arguments.mib) else 1
                results = _rounds(server, Path(directory), arguments)
    except Unavailable as exc:
        print(f"{exc}\nWithout it: --server moto, which is slower than any client.", file=sys.stderr)
        return 2
    _report(results, arguments)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bucket", description=__doc__.partition("\n")[0])
    parser.add_argument("--mib", type=int, help="size of the shard (default: 512; 64 with --quick; 2048 for an agent)")
    parser.add_argument("--rounds", type=int, help="how often each case runs (default: 5; 1 with --quick)")
    parser.add_argument("--quick", action="store_true", help="one round with little data, within 40 s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="every sample, for machines")
    parser.add_argument("--server", choices=("radosgw", "moto"), default="radosgw")
    parser.add_argument("--agent-memory", action="store_true", help="peak memory of an agent that uploads one shard")
    arguments = parser.parse_args()
    arguments.mib = arguments.mib or (2048 if arguments.agent_memory else 64 if arguments.quick else 512)
    arguments.rounds = arguments.rounds or (1 if arguments.quick else 5)
    return arguments


def _server(kind: str) -> AbstractContextManager[Server]:
    return moto_server() if kind == "moto" else radosgw_server()


def _rounds(server: Server, directory: Path, arguments: argparse.Namespace) -> Samples:
    job = _job(server, directory / "__0_0.distcp", arguments.mib << 20)
    cases = [name for name in (*UPLOADS, *READS) if not name.startswith("obstore") or _has_obstore()]
    samples: dict[str, list[Sample]] = {name: [] for name in cases}
    s3 = server.client()
    s3.upload_file(job.path, BUCKET, "to-be-read")
    for number in range(arguments.rounds):
        for name in random.sample(cases, len(cases)):
            key = "to-be-read" if name in READS else f"shard-{number}"
            samples[name].append(_sample(replace(job, case=name, key=key)))
            if name in UPLOADS:
                s3.delete_object(Bucket=BUCKET, Key=key)
        print(f"round {number + 1} done", file=sys.stderr)
    return samples


def _job(server: Server, path: Path, data_bytes: int) -> Job:
    table = written_shard(path, data_bytes)
    return Job(
        case="",
        endpoint_url=server.endpoint_url,
        access_key=server.key,
        secret=server.secret,
        region=REGION,
        bucket=BUCKET,
        key="",
        path=str(path),
        size_bytes=table.file_bytes,
        data_bytes=data_bytes,
        crc32c=table.file_crc(),
    )


def _has_obstore() -> bool:
    return importlib.util.find_spec("obstore") is not None


def _sample(job: Job) -> Sample:
    command, document = [sys.executable, "-m", "benchmarks.bucket_case"], json.dumps(asdict(job))
    done = subprocess.run(
        command, input=document, cwd=HOME, capture_output=True, text=True, timeout=_CASE_TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{job.case}: {done.stderr.strip()}")
    return Sample(**json.loads(done.stdout))


def _report(samples: Samples, arguments: argparse.Namespace) -> None:
    for title, cases in (("upload", UPLOADS), ("read, 16 MiB ranges", READS)):
        names = [name for name in cases if name in samples]
        _print_table([(title, *_COLUMNS), *(_row(name, samples, names[0], arguments.mib << 20) for name in names)])
    if arguments.json:
        arguments.json.write_text(
            json.dumps({name: [asdict(sample) for sample in taken] for name, taken in samples.items()}, indent=1)
        )


def _row(name: str, samples: Samples, base: str, size_bytes: int) -> tuple[str, ...]:
    taken = samples[name]
    seconds = statistics.median(sample.seconds for sample in taken)
    ratio = statistics.median(
        other.seconds / sample.seconds for other, sample in zip(samples[base], taken, strict=True)
    )
    cpu_s = statistics.median(sample.cpu_s for sample in taken)
    peak = statistics.median(sample.extra_peak_bytes for sample in taken)
    return (
        name,
        f"{size_bytes / seconds / 1e6:.0f}",
        f"{ratio:.2f}",
        f"{cpu_s / size_bytes * 1e9:.2f}",
        f"{peak / 1e6:.0f}",
    )


def _print_table(rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        numbers = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        print("  ".join([row[0].ljust(widths[0]), *numbers]))
    print()


if __name__ == "__main__":
    sys.exit(main())
