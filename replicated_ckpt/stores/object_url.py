"""Where the object tier lies and how to get there: an fsspec URL and the options that fsspec's users give."""

import os
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from replicated_ckpt.errors import ConfigInvalid

PROCESS_LOCAL_SCHEMES = ("memory",)
_ENVIRONMENT_PREFIXES = ("AWS_", "GOOGLE_", "GCSFS_", "AZURE_", "FSSPEC_")
_SECRET_CHARS_MIN = 4


@dataclass(frozen=True)
class ObjectTarget:
    """A bucket, the prefix in it, and how to reach it. Its text never shows the options: they may hold secrets.

    `environment` are the variables of the process that named it, by which SDKs find credentials; see `Credentials` in
    docs/design.md.
    """

    url: str
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def checked(cls, url: str, options: Mapping[str, Any] | None) -> "ObjectTarget":
        """The target that a user named.

        Raises:
            ConfigInvalid: it is no URL of a place, or carries credentials, which would end up in manifests and logs.
        """
        if not isinstance(url, str) or not url.partition("://")[2].strip("/"):
            raise ConfigInvalid(f"object_store must be a URL such as s3://bucket/prefix, not {url!r}.")
        parts = urllib.parse.urlsplit(url)
        if "@" in parts.netloc and parts.scheme in ("s3", "s3a", "http", "https", "gs", "memory"):
            raise ConfigInvalid("object_store must not carry credentials.", "Pass them as storage_options.")
        if parts.query or parts.fragment:
            raise ConfigInvalid("object_store must be a plain URL, without ? or #.", "Pass options as storage_options.")
        return cls(url.rstrip("/"), dict(options or {}), _environment())

    @property
    def scheme(self) -> str:
        return self.url.partition("://")[0]

    @property
    def is_process_local(self) -> bool:
        """Whether what is put there is seen by this process alone."""
        return self.scheme in PROCESS_LOCAL_SCHEMES

    def scrubbed(self, text: str) -> str:
        """`text` without any value of the options or of the environment's secrets."""
        for secret in sorted(self._secrets(), key=len, reverse=True):
            text = text.replace(secret, "***")
        return text

    def _secrets(self) -> set[str]:
        found = set(_texts(self.options))
        found |= {value for name, value in self.environment.items() if "KEY" in name or "TOKEN" in name}
        plain = {self.url, *_plain_values(self.options)}
        return {value for value in found - plain if len(value) >= _SECRET_CHARS_MIN}

    def to_json(self) -> dict[str, Any]:
        return {"url": self.url, "options": dict(self.options), "environment": dict(self.environment)}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "ObjectTarget":
        """As `checked`, for what a rank of this node says. Raises ConfigInvalid, KeyError, TypeError, ValueError."""
        target = cls.checked(fields["url"], dict(fields["options"]))
        environment = {str(name): str(value) for name, value in dict(fields["environment"]).items()}
        kept = {name: value for name, value in environment.items() if name.startswith(_ENVIRONMENT_PREFIXES)}
        return cls(target.url, target.options, kept)


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_ENVIRONMENT_PREFIXES)}


def _texts(value: Any) -> "list[str]":
    """Every text in nested options."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for item in value.values() for text in _texts(item)]
    if isinstance(value, list | tuple):
        return [text for item in value for text in _texts(item)]
    return []


_PLAIN_OPTIONS = ("endpoint_url", "region_name", "profile", "protocol", "project", "account_name", "signature_version")


def _plain_values(options: Mapping[str, Any]) -> set[str]:
    """Values that an error must be able to name."""
    found = set()
    for name, value in options.items():
        if isinstance(value, Mapping):
            found |= _plain_values(value)
        elif name in _PLAIN_OPTIONS and isinstance(value, str):
            found.add(value)
    return found
