"""One measurement against a bucket, in its own process, because the kernel counts peak memory by process.

Takes a Job as JSON on standard input and prints a Sample as JSON.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from replicated_ckpt.stores.bucket.bucket import Bucket, ObjectShard
from replicated_ckpt.stores.bucket_client.client import ObjectClient, UploadSource
from replicated_ckpt.stores.bucket_client.fsspec import FsspecClient
from replicated_ckpt.stores.bucket_client.s3 import S3Client
from replicated_ckpt.stores.bucket_client.url import ObjectTarget
from replicated_ckpt.stores.verified import Expected

RANGE_BYTES = 16 << 20
_WARM_BYTES = 1 << 20
Work = Callable[[], object]


@dataclass(frozen=True)
class Job:
    """One case on one shard: `path` is the file to upload, `key` the object to write or to read."""

    case: str
    endpoint_url: str
    access_key: str
    secret: str
    region: str
    bucket: str
    key: str
    path: str
    size_bytes: int
    data_bytes: int
    crc32c: int

    def options(self) -> dict[str, Any]:
        client_kwargs = {"endpoint_url": self.endpoint_url, "region_name": self.region}
        return {"key": self.access_key, "secret": self.secret, "client_kwargs": client_kwargs}

    def target(self) -> ObjectTarget:
        return ObjectTarget(f"s3://{self.bucket}", self.options())

    def expected(self) -> Expected:
        return Expected(self.size_bytes, self.crc32c)

    def ranges(self) -> Iterator[tuple[int, int]]:
        for offset in range(0, self.data_bytes, RANGE_BYTES):
            yield offset, min(RANGE_BYTES, self.data_bytes - offset)


@dataclass(frozen=True)
class Sample:
    """The cost of one run of a case. `extra_peak_bytes` is the peak beyond the memory of the process after its imports."""

    seconds: float
    cpu_s: float
    extra_peak_bytes: int


# Each case connects, does a small request, and returns the work to be measured.


def s3fs_put(job: Job, **how: Any) -> Work:
    import s3fs

    fs = s3fs.S3FileSystem(**job.options(), use_listings_cache=False, skip_instance_cache=True)
    fs.pipe_file(f"{job.bucket}/{job.key}.warm", bytes(_WARM_BYTES))
    return lambda: fs.put(job.path, f"{job.bucket}/{job.key}", **how)


def s3fs_put_tuned(job: Job) -> Work:
    return s3fs_put(job, chunksize=16 << 20, max_concurrency=4)


def ours_put(job: Job) -> Work:
    return _put_by(S3Client(job.target()), job)


def fsspec_put(job: Job) -> Work:
    return _put_by(FsspecClient(job.target()), job)


def _put_by(client: ObjectClient, job: Job) -> Work:
    client.put(f"{job.key}.warm", bytes(_WARM_BYTES))

    def upload() -> None:
        fd = os.open(job.path, os.O_RDONLY)
        with UploadSource(fd, "benchmark", job.key, job.expected()) as source:
            client.put_shard(job.key, source, lambda _: None)

    return upload


def obstore_put(job: Job) -> Work:
    import obstore

    store = _obstore(job)
    obstore.put(store, f"{job.key}.warm", bytes(_WARM_BYTES))
    return lambda: obstore.put(store, job.key, Path(job.path), chunk_size=16 << 20, max_concurrency=4)


def _obstore(job: Job) -> Any:
    from obstore.store import S3Store

    return S3Store(
        job.bucket,
        endpoint=job.endpoint_url,
        access_key_id=job.access_key,
        secret_access_key=job.secret,
        region=job.region,
        unsigned_payload=True,
        client_options={"allow_http": True},
    )


def s3fs_read(job: Job) -> Work:
    import s3fs

    fs = s3fs.S3FileSystem(**job.options(), use_listings_cache=False, skip_instance_cache=True)
    path = f"{job.bucket}/{job.key}"
    fs.cat_file(path, start=0, end=_WARM_BYTES)

    def read() -> None:
        for offset, length in job.ranges():
            assert len(fs.cat_file(path, start=offset, end=offset + length)) == length

    return read


def ours_read(job: Job) -> Work:
    shard = ObjectShard(Bucket(S3Client(job.target())), job.key, job.expected()).open()

    def read() -> None:
        for offset, length in job.ranges():
            assert len(shard.read(offset, length)) == length

    return read


def obstore_read(job: Job) -> Work:
    import obstore

    store = _obstore(job)
    obstore.get_range(store, job.key, start=0, end=_WARM_BYTES)

    def read() -> None:
        for offset, length in job.ranges():
            assert len(obstore.get_range(store, job.key, start=offset, length=length)) == length

    return read


UPLOADS: Mapping[str, Callable[[Job], Work]] = {
    "s3fs.put": s3fs_put,
    "s3fs.put 16 MiB x 4": s3fs_put_tuned,
    "ours, S3Client": ours_put,
    "ours, FsspecClient": fsspec_put,
    "obstore 16 MiB x 4": obstore_put,
}
READS: Mapping[str, Callable[[Job], Work]] = {
    "s3fs.cat_file": s3fs_read,
    "ours, ObjectShard": ours_read,
    "obstore.get_range": obstore_read,
}


def measured(work: Work) -> Sample:
    Path("/proc/self/clear_refs").write_text("5")  # resets the process's peak
    before = _status_bytes("VmRSS")
    cpu_s, start_s = _cpu_s(), time.perf_counter()
    work()
    seconds, cpu_s = time.perf_counter() - start_s, _cpu_s() - cpu_s
    return Sample(seconds, cpu_s, _status_bytes("VmHWM") - before)


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def main() -> None:
    job = Job(**json.load(sys.stdin))
    print(json.dumps(asdict(measured({**UPLOADS, **READS}[job.case](job)))))


if __name__ == "__main__":
    main()
