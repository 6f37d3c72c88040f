"""The suite of buckets: stock FsspecWriter and FsspecReader, and ours with the agents uploading, against one S3 server."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from benchmarks.options import Options
from benchmarks.suites.results import Row
from benchmarks.suites.saving import Case, rows_in
from benchmarks.suites.setup import Setup, cluster_on
from tests.buckets.servers import Server, moto_server, radosgw_server
from tests.buckets.servers import Unavailable as NoServer

SHARE = 0.07  # of the time for all suites
STOCK_BUCKET = "stock FsspecWriter (s3fs)"
_BUCKET = "bench"
_SIZE_BYTES_MAX = {"radosgw": 256 << 20, "moto": 32 << 20}  # moto copies the whole object for each range that is read


def bucket_suite(options: Options) -> list[Row]:
    """In memory, so that the server is the only medium; a save by ours has `copies` on the nodes besides."""
    with _server(options.server) as (name, server):
        server.make_bucket(_BUCKET)
        setup = Setup("tmpfs", 2, 2)
        size_bytes = min(options.size_bytes, _SIZE_BYTES_MAX[name])
        with cluster_on(options, setup, 2 * size_bytes) as cluster:
            seconds, cases = options.seconds * SHARE, bucket_cases(server)
            rows = rows_in(cluster, "bucket", setup, "fsdp2", size_bytes, cases, seconds, rounds=options.rounds)
    return [
        replace(row, setup=f"{name}, 2 x 2", base=STOCK_BUCKET, limit_s=None) for row in rows if row.work != "probe"
    ]


def bucket_cases(server: Server) -> list[Case]:
    def case(name: str, way: str, **options: object) -> Case:
        where = {"url": f"s3://{_BUCKET}/{'-'.join(name.replace(',', '').split())}"}
        return {
            "name": name,
            "way": way,
            "options": {**where, "storage_options": server.storage_options(), **options},
            "copies": 2,
        }

    return [
        case(STOCK_BUCKET, "stock bucket"),
        case("ours, 1 copy, ack=object", "ours bucket", options={"copies": 1, "ack": "object"}),
        case("ours, 2 copies, ack=object", "ours bucket", options={"copies": 2, "ack": "object"}),
    ]


@contextmanager
def _server(wanted: str) -> Iterator[tuple[str, Server]]:
    """Ceph's radosgw where it can be had; moto otherwise, which is slower than any client and measures little."""
    with ExitStack() as stack:
        if wanted == "radosgw":
            try:
                yield wanted, stack.enter_context(radosgw_server())
                return
            except NoServer as exc:
                print(f"moto instead: {exc}", file=sys.stderr)
        yield "moto", stack.enter_context(moto_server())
