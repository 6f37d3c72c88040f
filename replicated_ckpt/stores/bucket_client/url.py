"""The address of the object tier: an fsspec URL, and options as fsspec's users pass them."""

import contextlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from replicated_ckpt.core.layout import NODE_NAME
from replicated_ckpt.errors import ConfigInvalid
from replicated_ckpt.stores.files.existence import is_there

_S3_CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_SESSION_TOKEN": "token",
    "AWS_PROFILE": "profile",
}
_GOOGLE_CREDENTIALS = {"GOOGLE_APPLICATION_CREDENTIALS": "token"}
_AZURE_CREDENTIALS = {
    "AZURE_STORAGE_ACCOUNT_KEY": "account_key",
    "AZURE_STORAGE_CONNECTION_STRING": "connection_string",
    "AZURE_STORAGE_SAS_TOKEN": "sas_token",
    "AZURE_STORAGE_CLIENT_ID": "client_id",
    "AZURE_STORAGE_CLIENT_SECRET": "client_secret",
    "AZURE_STORAGE_TENANT_ID": "tenant_id",
}
_S3_PLACES = {"AWS_ENDPOINT_URL": "endpoint_url", "AWS_ENDPOINT_URL_S3": "endpoint_url"}
_GOOGLE_PLACES = {"GOOGLE_CLOUD_PROJECT": "project"}
_AZURE_PLACES = {"AZURE_STORAGE_ACCOUNT_NAME": "account_name"}
_VARIABLES: Mapping[str, tuple[Mapping[str, str], Mapping[str, str]]] = {
    **dict.fromkeys(("s3", "s3a"), (_S3_CREDENTIALS, _S3_PLACES)),
    **dict.fromkeys(("gs", "gcs"), (_GOOGLE_CREDENTIALS, _GOOGLE_PLACES)),
    **dict.fromkeys(("az", "abfs", "abfss"), (_AZURE_CREDENTIALS, _AZURE_PLACES)),
}
"""Option by variable, for each scheme: credentials, then places. Credentials are taken only if the user has passed none and
no `anon`. Each place, such as an endpoint, is taken on its own. If two variables set one option, the later one wins.
"""
_S3_CLIENT = {"AWS_DEFAULT_REGION": "region_name", "AWS_CA_BUNDLE": "verify"}
"""Option by variable, of the options that s3fs takes in `client_kwargs`."""


