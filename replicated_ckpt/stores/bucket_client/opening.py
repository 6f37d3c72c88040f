"""Which client speaks to which bucket: our own for S3 and for a directory, fsspec for everything else."""

import importlib.util
from dataclasses import replace
from typing import Any

from replicated_ckpt.stores.bucket_client.client import ObjectClient
from replicated_ckpt.stores.bucket_client.directory import DirectoryClient
from replicated_ckpt.stores.bucket_client.url import ObjectTarget, missing_package

_S3_SCHEMES = ("s3", "s3a")


def open_client(target: ObjectTarget) -> ObjectClient:
    """A client for a bucket. Nothing is asked of the bucket yet.

    S3 by botocore, which s3fs brings along, wherever the options are ones that it can honour: fewer copies and less CPU
    time than s3fs (docs/measurements.md has the figures). A directory by system calls, without options. Anything else by
    fsspec. What fsspec's configuration has for the scheme, in its files, holds where no option is given.

    Raises:
        ConfigInvalid: no package here speaks this scheme, or the options do not fit it.
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
            return S3Client(target)
    from replicated_ckpt.stores.bucket_client.fsspec import FsspecClient

    return FsspecClient(target)


def _read_configuration(scheme: str) -> dict[str, Any]:
    """fsspec's own configuration of a scheme, as this process has it."""
    import fsspec.config  # by a process that has a bucket: it costs every start of an agent 35 ms

    return dict(fsspec.config.conf.get(scheme, {}))
