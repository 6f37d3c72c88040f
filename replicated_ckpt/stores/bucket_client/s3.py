"""S3 by botocore: parts from reused memory, checksums that the server verifies, uploads that continue after a restart."""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import botocore.config
import botocore.exceptions
import botocore.loaders
import botocore.parsers
import botocore.session
import urllib3.exceptions

from replicated_ckpt.core.integrity.checksum import crc32c
from replicated_ckpt.core.layout import SHARD_SUFFIX
from replicated_ckpt.errors import (
    ConfigInvalid,
    ObjectCorrupt,
    ObjectMissing,
    StoreDenied,
    StoreError,
    StoreUnavailable,
)
from replicated_ckpt.stores.bucket_client.body import BoundedSession, MemoryBody, read_pages, without_expect
from replicated_ckpt.stores.bucket_client.client import ARCHIVED, AWAY_HINT, PART_BYTES, Listing, Paced, UploadSource
from replicated_ckpt.stores.bucket_client.parts import (
    COPY_PART_BYTES,
    MultipartUpload,
    copy_in_parts,
    encode_crc,
)
from replicated_ckpt.stores.bucket_client.url import ObjectTarget

T = TypeVar("T")
CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 20.0
LISTED_MAX = 500_000
"""Most names in one directory of a bucket: room for the shards of more than 100,000 ranks."""
_SLICE_BYTES = 1 << 20
"""Bytes per `readinto`: urllib3 allocates memory for each call."""
_KNOWN_OPTIONS = {
    "key",
    "secret",
    "token",
    "anon",
    "endpoint_url",
    "use_ssl",
    "profile",
    "client_kwargs",
    "config_kwargs",
}
_KNOWN_CLIENT_OPTIONS = {"endpoint_url", "region_name", "verify", "use_ssl", "api_version"}
_DENIED = {
    "AccessDenied", "AccountProblem", "AuthorizationHeaderMalformed", "ExpiredToken", "ExpiredTokenException",
    "InvalidAccessKeyId", "InvalidBucketName", "InvalidToken", "NoSuchBucket", "PermanentRedirect",
    "RequestTimeTooSkewed", "SignatureDoesNotMatch", "TokenRefreshRequired", "AllAccessDisabled", "Forbidden", "301", "401",
    "403",
}  # fmt: skip
_NEVER_ASKED = (
    botocore.exceptions.NoCredentialsError,
    botocore.exceptions.PartialCredentialsError,
    botocore.exceptions.SSOError,
    botocore.exceptions.TokenRetrievalError,
    botocore.exceptions.ParamValidationError,
    botocore.exceptions.EndpointProviderError,
)
"""Errors that botocore raises without a request, so a retry is useless: an expired login, or an invalid bucket name."""
_CONDITION_FAILED = ("PreconditionFailed", "ConditionalRequestConflict", "ConcurrentModification", "412")
_CONDITION_UNKNOWN = ("NotImplemented", "501")
_CHECKSUM_UNKNOWN = ("NotImplemented:", "InvalidArgument:", "InvalidRequest:")
_MISSING = {"NoSuchKey", "404", "NotFound"}
_NOT_BELIEVED = ("CERTIFICATE_VERIFY_FAILED", "doesn't match", "subjectAltName", "No such file", "WRONG_VERSION_NUMBER")
"""Texts of lasting TLS errors: a private authority, another host, a missing CA file, or a server without TLS."""
_BUSY = {
    "SlowDown",
    "ServiceUnavailable",
    "InternalError",
    "RequestTimeout",
    "ThrottlingException",
    "BandwidthLimitExceeded",
}


def _below(start: str, key: str) -> str:
    """A listed key relative to the listed directory. Raises ValueError: the key lies elsewhere."""
    if not key.startswith(start):
        raise ValueError(f"{key[:80]!r} is listed under {start[:80]!r}")
    return key[len(start) :]


def can_honour(options: Mapping[str, Any]) -> bool:
    """Whether this client supports all of these options of s3fs; with others s3fs itself is used."""
    return options.keys() <= _KNOWN_OPTIONS and dict(options.get("client_kwargs") or {}).keys() <= _KNOWN_CLIENT_OPTIONS


