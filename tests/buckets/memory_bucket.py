"""The contents of a weak store in memory, and its answers to the S3 requests that it supports."""

import hashlib
import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import format_datetime
from typing import ClassVar, TypeAlias
from urllib.parse import parse_qsl, unquote
from xml.etree import ElementTree as ET

from tests.buckets.wire import Head


@dataclass(frozen=True)
class Object:
    body: bytes
    etag: str
    modified: datetime = field(default_factory=lambda: datetime.now(UTC))

    @classmethod
    def of(cls, body: bytes, *, etag_suffix: str = "") -> "Object":
        return cls(body, f'"{hashlib.md5(body).hexdigest()}{etag_suffix}"')


@dataclass(frozen=True)
class Upload:
    bucket: str
    key: str
    parts: dict[int, Object] = field(default_factory=dict)
    begun: datetime = field(default_factory=lambda: datetime.now(UTC))


@dataclass(frozen=True)
class Ask:
    head: Head
    method: str
    bucket: str
    key: str
    query: dict[str, str]
    body: bytes

    @classmethod
    def of(cls, head: Head, body: bytes) -> "Ask":
        method, target, _ = head.first
        path, _, query = target.partition("?")
        bucket, _, key = unquote(path).lstrip("/").partition("/")
        return cls(head, method, bucket, key, dict(parse_qsl(query, keep_blank_values=True)), body)


@dataclass(frozen=True)
class Answer:
    status: int = 200
    body: bytes = b""
    headers: tuple[str, ...] = ()

    def encode(self, *, without_body: bool) -> bytes:
        lines = (f"HTTP/1.1 {self.status} Weak", *self.headers)
        head = Head(tuple(line.encode() for line in lines)).with_length(len(self.body)).encode()
        return head if without_body else head + self.body


class _Denied(Exception):
    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.answer = Answer(status, _xml("Error", [("Code", code)]).body)


Tree: TypeAlias = "str | Sequence[tuple[str, Tree]]"


def _xml(name: str, content: Tree) -> Answer:
    """An answer whose body is the element `name` with this text or these children."""

    def element(name: str, content: Tree) -> ET.Element:
        made = ET.Element(name)
        if isinstance(content, str):
            made.text = content
        else:
            made.extend(element(*child) for child in content)
        return made

    return Answer(body=ET.tostring(element(name, content)), headers=("Content-Type: application/xml",))


def _texts(body: bytes, name: str) -> list[str]:
    """The texts of all elements with this name in a request, in any namespace."""
    return [found.text or "" for found in ET.fromstring(body).iterfind(f".//{{*}}{name}")]


