"""The suite of buckets, against one S3 server: stock FsspecWriter and FsspecReader, and ours, whose agents upload."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from benchmarks.options import Options
from benchmarks.peers.peer import BUCKET_PEER
from benchmarks.suites.results import Row
from benchmarks.suites.saving import Case, rows_in
from benchmarks.suites.setup import Setup, cluster_on
from tests.buckets.servers import Server, moto_server, radosgw_server
from tests.buckets.servers import Unavailable as NoServer

SHARE = 0.07  # share of the time of all suites
STOCK_BUCKET = "stock FsspecWriter (s3fs)"
_BUCKET = "bench"
_SIZE_BYTES_MAX = {"radosgw": 256 << 20, "moto": 16 << 20}  # moto copies the whole object for each range read


def bucket_suite(options: Options) -> list[Row]:
    """Stores are in memory, so that only the server limits the speed. Ours also makes `copies` on the nodes."""
    with _server(options.server) as (name, server):
        server.make_bucket(_BUCKET)
        size_bytes, title = min(options.size_bytes, _SIZE_BYTES_MAX[name]), f"{name}, 2 x 2"
        note = f"{BUCKET_PEER.distribution} is not installed"
        if BUCKET_PEER.version is not None:
            try:
                return _rows(options, title, bucket_cases(server) + _their_cases(server), size_bytes)
            except AssertionError as exc:  # the benchmark continues without the peer
                print(str(exc)[-2000:], file=sys.stderr)
                note = f"{BUCKET_PEER.distribution} {BUCKET_PEER.version} failed here"
        missing = Row("bucket", title, "save", BUCKET_PEER.way, STOCK_BUCKET, size_bytes, note=note)
        return [*_rows(options, title, bucket_cases(server), size_bytes), missing]


def _rows(options: Options, title: str, cases: list[Case], size_bytes: int) -> list[Row]:
    setup, seconds = Setup("tmpfs", 2, 2), options.seconds * SHARE
    with cluster_on(options, setup, 2 * size_bytes) as cluster:
        rows = rows_in(cluster, "bucket", setup, "fsdp2", size_bytes, cases, seconds, rounds=options.rounds)
    return [replace(row, setup=title, base=STOCK_BUCKET, limit_s=None) for row in rows if row.work != "probe"]


def bucket_cases(server: Server) -> list[Case]:
    return [
        _case(server, STOCK_BUCKET, "stock bucket"),
        _case(server, "ours, 1 copy, ack=object", "ours bucket", options={"copies": 1, "ack": "object"}),
        _case(server, "ours, 2 copies, ack=object", "ours bucket", options={"copies": 2, "ack": "object"}),
    ]


def _their_cases(server: Server) -> list[Case]:
    return [_case(server, f"{BUCKET_PEER.way} {BUCKET_PEER.version}", BUCKET_PEER.way)]


def _case(server: Server, name: str, way: str, **options: object) -> Case:
    url = f"s3://{_BUCKET}/{'-'.join(name.replace(',', '').split())}"
    where = {"url": url, "storage_options": server.storage_options()}
    return {"name": name, "way": way, "options": {**where, **options}, "copies": 2}


@contextmanager
def _server(wanted: str) -> Iterator[tuple[str, Server]]:
    """Ceph's radosgw if it can be installed, else moto, which is slower than any client."""
    with ExitStack() as stack:
        name, server = wanted, None
        if wanted == "radosgw":
            try:
                server = stack.enter_context(radosgw_server())
            except NoServer as exc:
                print(f"moto instead: {exc}", file=sys.stderr)
        if server is None:
            name, server = "moto", stack.enter_context(moto_server())
        yield name, server
