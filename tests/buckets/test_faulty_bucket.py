"""Each fault does what it says, seen by boto3 and by s3fs."""

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
    """FaultyBucket over moto, with an object that lies there already."""
    moto.make_bucket(BUCKET)
    moto.client().put_object(Bucket=BUCKET, Key=KEY, Body=BODY)
    with faulty_bucket(moto) as proxy:
        yield proxy


def test_no_fault_changes_nothing_and_keeps_count(faulty: FaultyBucket) -> None:
    """Signed requests pass, boto3's and s3fs's; each is logged with its key and the bytes of its body."""
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
    """The connection breaks before the server sees anything, as often as was asked for."""
    faulty.add(Fault("reset", key="__0_0", times=2))
    assert [breaks(delete, faulty.server) for _ in range(2)] == [True, True]
    assert get(faulty.server) == BODY
    assert [request.status for request in faulty.requests(key="__0_0")] == [None, None, 200]


def test_a_reset_within_the_body_cuts_it_off(faulty: FaultyBucket) -> None:
    """The server gets so many bytes and then the end; a good one keeps the object that it had."""
    faulty.add(Fault("reset", method="PUT", at=1000))
    assert breaks(lambda server: put(server, b"new" * 1000), faulty.server)
    assert faulty.uploaded_bytes() == 1000
    assert get(faulty.server) == BODY


def test_a_hang_lasts_until_it_is_cleared(faulty: FaultyBucket) -> None:
    """Nothing comes back until then; then the connection breaks and the next one works."""
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
    """boto3 gives up by its own read time-out."""
    faulty.add(Fault("hang", at=1000))
    assert breaks(put, faulty.server)


def test_a_throttle_carries_so_many_bytes_a_second(faulty: FaultyBucket) -> None:
    """Two uploads at once share the link; what comes through is whole."""
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


def test_slow_down_comes_in_the_servers_place(faulty: FaultyBucket) -> None:
    """The client reads an S3 error; the server saw nothing; the connection stays good."""
    faulty.add(Fault("status", method="PUT", times=1))
    client = faulty.server.client()
    with pytest.raises(ClientError) as caught:
        client.put_object(Bucket=BUCKET, Key=KEY, Body=b"new")
    assert caught.value.response["Error"]["Code"] == "SlowDown"
    assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 503
    assert client.get_object(Bucket=BUCKET, Key=KEY)["Body"].read() == BODY
    assert faulty.uploaded_bytes() == 0


def test_a_lost_answer_hides_what_was_done(faulty: FaultyBucket) -> None:
    """The client sees a broken connection; the object is there."""
    faulty.add(Fault("lost_answer", method="PUT"))
    assert breaks(lambda server: put(server, b"new"), faulty.server)
    assert get(faulty.server) == b"new"
    assert [request.status for request in faulty.requests("PUT")] == [200]


def test_a_bit_flips_on_its_way_up(faulty: FaultyBucket) -> None:
    """A server that verifies nothing keeps the changed byte, and the client is told that all is well."""
    faulty.add(Fault("flip_request", method="PUT", at=7))
    put(faulty.server)
    stored = get(faulty.server)
    assert stored[7] == BODY[7] ^ 0x10
    assert stored[:7] + stored[8:] == BODY[:7] + BODY[8:]


def test_a_bit_flips_on_its_way_down(faulty: FaultyBucket) -> None:
    """One byte of the answer differs, its length does not; s3fs delivers a range of it without a word."""
    faulty.add(Fault("flip_answer", method="GET"))
    got = get(faulty.server)
    assert [at for at in range(len(BODY)) if got[at] != BODY[at]] == [len(BODY) // 2]
    assert filesystem(faulty.server).cat_file(f"{BUCKET}/{KEY}", start=0, end=2) == bytes([0, 1 ^ 0x10])


def test_a_short_answer_looks_whole(faulty: FaultyBucket) -> None:
    """The client gets a part and no error."""
    faulty.add(Fault("short_answer", method="GET", at=5))
    assert get(faulty.server) == BODY[:5]


def test_a_cut_answer_does_not_look_whole(faulty: FaultyBucket) -> None:
    """The connection ends before the length that was promised, and the client knows."""
    faulty.add(Fault("cut_answer", method="GET"))
    assert breaks(get, faulty.server)
    assert faulty.downloaded_bytes() == len(BODY) // 2


@pytest.mark.parametrize("how", ["refuse", "hang"])
def test_the_server_goes_away_and_comes_back(faulty: FaultyBucket, how: Literal["refuse", "hang"]) -> None:
    """While it is away nobody gets an answer, not even over an open connection; then all is as before."""
    client = faulty.server.client(timeout_s=1)
    client.list_buckets()
    faulty.away(how)
    with pytest.raises(BotoCoreError):
        client.list_buckets()
    assert breaks(get, faulty.server)
    faulty.back()
    assert client.get_object(Bucket=BUCKET, Key=KEY)["Body"].read() == BODY


def test_going_away_breaks_what_is_under_way(faulty: FaultyBucket) -> None:
    """An upload that has begun ends with a broken connection, at once."""
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
    """By method, key, query and number; the log tells which were hit."""
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
    """The same seed hits the same requests in a row, about as many as were asked for."""

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
