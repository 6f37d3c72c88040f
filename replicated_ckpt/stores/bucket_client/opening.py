"""The choice of a bucket's client: our own for S3 and for a directory, fsspec for everything else."""

import importlib.util
from dataclasses import replace
from typing import Any

from replicated_ckpt.stores.bucket_client.client import PART_BYTES, ObjectClient
from replicated_ckpt.stores.bucket_client.directory import DirectoryClient
from replicated_ckpt.stores.bucket_client.url import ObjectTarget, missing_package

_S3_SCHEMES = ("s3", "s3a")


def open_client(target: ObjectTarget, part_bytes: int = PART_BYTES) -> ObjectClient:
    """A client for a bucket. It sends no request yet. `part_bytes`: the least size of the parts of an upload to S3.

    S3 uses botocore, a dependency of s3fs, if it supports all options: it takes fewer copies and less CPU time than s3fs
    (docs/measurements.md has the figures). A directory uses system calls, without options. Anything else uses fsspec.
    Values from fsspec's configuration files apply where no option is given.

    Raises:
        ConfigInvalid: the package for this scheme is missing, or the options do not fit it.
    """
    if target.is_directory:
        return DirectoryClient(target)
    try:
        target = replace(target, options={**_read_configuration(target.scheme), **target.options})
    except ImportError as exc:
        raise missing_package(target, exc) from exc
    if target.scheme in _S3_SCHEMES and importlib.util.find_spec("botocore") is not None:
        from replicated_ckpt.stores.bucket_client.s3 import S3Client, can_honour

        if can_honour(target.options):
            return S3Client(target, part_bytes)
    from replicated_ckpt.stores.bucket_client.fsspec import FsspecClient

    return FsspecClient(target, part_bytes)


def _read_configuration(scheme: str) -> dict[str, Any]:
    """fsspec's own configuration of a scheme, as this process has it."""
    import fsspec.config  # imported late: without a bucket an agent's start saves 35 ms

    return dict(fsspec.config.conf.get(scheme, {}))