class S3Client:
    """An ObjectClient for S3 and compatible stores. See ObjectClient for the contract."""

    has_conditions = True

    def __init__(self, target: ObjectTarget, part_bytes: int = PART_BYTES) -> None:
        self.target = target
        self.part_bytes = part_bytes
        self.bucket, _, prefix = target.url.partition("://")[2].partition("/")
        self.prefix = f"{prefix}/" if prefix else ""
        self.has_checksums = True
        self._is_refused = False
        self._s3 = self._open()

    @property
    def s3(self) -> Any:
        """botocore's client. After a refusal it is opened anew, because a credentials file may have been renewed since."""
        if self._is_refused:
            self._s3 = self._open()
            self._is_refused = False
        return self._s3

    def _open(self) -> Any:
        try:
            return _botocore_client(self.target)
        except (botocore.exceptions.BotoCoreError, ValueError, TypeError) as exc:
            problem = f"{self.target.url}: {self.target.scrub(str(exc)).rstrip('.')}."
            raise ConfigInvalid(problem, "Correct storage_options, or the AWS_* variables.") from None

    def list_keys(self, directory: str) -> Listing:
        start = self.prefix + directory
        sizes: dict[str, int] = {}
        directories: list[str] = []
        following = {"ContinuationToken": "NextContinuationToken"}
        where = {"Bucket": self.bucket, "Prefix": start, "Delimiter": "/"}
        with self.translate_errors("list", directory):
            for page in read_pages(self.s3.list_objects_v2, self.target.url, following, **where):
                sizes.update({_below(start, entry["Key"]): entry["Size"] for entry in page.get("Contents", ())})
                directories += [_below(start, entry["Prefix"])[:-1] for entry in page.get("CommonPrefixes", ())]
                # A foreign prefix with millions of objects must not fill the agent's memory.
                if len(sizes) + len(directories) > LISTED_MAX:
                    raise StoreError(
                        self.target.url, "list", directory, f"it has more than {LISTED_MAX} names", _OWN_PREFIX_HINT
                    )
        return Listing(sizes, tuple(directories))

    def read(self, key: str, offset: int, target: memoryview) -> None:
        if not target:
            return
        span = f"bytes={offset}-{offset + len(target) - 1}"
        with self.translate_errors("read", key):
            answer = self.s3.get_object(Bucket=self.bucket, Key=self.prefix + key, Range=span)
            status = answer["ResponseMetadata"]["HTTPStatusCode"]
            with contextlib.closing(answer["Body"]) as body:
                # Some servers ignore Range and answer 200 with the whole object: correct only if all of it was asked for.
                if status != 206 and not (status == 200 and offset == 0 and answer["ContentLength"] == len(target)):
                    raise self._corrupt(key, f"asked for {span}, but the answer has status {status}")
                done = 0
                while done < len(target):
                    count = body.readinto(target[done : done + _SLICE_BYTES])
                    # botocore raises no error for a short answer with a matching length.
                    if not count:
                        raise self._corrupt(key, f"asked for {span}, but the answer ended after {done} bytes")
                    done += count

    def size_bytes(self, key: str) -> int:
        with self.translate_errors("look at", key):
            return int(self.s3.head_object(Bucket=self.bucket, Key=self.prefix + key)["ContentLength"])

    def put(self, key: str, data: bytes) -> None:
        self._put(key, data, crc32c(data))

    def _put(self, key: str, data: bytes | bytearray, crc: int, **conditions: str) -> None:
        def send(**checksum: str) -> None:
            self.s3.put_object(
                Bucket=self.bucket, Key=self.prefix + key, Body=MemoryBody(data), **checksum, **conditions
            )

        if not conditions:
            self._with_checksum("write", key, send, self.checksum_of(crc))
            return
        with self.translate_errors("write", key):  # no retry without checksum: a refusal here concerns the condition
            send(**self.checksum_of(crc))

    def _with_checksum(self, op: str, key: str, send: Callable[..., T], checksum: Mapping[str, str]) -> T:
        """Sends a request with a checksum, which the store verifies. Later calls omit it if the store refuses checksums."""
        try:
            with self.translate_errors(op, key):
                return send(**checksum)
        except StoreError as exc:
            if not checksum or not exc.detail.startswith(_CHECKSUM_UNKNOWN):
                raise
        with self.translate_errors(op, key):
            answer = send()
        self.has_checksums = False  # only if it works without one: the refusal may have had another reason
        return answer

    def version(self, key: str) -> str:
        try:
            with self.translate_errors("look at", key):
                return str(self.s3.head_object(Bucket=self.bucket, Key=self.prefix + key)["ETag"])
        except ObjectMissing:
            return ""

    def put_over(self, key: str, data: bytes, version: str) -> bool:
        condition = {"IfMatch": version} if version else {"IfNoneMatch": "*"}
        try:
            self._put(key, data, crc32c(data), **condition)
        except StoreError as exc:
            code = exc.detail.partition(":")[0]
            # Stores differ: 412, 409 with one of two codes, or no support. The caller reads the object back in any case.
            if code in _CONDITION_FAILED:
                return False
            if code not in _CONDITION_UNKNOWN:
                raise
            self.put(key, data)
        return True

    def copy(self, source: str, key: str) -> None:
        size_bytes = self.size_bytes(source)
        where = {"Bucket": self.bucket, "Key": self.prefix + key}
        origin = {"Bucket": self.bucket, "Key": self.prefix + source}
        with self.translate_errors("copy", source):
            if size_bytes <= COPY_PART_BYTES:
                self.s3.copy_object(**where, CopySource=origin)
            else:
                copy_in_parts(self.s3, where, origin, size_bytes)

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:  # not DeleteObjects: it needs checksums that differ between stores
            with self.translate_errors("delete", key):
                self.s3.delete_object(Bucket=self.bucket, Key=self.prefix + key)

    def end_unfinished(self, prefix: str, older_than_s: float) -> int:
        ended, where = 0, {"Bucket": self.bucket, "Prefix": self.prefix + prefix}
        following = {"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"}
        with self.translate_errors("list uploads of", prefix):
            for page in read_pages(self.s3.list_multipart_uploads, self.target.url, following, **where):
                for upload in page.get("Uploads", ()):
                    is_ours = upload["Key"].endswith(SHARD_SUFFIX)  # without a prefix, other programs may upload there
                    if is_ours and time.time() - upload["Initiated"].timestamp() >= older_than_s:
                        with contextlib.suppress(self.s3.exceptions.NoSuchUpload):  # another agent was faster
                            self.s3.abort_multipart_upload(
                                Bucket=self.bucket, Key=upload["Key"], UploadId=upload["UploadId"]
                            )
                        ended += 1
        return ended

    def close(self) -> None:
        self._s3.close()

    # Uploads of shards -------------------------------------------------------------------------------------------

    def put_shard(self, key: str, source: UploadSource, paced: Paced) -> None:
        if source.size_bytes <= self.part_bytes:
            paced(source.size_bytes)
            data = bytearray(source.size_bytes)
            self._put(key, data, source.read(0, memoryview(data)))
            of_parts = ""
        else:
            of_parts = MultipartUpload(self, key, source, paced).run()
        try:
            self._check_stored(key, source, of_parts)
        except ObjectCorrupt:
            # A damaged object under a shard's key would count as uploaded at the next look.
            self.delete([key])
            raise

    def begin(self, key: str) -> str:
        """Begins an upload in parts, with checksums if the store supports them; returns its id."""
        begin = partial(self.s3.create_multipart_upload, Bucket=self.bucket, Key=self.prefix + key)
        checksum = {"ChecksumAlgorithm": "CRC32C"} if self.has_checksums else {}
        return str(self._with_checksum("begin the upload of", key, begin, checksum)["UploadId"])

    def _check_stored(self, key: str, source: UploadSource, of_parts: str) -> None:
        """Compares the store's size and checksum: that of the whole object, or of its parts' checksums."""
        with self.translate_errors("look at", key):
            found = self.s3.head_object(Bucket=self.bucket, Key=self.prefix + key, ChecksumMode="ENABLED")
        source.check_stored(self.target.url, key, found["ContentLength"])
        stored, _, parts = str(found.get("ChecksumCRC32C", "")).partition("-")
        is_whole = not parts and (not of_parts or found.get("ChecksumType") == "FULL_OBJECT")
        expected = encode_crc(source.crc32c) if is_whole else of_parts
        # A checksum of neither kind, as moto reports, is ignored.
        if stored and (is_whole or parts) and stored != expected:
            raise self._corrupt(key, f"expected CRC32C {expected}, but the store reports {stored}")

    def checksum_of(self, crc: int) -> dict[str, str]:
        if not self.has_checksums:
            return {}
        return {"ChecksumAlgorithm": "CRC32C", "ChecksumCRC32C": encode_crc(crc)}

    def _corrupt(self, key: str, detail: str) -> ObjectCorrupt:
        return ObjectCorrupt(self.target.url, "check", key, detail)

    @contextmanager
    def translate_errors(self, op: str, key: str) -> Iterator[None]:
        try:
            yield
        except botocore.exceptions.ClientError as exc:
            raise self._error_of(exc, op, key) from None
        # Before BotoCoreError, which is their base class.
        except _NEVER_ASKED as exc:
            raise self._refused(op, key, self.target.scrub(" ".join(str(exc).split())), _DENIED_HINT) from None
        except (botocore.exceptions.BotoCoreError, urllib3.exceptions.HTTPError, OSError) as exc:
            detail = self.target.scrub(f"{type(exc).__name__}: {exc}")
            # A certificate stays wrong: a retry would only delay the hint.
            if isinstance(exc, botocore.exceptions.SSLError) and any(words in detail for words in _NOT_BELIEVED):
                raise self._refused(op, key, detail, _NOT_BELIEVED_HINT) from None
            raise StoreUnavailable(self.target.url, op, key, detail, AWAY_HINT) from None
        except (botocore.parsers.ResponseParserError, LookupError, TypeError, ValueError, AttributeError) as exc:
            detail = self.target.scrub(f"its answer is not valid: {type(exc).__name__}: {exc}")[:400]
            raise StoreError(self.target.url, op, key, detail) from None

    def _error_of(self, exc: botocore.exceptions.ClientError, op: str, key: str) -> StoreError:
        error = exc.response.get("Error", {})
        code, status = str(error.get("Code")), exc.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        detail = self.target.scrub(f"{code}: {error.get('Message', '')} (status {status})")[:400]
        store = self.target.url
        if code in _MISSING:
            return ObjectMissing(store, op, key, detail)
        if code in _DENIED or status in (401, 403):
            return self._refused(op, key, detail, _ARCHIVED_HINT if code == ARCHIVED else _DENIED_HINT)
        if code in _BUSY or status in (408, 429) or status >= 500:
            return StoreUnavailable(store, op, key, detail, AWAY_HINT)
        if code in ("BadDigest", "XAmzContentChecksumMismatch", "InvalidRange"):  # a range behind the object's end
            return ObjectCorrupt(store, op, key, detail)
        return StoreError(store, op, key, detail)

    def _refused(self, op: str, key: str, detail: str, hint: str) -> StoreDenied:
        # Keys that are given as options cannot change: opening anew would read the same ones.
        self._is_refused = hint != _ARCHIVED_HINT and not self.target.options.get("key")
        return StoreDenied(self.target.url, op, key, detail, hint)


