"""Upload of one shard to S3 in parallel parts, in bounded memory. After a restart it continues with the stored parts."""

import base64
import queue
import struct
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from replicated_ckpt import failpoints
from replicated_ckpt.core.integrity.checksum import crc32c
from replicated_ckpt.errors import ObjectMissing, ReplicatedCkptError, StoreDenied, StoreError, StoreUnavailable
from replicated_ckpt.stores.bucket_client.body import MemoryBody, read_pages
from replicated_ckpt.stores.bucket_client.client import PARTS_PARALLEL, Paced, UploadSource
from replicated_ckpt.stores.bucket_client.url import ObjectTarget
from replicated_ckpt.stores.threads import FanOut

_PARTS_MAX = 9_000  # S3 takes 10,000
COPY_PART_BYTES = 512 << 20
"""Size of the parts of a copy inside the bucket. S3 copies up to 5 GiB in one request, but not always in time."""


class MultipartClient(Protocol):
    """The part of the S3 client that an upload uses."""

    target: ObjectTarget
    bucket: str
    prefix: str
    has_checksums: bool
    part_bytes: int

    @property
    def s3(self) -> Any:
        """botocore's client."""

    def begin(self, key: str) -> str:
        """Begins an upload; returns its id."""

    def checksum_of(self, crc: int) -> dict[str, str]:
        """Parameters with which the server verifies the received bytes."""

    def translate_errors(self, op: str, key: str) -> AbstractContextManager[None]:
        """Turns botocore's errors into ours."""


