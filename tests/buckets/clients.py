"""Requests of this folder's tests with boto3 and s3fs: one attempt each, with short time-outs."""

from collections.abc import Callable
from typing import Any

from botocore.exceptions import BotoCoreError

from tests.buckets.servers import Server

BUCKET, KEY = "faulty", "step-1/__0_0.distcp"
BODY = bytes(range(256)) * 1024
ELSEWHERE = "step-1/.metadata"


def put(server: Server, body: bytes = BODY, **options: Any) -> None:
    server.client(timeout_s=1).put_object(Bucket=BUCKET, Key=KEY, Body=body, **options)


def get(server: Server) -> bytes:
    """Reads without boto3's own checksum checks, which other clients do not have."""
    client = server.client(timeout_s=1, response_checksum_validation="when_required")
    body: bytes = client.get_object(Bucket=BUCKET, Key=KEY)["Body"].read()
    return body


def filesystem(server: Server, **more: Any) -> Any:
    import s3fs

    config = {"retries": {"total_max_attempts": 1}, "read_timeout": 1}
    return s3fs.S3FileSystem(
        **server.storage_options(), config_kwargs=config, skip_instance_cache=True, use_listings_cache=False, **more
    )


def breaks(action: Callable[[Server], object], server: Server) -> bool:
    """Whether the client's connection is broken or times out."""
    try:
        action(server)
    except BotoCoreError:
        return True
    return False