_DENIED_HINT = (
    "Check the bucket's name and region, the credentials and their permissions, and this node's clock. The nodes' copies "
    "are safe."
)
_ARCHIVED_HINT = (
    "A life-cycle rule of the bucket has archived this object: restore it there, or load a checkpoint without archived "
    "objects."
)
_NOT_BELIEVED_HINT = (
    "Correct the endpoint_url. For a private CA, copy its file to each node, and name it in AWS_CA_BUNDLE, or in "
    'storage_options as client_kwargs={"verify": PATH}. The nodes\' copies are safe.'
)
_OWN_PREFIX_HINT = "Give the checkpoints their own prefix: s3://bucket/prefix."


_CREDENTIALS = {"key": "aws_access_key_id", "secret": "aws_secret_access_key", "token": "aws_session_token"}


@functools.cache
def _data_files(search_path: str | None) -> botocore.loaders.Loader:
    """botocore's service descriptions, parsed once in a process: parsing takes longer than some requests."""
    return botocore.loaders.create_loader(search_path)


def _botocore_client(target: ObjectTarget) -> Any:
    options = dict(target.options)
    session = botocore.session.Session(profile=options.get("profile"))
    session.register_component("data_loader", _data_files(session.get_config_variable("data_path")))
    keys = {name: options.get(option) or None for option, name in _CREDENTIALS.items()}
    for name, value in keys.items():
        # A line break from a secret's file would end up in a header, and quote the secret in the error.
        if value and value != value.strip():
            raise ValueError(f"{name} begins or ends with a space or a line break")
    usual = {"endpoint_url": options.get("endpoint_url"), "use_ssl": options.get("use_ssl", True)}
    extra = usual | dict(options.get("client_kwargs") or {})
    settings = botocore.config.Config(
        connect_timeout=CONNECT_TIMEOUT_S,
        read_timeout=READ_TIMEOUT_S,
        max_pool_connections=32,
        retries={"total_max_attempts": 1},  # botocore's retries would multiply with ours
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        # Without checksums botocore turns SHA-256 signing back on over https, unless this is set, too.
        s3={"payload_signing_enabled": False, "addressing_style": "auto"},
    )
    if options.get("anon"):
        settings = settings.merge(botocore.config.Config(signature_version=botocore.UNSIGNED))
    if options.get("config_kwargs"):
        settings = settings.merge(botocore.config.Config(**options["config_kwargs"]))
    client = session.create_client("s3", config=settings, **keys, **extra)
    client.meta.events.register_last("before-call.s3", without_expect)
    endpoint = client._endpoint  # noqa: SLF001 - no option of botocore's bounds what it reads
    endpoint.http_session = BoundedSession(endpoint.http_session, target.url)
    return client