class MultipartUpload:
    """Upload of one shard in parallel parts. `source.begun` has the state that continues it after a restart."""

    def __init__(self, client: MultipartClient, key: str, source: UploadSource, paced: Paced) -> None:
        self._client = client
        self._key = key
        self._source = source
        self._paced = paced
        self._part_bytes = source.piece_bytes(max(client.part_bytes, -(-source.size_bytes // _PARTS_MAX)))
        self._parts: dict[int, dict[str, Any]] = {}
        self._crcs: dict[int, int] = {}
        self._lock = threading.Lock()
        self._where = {"Bucket": client.bucket, "Key": client.prefix + key}

    def run(self) -> str:
        """Uploads missing parts and completes the upload; returns S3's checksum of its parts' checksums."""
        count = -(-self._source.size_bytes // self._part_bytes)
        if not self._resume():
            self._create()
        waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in range(1, count + 1):
            if number not in self._parts:
                waiting.put(number)
        self._send_all(waiting)
        parts = [self._parts[number] for number in range(1, count + 1)]
        try:
            with self._client.translate_errors("complete the upload of", self._key):
                self._client.s3.complete_multipart_upload(
                    **self._where, UploadId=self._upload_id, MultipartUpload={"Parts": parts}
                )
        # The upload may be complete, or still be there: the note stays, and the next try finds out.
        except (StoreUnavailable, StoreDenied):
            raise
        except StoreError:  # the server refuses parts that it lists itself: without the note the next try begins anew
            self._source.begun.note = None
            self._source.begun.keep()
            raise
        self._source.begun.note = None
        return encode_crc(crc32c(b"".join(struct.pack(">I", self._crcs[number]) for number in range(1, count + 1))))

    def _send_all(self, waiting: "queue.SimpleQueue[int]") -> None:
        is_broken = threading.Event()

        def work(_: int) -> None:
            # One buffer for each thread: memory is PARTS_PARALLEL parts, whatever the shard's size.
            memory = bytearray(min(self._part_bytes, self._source.size_bytes))
            while not (is_broken.is_set() or waiting.empty()):
                try:
                    self._send(waiting.get_nowait(), memory)
                except queue.Empty:
                    return
                except BaseException:
                    # The other threads would send gigabytes for an upload that has already failed.
                    is_broken.set()
                    raise

        FanOut.run(range(PARTS_PARALLEL), work).raise_first()

    def _send(self, number: int, memory: bytearray) -> None:
        offset = (number - 1) * self._part_bytes
        size = min(self._part_bytes, self._source.size_bytes - offset)
        self._paced(size)
        part = memoryview(memory)[:size]
        # Checked as it is read: without a body checksum S3 stores a flipped bit silently.
        crc = self._crcs[number] = self._source.read(offset, part)
        checksum = self._client.checksum_of(crc)
        with self._client.translate_errors(f"send part {number} of", self._key):
            etag = self._client.s3.upload_part(
                **self._where, UploadId=self._upload_id, PartNumber=number, Body=MemoryBody(part), **checksum
            )["ETag"]
        failpoints.reach("upload.part-sent")
        # To complete the upload, S3 needs the checksum of each part that was sent with one.
        stored = {name: value for name, value in checksum.items() if name == "ChecksumCRC32C"}
        with self._lock:
            self._parts[number] = {"PartNumber": number, "ETag": etag, **stored}

    def _create(self) -> None:
        self._upload_id: str = self._client.begin(self._key)
        note = {"key": self._where["Key"], "upload_id": self._upload_id, "part_bytes": self._part_bytes}
        note |= {"file": [self._source.size_bytes, self._source.crc32c], "has_checksums": self._client.has_checksums}
        self._source.begun.note = note
        # Durable before the first part: after a crash only the note leads to the parts that were sent.
        self._source.begun.keep()

    def _resume(self) -> bool:
        """Continues an upload that this node began for the same bytes; False if there is none."""
        note = self._source.begun.note
        if note is None:
            return False
        try:
            same = note["key"] == self._where["Key"] and note["part_bytes"] == self._part_bytes
            if not same or note["file"] != [self._source.size_bytes, self._source.crc32c]:
                return False
            # S3 refuses to mix parts with and without checksums.
            self._client.has_checksums = bool(note["has_checksums"])
            self._upload_id = str(note["upload_id"])
        # The note comes from a file, which may be damaged or of another version.
        except (KeyError, TypeError):
            return False
        try:
            self._parts = {part["PartNumber"]: part for part in self._list_parts()}
        except ObjectMissing:
            return False
        except ReplicatedCkptError as exc:
            # Completed, aborted, or expired by a life-cycle rule: it begins anew.
            if "NoSuchUpload" in exc.message:
                return False
            raise
        return True

    def _list_parts(self) -> Iterator[dict[str, Any]]:
        following = {"PartNumberMarker": "NextPartNumberMarker"}
        where = {**self._where, "UploadId": self._upload_id}
        with self._client.translate_errors("list parts of", self._key):
            for page in read_pages(self._client.s3.list_parts, self._client.target.url, following, **where):
                for part in page.get("Parts", ()):
                    if self._is_ours(part):
                        yield {name: part[name] for name in ("PartNumber", "ETag", "ChecksumCRC32C") if name in part}

    def _is_ours(self, part: Mapping[str, Any]) -> bool:
        """Whether a stored part matches the file at its place: by size, and by checksum if the store returns one."""
        offset = (part["PartNumber"] - 1) * self._part_bytes
        size = min(self._part_bytes, self._source.size_bytes - offset)
        if offset < 0 or size <= 0 or part["Size"] != size:
            return False
        # Read again even without a checksum to compare: the final check needs the CRC of every part.
        crc = self._crcs[part["PartNumber"]] = self._source.read(offset, memoryview(bytearray(size)))
        return bool(part.get("ChecksumCRC32C", encode_crc(crc)) == encode_crc(crc))


def copy_in_parts(s3: Any, where: Mapping[str, str], origin: Mapping[str, str], size_bytes: int) -> None:
    """Has the server copy a large object, PARTS_PARALLEL parts of COPY_PART_BYTES at once. Raises botocore's errors."""
    upload = {**where, "UploadId": s3.create_multipart_upload(**where)["UploadId"]}
    etags: dict[int, str] = {}

    def copy(number: int) -> None:
        first = (number - 1) * COPY_PART_BYTES
        bounds = f"bytes={first}-{min(first + COPY_PART_BYTES, size_bytes) - 1}"
        found = s3.upload_part_copy(**upload, PartNumber=number, CopySource=origin, CopySourceRange=bounds)
        etags[number] = found["CopyPartResult"]["ETag"]

    try:
        numbers = range(1, -(-size_bytes // COPY_PART_BYTES) + 1)
        FanOut.run(numbers, copy, most=PARTS_PARALLEL, until_error=True).raise_first()
        parts = [{"PartNumber": number, "ETag": etags[number]} for number in numbers]
        s3.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})
    except BaseException:
        s3.abort_multipart_upload(**upload)
        raise


def encode_crc(crc: int) -> str:
    """A CRC32C as S3 writes it: base64 of its four bytes, big endian."""
    return base64.b64encode(struct.pack(">I", crc)).decode()
