"""The effect of each fault on boto3 and on s3fs."""

import threading
import time
from collections.abc import Iterator
from typing import Literal

import pytest
from botocore.exceptions import BotoCoreError, ClientError

from tests.buckets.clients import BODY, BUCKET, ELSEWHERE, KEY, breaks, filesystem, get, put
from tests.buckets.faulty_bucket import Fault, FaultyBucket, faulty_bucket
from tests.buckets.servers import Server


@pytest.fixture
def faulty(moto: Server) -> Iterator[FaultyBucket]:
    """A FaultyBucket in front of moto, with one object."""
    moto.make_bucket(BUCKET)
    moto.client().put_object(Bucket=BUCKET, Key=KEY, Body=BODY)
    with faulty_bucket(moto) as proxy:
        yield proxy


def test_without_faults_requests_pass_and_are_counted(faulty: FaultyBucket) -> None:
    """Signed requests of boto3 and s3fs pass. Each is logged with its key and the size of its body."""
    put(faulty.server)
    assert get(faulty.server) == BODY
    files = filesystem(faulty.server)
    files.pipe_file(f"{BUCKET}/{ELSEWHERE}", BODY[:100])
    assert files.cat_file(f"{BUCKET}/{ELSEWHERE}") == BODY[:100]
    assert (faulty.uploaded_bytes("__0_0"), faulty.uploaded_bytes(".metadata")) == (len(BODY), 100)
    assert faulty.downloaded_bytes("__0_0") == len(BODY)
    assert [request.status for request in faulty.requests("PUT")] == [200, 200]


def delete(server: Server) -> None:
    server.client().delete_object(Bucket=BUCKET, Key=KEY)


def put_patiently(server: Server) -> None:
    server.client(timeout_s=60).put_object(Bucket=BUCKET, Key=KEY, Body=BODY)


def test_a_reset_reaches_the_client_and_not_the_server(faulty: FaultyBucket) -> None:
    """The connection breaks before the server gets anything, `times` times."""
    faulty.add(Fault("reset", key="__0_0", times=2))
    assert [breaks(delete, faulty.server) for _ in range(2)] == [True, True]
    assert get(faulty.server) == BODY
    assert [request.status for request in faulty.requests(key="__0_0")] == [None, None, 200]


def test_a_reset_within_the_body_cuts_it_off(faulty: FaultyBucket) -> None:
    """The server gets `at` bytes and then EOF. A good server keeps its earlier object."""
    faulty.add(Fault("reset", method="PUT", at=1000))
    assert breaks(lambda server: put(server, b"new" * 1000), faulty.server)
    assert faulty.uploaded_bytes() == 1000
    assert get(faulty.server) == BODY


def test_a_hang_lasts_until_it_is_cleared(faulty: FaultyBucket) -> None:
    """No answer arrives before `clear`. Then the connection breaks, and the next one works."""
    faulty.add(Fault("hang"))
    seen: list[bool] = []
    client = threading.Thread(
        target=lambda: seen.append(breaks(lambda server: server.client().list_buckets(), faulty.server))
    )
    client.start()
    client.join(timeout=0.3)
    assert client.is_alive()
    faulty.clear()
    client.join(timeout=10)
    assert seen == [True]
    assert get(faulty.server) == BODY


def test_a_hang_is_a_time_out_to_the_client(faulty: FaultyBucket) -> None:
    """boto3 stops at its own read time-out."""
    faulty.add(Fault("hang", at=1000))
    assert breaks(put, faulty.server)


def test_a_throttle_limits_the_bytes_a_second(faulty: FaultyBucket) -> None:
    """Two concurrent uploads share the link, and both are complete."""
    faulty.add(Fault("throttle", bytes_per_s=1e6))
    began = time.monotonic()
    both = [threading.Thread(target=put, args=(faulty.server,)) for _ in range(2)]
    for one in both:
        one.start()
    for one in both:
        one.join(timeout=30)
    assert time.monotonic() - began >= 2 * len(BODY) / 1e6 - 0.1
    faulty.clear()
    assert get(faulty.server) == BODY


def test_slow_down_is_answered_in_place_of_the_server(faulty: FaultyBucket) -> None:
    """The client gets an S3 error, the server gets nothing, and the connection can be used again."""
    faulty.add(Fault("status", method="PUT", times=1))
    client = faulty.server.client()
    with pytest.raises(ClientError) as caught:
        client.put_object(Bucket=BUCKET, Key=KEY, Body=b"new")
    assert caught.value.response["Error"]["Code"] == "SlowDown"
    assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 503
    assert client.get_object(Bucket=BUCKET, Key=KEY)["Body"].read() == BODY
    assert faulty.uploaded_bytes() == 0


