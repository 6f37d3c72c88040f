"""Which package speaks to which kind of bucket, for the error where it is missing."""

import sys

from replicated_ckpt.errors import ConfigInvalid
from replicated_ckpt.stores.bucket_client.url import ObjectTarget

_PACKAGE_BY_SCHEME = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "oci": "ocifs",
    "oss": "ossfs",
}


def missing_package(target: ObjectTarget, why: ImportError) -> ConfigInvalid:
    """The error where the package for a bucket is not installed; its hint is the line that installs it."""
    package = _PACKAGE_BY_SCHEME.get(target.scheme, "fsspec")
    return ConfigInvalid(
        f"{target.url} needs the package {package}, which this Python cannot import: {target.scrub(str(why))[:300]}.",
        f"`{sys.executable} -m pip install {package}` on every node: ranks and agents use it.",
    )