class MemoryBucket:
    """The stored objects, and the answers to requests. Handles one request at a time."""

    def __init__(self, *, refuses_checksums: bool = False) -> None:
        self._refuses_checksums = refuses_checksums
        self.objects_by_bucket: dict[str, dict[str, Object]] = {}
        self.upload_by_id: dict[str, Upload] = {}
        self._lock = threading.Lock()

    def answer(self, ask: Ask) -> Answer:
        place = "key" if ask.key else "bucket" if ask.bucket else "service"
        mark = next((mark for mark in ("uploadId", "uploads", "delete", "list-type") if mark in ask.query), "")
        handler = self.HANDLERS.get((ask.method, place, mark))
        is_checked = "x-amz-checksum-" in str(ask.head.lines).lower() and ask.method in ("PUT", "POST")
        if handler is None or (is_checked and self._refuses_checksums):
            return _Denied(501, "NotImplemented").answer
        if "aws-chunked" in ask.head.value("Content-Encoding"):
            return _Denied(501, "NotImplemented").answer
        try:
            with self._lock:
                return handler(self, ask)
        except _Denied as denied:
            return denied.answer

    def _objects(self, ask: Ask) -> dict[str, Object]:
        try:
            return self.objects_by_bucket[ask.bucket]
        except KeyError:
            raise _Denied(404, "NoSuchBucket") from None

    def _upload(self, ask: Ask) -> Upload:
        try:
            return self.upload_by_id[ask.query["uploadId"]]
        except KeyError:
            raise _Denied(404, "NoSuchUpload") from None

    def _list_buckets(self, ask: Ask) -> Answer:
        buckets = [("Bucket", [("Name", name)]) for name in sorted(self.objects_by_bucket)]
        return _xml("ListAllMyBucketsResult", [("Buckets", buckets)])

    def _create_bucket(self, ask: Ask) -> Answer:
        self.objects_by_bucket.setdefault(ask.bucket, {})
        return Answer()

    def _head_bucket(self, ask: Ask) -> Answer:
        self._objects(ask)
        return Answer()

    def _list_objects(self, ask: Ask) -> Answer:
        prefix, delimiter = ask.query.get("prefix", ""), ask.query.get("delimiter", "")
        after = ask.query.get("continuation-token") or ask.query.get("start-after", "")
        found: dict[str, Object | None] = {}  # None: a common prefix of several keys
        for key, here in sorted(self._objects(ask).items()):
            stem, end, _ = key.removeprefix(prefix).partition(delimiter) if delimiter else (key, "", "")
            if key.startswith(prefix):
                found.update({prefix + stem + end: None} if end else {key: here})
        names = [name for name in found if name > after]
        page = names[: int(ask.query.get("max-keys", 1000))]
        more = len(names) > len(page)
        answer: list[tuple[str, Tree]] = [("IsTruncated", str(more).lower()), ("KeyCount", str(len(page)))]
        if more:
            answer.append(("NextContinuationToken", page[-1]))
        for name in page:
            one = found[name]
            answer.append(("CommonPrefixes", [("Prefix", name)]) if one is None else ("Contents", _entry(name, one)))
        return _xml("ListBucketResult", answer)

    def _delete_objects(self, ask: Ask) -> Answer:
        objects, keys = self._objects(ask), _texts(ask.body, "Key")
        for key in keys:
            objects.pop(key, None)
        return _xml("DeleteResult", [("Deleted", [("Key", key)]) for key in keys])

    def _put(self, ask: Ask) -> Answer:
        self._objects(ask)[ask.key] = new = Object.of(ask.body)
        return Answer(headers=(f"ETag: {new.etag}",))

    def _get(self, ask: Ask) -> Answer:
        here = self._objects(ask).get(ask.key)
        if here is None:
            raise _Denied(404, "NoSuchKey")
        about = (f"ETag: {here.etag}", f"Last-Modified: {format_datetime(here.modified, usegmt=True)}")
        asked = ask.head.value("Range")
        if not asked.startswith("bytes="):
            return Answer(200, here.body, (*about, "Accept-Ranges: bytes"))
        size = len(here.body)
        first, _, last = asked.removeprefix("bytes=").partition("-")
        start = int(first) if first else max(0, size - int(last))
        stop = min(size, int(last) + 1) if first and last else size
        if start >= stop:
            raise _Denied(416, "InvalidRange")
        return Answer(206, here.body[start:stop], (*about, f"Content-Range: bytes {start}-{stop - 1}/{size}"))

    def _delete(self, ask: Ask) -> Answer:
        self._objects(ask).pop(ask.key, None)
        return Answer(204)

    def _list_uploads(self, ask: Ask) -> Answer:
        prefix, listed = ask.query.get("prefix", ""), []
        for upload_id, upload in self.upload_by_id.items():
            if upload.bucket == ask.bucket and upload.key.startswith(prefix):
                about = [("Key", upload.key), ("UploadId", upload_id), ("Initiated", _iso(upload.begun))]
                listed.append(("Upload", about))
        return _xml("ListMultipartUploadsResult", [("IsTruncated", "false"), *listed])

    def _create_upload(self, ask: Ask) -> Answer:
        self._objects(ask)
        upload_id = uuid.uuid4().hex
        self.upload_by_id[upload_id] = Upload(ask.bucket, ask.key)
        return _xml("InitiateMultipartUploadResult", [("Key", ask.key), ("UploadId", upload_id)])

    def _upload_part(self, ask: Ask) -> Answer:
        part = Object.of(ask.body)
        self._upload(ask).parts[int(ask.query["partNumber"])] = part
        return Answer(headers=(f"ETag: {part.etag}",))

    def _list_parts(self, ask: Ask) -> Answer:
        parts = sorted(self._upload(ask).parts.items())
        listed = [("Part", [("PartNumber", str(number)), *_entry("", part)[1:]]) for number, part in parts]
        return _xml("ListPartsResult", [("IsTruncated", "false"), *listed])

    def _complete_upload(self, ask: Ask) -> Answer:
        parts = self._upload(ask).parts
        numbers = [int(number) for number in _texts(ask.body, "PartNumber")]
        if not set(numbers) <= set(parts):
            raise _Denied(400, "InvalidPart")
        whole = Object.of(b"".join(parts[number].body for number in numbers), etag_suffix=f"-{len(numbers)}")
        self._objects(ask)[ask.key] = whole
        del self.upload_by_id[ask.query["uploadId"]]
        return _xml("CompleteMultipartUploadResult", [("Key", ask.key), ("ETag", whole.etag)])

    def _abort_upload(self, ask: Ask) -> Answer:
        self._upload(ask)
        del self.upload_by_id[ask.query["uploadId"]]
        return Answer(204)

    HANDLERS: ClassVar[dict[tuple[str, str, str], Callable[["MemoryBucket", Ask], Answer]]] = {
        ("GET", "service", ""): _list_buckets,
        ("PUT", "bucket", ""): _create_bucket,
        ("HEAD", "bucket", ""): _head_bucket,
        ("GET", "bucket", "list-type"): _list_objects,
        ("GET", "bucket", "uploads"): _list_uploads,
        ("POST", "bucket", "delete"): _delete_objects,
        ("PUT", "key", ""): _put,
        ("GET", "key", ""): _get,
        ("HEAD", "key", ""): _get,
        ("DELETE", "key", ""): _delete,
        ("POST", "key", "uploads"): _create_upload,
        ("PUT", "key", "uploadId"): _upload_part,
        ("GET", "key", "uploadId"): _list_parts,
        ("POST", "key", "uploadId"): _complete_upload,
        ("DELETE", "key", "uploadId"): _abort_upload,
    }


def _entry(key: str, one: Object) -> list[tuple[str, Tree]]:
    return [("Key", key), ("Size", str(len(one.body))), ("ETag", one.etag), ("LastModified", _iso(one.modified))]


def _iso(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%S.000Z")
