"""Incomplete, malformed, expired and renewed credentials of a bucket: errors name the cause, and renewed keys are used."""

import contextlib
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from replicated_ckpt.errors import ConfigInvalid, StoreDenied
from replicated_ckpt.stores.bucket_client.s3 import S3Client
from replicated_ckpt.stores.bucket_client.url import ObjectTarget
from replicated_ckpt.stores.peer.tls import server_context
from tests.agent.http.test_tls import certificate, needs_openssl
from tests.buckets.faults import Fault
from tests.buckets.faulty_bucket import faulty_bucket
from tests.buckets.servers import Server

KEYS = {"key": "AKIA-KEY", "secret": "very-secret", "token": "long-token"}


def without_keys(server: Server) -> dict[str, Any]:
    return {"client_kwargs": server.storage_options()["client_kwargs"]}


@pytest.mark.parametrize("code", ["ExpiredToken", "AccessDenied"])
def test_keys_that_are_renewed_in_their_file_are_used(
    moto: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    """After a refusal, the next request reads the credentials file again. No restart of the agent is needed."""
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)

    def write(key: str) -> None:
        file.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = very-secret\n")

    with faulty_bucket(moto) as proxy:
        url = f"s3://{moto.make_bucket(f'b-{uuid4().hex[:12]}')}/x"
        write("OLD")
        client = S3Client(ObjectTarget.check_supported(url, without_keys(proxy.server)))
        used: list[str] = []
        client.put("a", b"abc")
        proxy.add(Fault("status", status=403, code=code, times=1))
        with pytest.raises(StoreDenied, match=code):
            client.list_keys("")
        write("NEW")
        client.s3.meta.events.register("before-send.s3", lambda request, **_: used.append(str(request.headers)))
        assert client.list_keys("").sizes == {"a": 3}
    assert len(used) == 1
    assert "Credential=NEW/" in used[0]


@pytest.mark.parametrize(("name", "missing"), [("key", "secret"), ("secret", "key")])
def test_half_of_the_keys_is_refused(name: str, missing: str) -> None:
    """With only one of key and secret, the client raises an error that names the other. It does not complete the pair
    from a file.
    """
    with pytest.raises(ConfigInvalid, match=f"Partial credentials.*missing: aws_.*{missing}"):
        S3Client(ObjectTarget.check_supported("s3://bucket/x", {name: KEYS[name]}))


@pytest.mark.parametrize("name", KEYS)
def test_a_key_with_a_line_break_is_refused_and_not_shown(name: str) -> None:
    """A key with a trailing line break, as in many Kubernetes secrets, is refused. Neither that error nor HTTP's, which
    shows the header, contains the key.
    """
    target = ObjectTarget.check_supported("s3://bucket/x", {**KEYS, name: f"{KEYS[name]}\n"})
    with pytest.raises(ConfigInvalid, match="ends with a space or a line break") as raised:
        S3Client(target)
    assert KEYS[name] not in str(raised.value)
    assert KEYS[name] not in target.scrub(f"Invalid header value {target.options[name].encode()!r}")


@pytest.mark.parametrize("url", ["s3://my bucket/x", "s3://[bucket/x"])
def test_an_invalid_bucket_name_is_denied(moto: Server, url: str) -> None:
    """An invalid bucket name raises StoreDenied at once, in one line, like a missing bucket."""
    with pytest.raises(StoreDenied, match=r"Invalid bucket name.*Check the bucket's name") as raised:
        S3Client(ObjectTarget.check_supported(url, moto.storage_options())).list_keys("")
    assert "\n" not in str(raised.value)


@needs_openssl
@pytest.mark.parametrize("trouble", ["a private CA", "another host", "no such file"])
def test_an_untrusted_certificate_is_a_refusal(tmp_path: Path, trouble: str) -> None:
    """An untrusted certificate raises StoreDenied at once. The error names the variable and the option for the CA file."""
    pair = certificate(tmp_path, "another-host")
    verify = {"another host": pair[0], "no such file": str(tmp_path / "none.pem")}.get(trouble)
    context = server_context(*pair)
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as pool:

        def greet() -> None:
            with contextlib.suppress(OSError), listening.accept()[0] as connection:
                context.wrap_socket(connection, server_side=True)

        pool.submit(greet)
        options = {"endpoint_url": f"https://127.0.0.1:{listening.getsockname()[1]}", "verify": verify}
        client = S3Client(ObjectTarget.check_supported("s3://bucket/x", {**KEYS, "client_kwargs": options}))
        with pytest.raises(StoreDenied, match="AWS_CA_BUNDLE, or in storage_options as client_kwargs="):
            client.list_keys("")
        if trouble == "no such file":
            socket.create_connection(listening.getsockname()).close()  # the client never connected: this ends `accept`