def test_a_lost_answer_hides_a_completed_request(faulty: FaultyBucket) -> None:
    """The client's connection breaks, but the object is stored."""
    faulty.add(Fault("lost_answer", method="PUT"))
    assert breaks(lambda server: put(server, b"new"), faulty.server)
    assert get(faulty.server) == b"new"
    assert [request.status for request in faulty.requests("PUT")] == [200]


def test_a_bit_of_an_upload_flips(faulty: FaultyBucket) -> None:
    """A server without checks stores the changed byte, and reports success."""
    faulty.add(Fault("flip_request", method="PUT", at=7))
    put(faulty.server)
    stored = get(faulty.server)
    assert stored[7] == BODY[7] ^ 0x10
    assert stored[:7] + stored[8:] == BODY[:7] + BODY[8:]


def test_a_bit_of_a_download_flips(faulty: FaultyBucket) -> None:
    """One byte of the answer differs, its length does not. s3fs returns the changed range without an error."""
    faulty.add(Fault("flip_answer", method="GET"))
    got = get(faulty.server)
    assert [at for at in range(len(BODY)) if got[at] != BODY[at]] == [len(BODY) // 2]
    assert filesystem(faulty.server).cat_file(f"{BUCKET}/{KEY}", start=0, end=2) == bytes([0, 1 ^ 0x10])


def test_a_short_answer_looks_complete(faulty: FaultyBucket) -> None:
    """The client gets a part of the body, and no error."""
    faulty.add(Fault("short_answer", method="GET", at=5))
    assert get(faulty.server) == BODY[:5]


def test_a_cut_answer_does_not_look_complete(faulty: FaultyBucket) -> None:
    """The connection ends before the announced length, and the client raises an error."""
    faulty.add(Fault("cut_answer", method="GET"))
    assert breaks(get, faulty.server)
    assert faulty.downloaded_bytes() == len(BODY) // 2


@pytest.mark.parametrize("how", ["refuse", "hang"])
def test_the_server_goes_away_and_comes_back(faulty: FaultyBucket, how: Literal["refuse", "hang"]) -> None:
    """Meanwhile no request is answered, not even over an open connection. Afterwards requests work again."""
    client = faulty.server.client(timeout_s=1)
    client.list_buckets()
    faulty.away(how)
    with pytest.raises(BotoCoreError):
        client.list_buckets()
    assert breaks(get, faulty.server)
    faulty.back()
    assert client.get_object(Bucket=BUCKET, Key=KEY)["Body"].read() == BODY


def test_going_away_breaks_requests_in_progress(faulty: FaultyBucket) -> None:
    """An upload in progress ends at once with a broken connection."""
    faulty.add(Fault("throttle", bytes_per_s=1e4))
    seen: list[bool] = []
    client = threading.Thread(target=lambda: seen.append(breaks(put_patiently, faulty.server)))
    client.start()
    while not faulty.uploaded_bytes():
        time.sleep(0.01)
    faulty.away()
    client.join(timeout=10)
    assert seen == [True]


def test_faults_choose_their_requests(faulty: FaultyBucket) -> None:
    """A fault selects requests by method, key, query and number. The log has the fault of each request."""
    hit = faulty.add(Fault("status", method="GET", key="__0_0", query="versionId=x", skip=1, times=1))
    client = faulty.server.client()
    client.head_object(Bucket=BUCKET, Key=KEY)
    client.get_object(Bucket=BUCKET, Key=KEY)
    codes = []
    for _ in range(3):
        with pytest.raises(ClientError) as caught:
            client.get_object(Bucket=BUCKET, Key=KEY, VersionId="x")
        codes.append(caught.value.response["Error"]["Code"] == "SlowDown")
    assert codes == [False, True, False]
    assert hit.fired == 1
    assert [bool(request.fault) for request in faulty.requests()] == [False, False, False, True, False]


def test_chance_is_repeatable(moto: Server) -> None:
    """The same seed selects the same requests, about as many as `probability` says."""

    def draw() -> list[bool]:
        with faulty_bucket(moto) as faulty:
            faulty.add(Fault("status", probability=0.5, seed=3))
            client = faulty.server.client()
            for _ in range(40):
                try:
                    client.list_buckets()
                except ClientError:
                    continue
            return [bool(request.fault) for request in faulty.requests()]

    first = draw()
    assert first == draw()
    assert 8 < sum(first) < 32
