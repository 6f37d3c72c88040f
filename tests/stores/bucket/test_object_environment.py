"""Environment variables of a bucket: an exact list becomes options, only in the user's process."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from replicated_ckpt.errors import ConfigInvalid
from replicated_ckpt.node.state.upload_book import UploadBook
from replicated_ckpt.stores.bucket_client.url import SCHEMES, ObjectTarget, with_environment

KEYS = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_SESSION_TOKEN": "t"}
FOLDED = {"key": "k", "secret": "s", "token": "t"}
REFUSED = (
    "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_ROLE_ARN",
    "AWS_EC2_METADATA_SERVICE_ENDPOINT", "AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_ENDPOINT_URL_STS", "AWS_DATA_PATH",
    "BOTO_CONFIG", "GOOGLE_EXTERNAL_ACCOUNT_ALLOW_EXECUTABLES", "GCE_METADATA_HOST", "AZURE_AUTHORITY_HOST",
    "FSSPEC_CONFIG_DIR", "LD_PRELOAD", "HTTPS_PROXY",
)  # fmt: skip
GOOGLE = {"GOOGLE_APPLICATION_CREDENTIALS": "/sa", "GOOGLE_CLOUD_PROJECT": "p"}
AZURE = {"AZURE_STORAGE_ACCOUNT_NAME": "n", "AZURE_STORAGE_ACCOUNT_KEY": "k"}


@pytest.mark.parametrize(
    ("scheme", "given", "environment", "options"),
    [
        ("s3", {}, KEYS, FOLDED),
        ("s3a", {}, {**KEYS, "AWS_PROFILE": "p"}, {**FOLDED, "profile": "p"}),
        ("s3", {"key": "mine", "secret": "x"}, KEYS, {"key": "mine", "secret": "x"}),
        ("s3", {"profile": "mine"}, {**KEYS, "AWS_PROFILE": "p"}, {"profile": "mine"}),
        ("s3", {"anon": True}, KEYS, {"anon": True}),
        ("s3", {}, {"AWS_ENDPOINT_URL": "a", "AWS_ENDPOINT_URL_S3": "b"}, {"endpoint_url": "b"}),
        ("s3", {"endpoint_url": "mine"}, {"AWS_ENDPOINT_URL": "a"}, {"endpoint_url": "mine"}),
        (
            "s3",
            {"client_kwargs": {"endpoint_url": "mine", "region_name": "r"}},
            {"AWS_ENDPOINT_URL": "a", "AWS_DEFAULT_REGION": "x"},
            {"client_kwargs": {"endpoint_url": "mine", "region_name": "r"}},
        ),
        (
            "s3",
            {"client_kwargs": {"verify": False}},
            {"AWS_DEFAULT_REGION": "x", "AWS_CA_BUNDLE": "/ca"},
            {"client_kwargs": {"verify": False, "region_name": "x"}},
        ),
        ("s3", {}, {"AWS_CA_BUNDLE": "/ca"}, {"client_kwargs": {"verify": "/ca"}}),
        ("gs", {}, {"AWS_CA_BUNDLE": "/ca"}, {}),
        ("s3", {}, {**KEYS, "FSSPEC_S3_KEY": "f", "FSSPEC_S3": '{"secret": "g"}'}, {"key": "f", "secret": "g"}),
        ("s3", {"key": "mine"}, {"FSSPEC_S3_KEY": "f"}, {"key": "mine"}),
        ("gs", {}, {**KEYS, **GOOGLE}, {"token": "/sa", "project": "p"}),
        ("az", {}, AZURE, {"account_name": "n", "account_key": "k"}),
        ("abfs", {"credential": "c"}, {"AZURE_STORAGE_SAS_TOKEN": "s"}, {"credential": "c"}),
        ("file", {}, {**KEYS, "FSSPEC_S3_KEY": "f"}, {}),
        ("s3", {}, {"AWS_ACCESS_KEY_ID": "", "AWS_DEFAULT_REGION": ""}, {}),
        *((scheme, {}, dict.fromkeys(REFUSED, "/x"), {}) for scheme in SCHEMES),
    ],
)  # fmt: skip
def test_listed_variables_become_options(
    scheme: str, given: Mapping[str, Any], environment: Mapping[str, str], options: Mapping[str, Any]
) -> None:
    """The user's options take precedence, credentials come all from one source, and no unlisted variable is read."""
    assert with_environment(scheme, given, environment) == options


@pytest.mark.parametrize(
    "url", ["ssh://h/x", "sftp://h/x", "github://o:r@/x", "simplecache::s3://b/x", "file::s3://b/x", "zip://x", "S3://b/x",
            "http://h/x", "hdfs://h/x", "reference://x/y", "s3 ://b/x", "://b/x"],
)  # fmt: skip
def test_an_unlisted_scheme_is_refused(url: str) -> None:
    """Only listed schemes are accepted. fsspec's archives, shells and caches are refused."""
    with pytest.raises(ConfigInvalid, match=r"one of s3|must be a URL"):
        ObjectTarget.check_supported(url, None)
    with pytest.raises(ConfigInvalid, match=r"one of s3|must be a URL"):
        ObjectTarget.from_json({"url": url, "options": {}})


def test_an_agent_takes_no_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent uses only the options that it receives. It neither reads nor changes its own environment."""
    for name, value in {**KEYS, "AWS_CA_BUNDLE": ""}.items():
        monkeypatch.setenv(name, value)
    told = ObjectTarget.check_supported("s3://b/x", None)
    assert told.options == FOLDED
    assert told.to_json() == {"url": "s3://b/x", "options": FOLDED}
    with pytest.raises(ConfigInvalid, match="environment"):
        ObjectTarget.from_json({**told.to_json(), "environment": {"AWS_PROFILE": "x"}})
    before = dict(os.environ)
    assert UploadBook(tmp_path).learn(ObjectTarget.from_json({"url": "s3://b/x", "options": {"key": "other"}}))
    assert UploadBook(tmp_path)._target_by_url == {"s3://b/x": ObjectTarget("s3://b/x", {"key": "other"})}
    assert dict(os.environ) == before


def test_no_secret_of_the_environment_is_in_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys from the environment are scrubbed from messages like those from options."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIASECRET")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "verysecret")
    target = ObjectTarget.check_supported("s3://b/x", None)
    assert target.scrub("AKIASECRET verysecret s3://b/x") == "*** *** s3://b/x"
    assert "secret" not in repr(target)