def with_environment(scheme: str, given: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """The options of a user, completed from environment variables.

    fsspec's own variables (FSSPEC_S3_KEY and the like) take precedence over those of an SDK.
    """
    options = {**_of_fsspec(scheme, environment), **given}
    inner = dict(options.get("client_kwargs") or {})
    credentials, places = _VARIABLES.get(scheme, ({}, {}))
    wanted = {variable: name for variable, name in places.items() if name not in options and name not in inner}
    # All or none: a key from the options and a secret from the environment would not fit together.
    if options.keys().isdisjoint({*credentials.values(), "anon", "credential"}):
        wanted |= credentials
    options |= {name: environment[variable] for variable, name in wanted.items() if environment.get(variable)}
    if scheme in ("s3", "s3a"):
        found = {name: environment[variable] for variable, name in _S3_CLIENT.items() if environment.get(variable)}
        if found:
            options["client_kwargs"] = {**found, **inner}
    return options


def _of_fsspec(scheme: str, environment: Mapping[str, str]) -> dict[str, Any]:
    names = (f"FSSPEC_{scheme.upper()}", f"FSSPEC_{scheme.upper()}_")
    mine = {name: text for name, text in environment.items() if name == names[0] or name.startswith(names[1])}
    if not mine:
        return {}
    import fsspec.config  # imported late: other processes' starts save 35 ms

    found: dict[str, dict[str, Any]] = {}
    fsspec.config.set_conf_env(found, mine)
    return found.get(scheme, {})


SCHEMES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oci", "oss", "file", "local", "memory")
"""Schemes of buckets. fsspec has others, such as archives, caches and shells, which are no buckets."""
_DIRECTORIES = ("file", "local")
PROCESS_LOCAL_SCHEMES = ("memory",)
_SECRET_CHARS_MIN = 4


@dataclass(frozen=True)
class ObjectTarget:
    """A bucket, a prefix in it, and options to reach it. `repr` omits the options, which may hold secrets.

    The options include those from the environment of the user's process; see `Credentials` in docs/object-store.md.
    """

    url: str
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def check_supported(cls, url: str, options: Mapping[str, Any] | None) -> "ObjectTarget":
        """The target that the user of this process named, with options from this process's environment.

        Raises:
            ConfigInvalid: `url` is not a URL of a bucket, or carries credentials, which would appear in manifests and logs.
        """
        target = cls._plain(url, options)
        return cls(target.url, with_environment(target.scheme, target.options, os.environ))

    @classmethod
    def check_given(cls, url: str | None, options: Mapping[str, Any] | None) -> "ObjectTarget | None":
        """As `check_supported`; None if no bucket is named. Raises: ConfigInvalid, also for options without a bucket."""
        if url is not None:
            return cls.check_supported(url, options)
        if options:
            raise ConfigInvalid('storage_options needs object_store, such as "s3://bucket/prefix".')
        return None

    @classmethod
    def _plain(cls, url: str, options: Mapping[str, Any] | None) -> "ObjectTarget":
        if not isinstance(url, str) or not url.partition("://")[2].strip("/"):
            raise ConfigInvalid(f"object_store must be a URL such as s3://bucket/prefix, not {url!r}.")
        scheme, _, place = url.partition("://")
        if scheme not in SCHEMES:
            raise ConfigInvalid(
                f"object_store has the scheme {scheme[:80]!r}, but must have one of {', '.join(SCHEMES)}."
            )
        if scheme in _DIRECTORIES and not place.startswith("/"):
            hint = f"Pass its absolute path, such as {scheme}:///share/checkpoints, the same on all nodes."
            raise ConfigInvalid(f"object_store {url!r} is a relative path, but agents run in another directory.", hint)
        if "@" in place.partition("/")[0] and scheme in ("s3", "s3a", "gs", "memory"):
            raise ConfigInvalid("object_store must not contain credentials.", "Pass them as storage_options.")
        if "?" in url or "#" in url:
            raise ConfigInvalid("object_store must be a plain URL, without ? or #.", "Pass options as storage_options.")
        if not url.isprintable() or url != url.strip():
            raise ConfigInvalid(
                f"object_store begins or ends with a space, or contains a line break or control character: {url!r}."
            )
        return cls(url.rstrip("/"), dict(options or {}))

    @property
    def scheme(self) -> str:
        return self.url.partition("://")[0]

    @property
    def is_directory(self) -> bool:
        """Whether it is a directory of a file system, which all nodes mount."""
        return self.scheme in _DIRECTORIES

    def check_is_apart(self, root: str | os.PathLike[str] | None) -> None:
        """Raises ConfigInvalid: the bucket is a node's store, or it and `root` lie one inside the other.

        Each would treat the other's files as its own: to a node, the mark in a bucket's `.metadata` is damage. With
        `root` None only the first condition is checked.
        """
        if not self.is_directory:
            return
        there = Path(os.path.realpath(self.url.partition("://")[2]))
        with contextlib.suppress(OSError):  # an unreadable path is reported by the first read or write
            if is_there(there / NODE_NAME):
                hint = "Pass another directory. To read that store, pass it as root (--root of a command)."
                raise ConfigInvalid(f"object_store={self.url!r} is a node's store, not a bucket.", hint)
        if root is None:
            return
        here = Path(os.path.realpath(root))
        if there.is_relative_to(here) or here.is_relative_to(there):
            raise ConfigInvalid(
                f"object_store={self.url!r} and the root {os.fspath(root)!r} lie one inside the other.",
                "Pass two separate directories: the bucket on a share that all nodes reach, the root on a local disk.",
            )

    @property
    def is_process_local(self) -> bool:
        """Whether only this process sees its objects."""
        return self.scheme in PROCESS_LOCAL_SCHEMES

    def scrub(self, text: str) -> str:
        """The text without any value of the options."""
        # Longest first: a secret that contains another one would be left in pieces.
        for secret in sorted(self._secrets(), key=len, reverse=True):
            text = text.replace(secret, "***")
        return text

    def _secrets(self) -> set[str]:
        found = set(_texts(self.options))
        plain = {self.url, *_plain_values(self.options)}
        # Replacing a very short value would make every error unreadable.
        return {value for value in found - plain if len(value) >= _SECRET_CHARS_MIN}

    def to_json(self) -> dict[str, Any]:
        return {"url": self.url, "options": dict(self.options)}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "ObjectTarget":
        """The target that a process of this node's user sent, without this process's environment.

        Raises:
            ConfigInvalid: the fields have environment variables, which agents refuse; else as `check_supported`.
            KeyError, TypeError, ValueError: the fields are invalid.
        """
        if fields.get("environment"):
            raise ConfigInvalid(
                "An agent takes no environment variables.", "Pass what the client needs as storage_options."
            )
        return cls._plain(fields["url"], dict(fields["options"]))


def _texts(value: Any) -> "list[str]":
    """Every string in nested options."""
    if isinstance(value, str):
        return [value.strip()]  # an error quotes a final line break as two characters
    if isinstance(value, Mapping):
        return [text for item in value.values() for text in _texts(item)]
    if isinstance(value, list | tuple):
        return [text for item in value for text in _texts(item)]
    return []


_PLAIN_OPTIONS = (
    "endpoint_url", "region_name", "verify", "profile", "protocol", "project", "account_name", "signature_version",
)  # fmt: skip


def _plain_values(options: Mapping[str, Any]) -> set[str]:
    """Option values that are no secrets, and that errors may name."""
    found = set()
    for name, value in options.items():
        if isinstance(value, Mapping):
            found |= _plain_values(value)
        elif name in _PLAIN_OPTIONS and isinstance(value, str):
            found.add(value)
    return found


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
    """The error if the package for a bucket is not installed. Its hint is the command that installs it."""
    package = _PACKAGE_BY_SCHEME.get(target.scheme, "fsspec")
    return ConfigInvalid(
        f"{target.url} needs the package {package}, which this Python cannot import: {target.scrub(str(why))[:300]}.",
        f"`{sys.executable} -m pip install {package}` on every node: ranks and agents use it.",
    )
