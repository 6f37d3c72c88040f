"""A bucket with a hostile server: listings, sizes, answers and redirects over the wire, with each of the S3 clients."""

import gzip
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from socketserver import BaseRequestHandler, ThreadingTCPServer

import pytest
import s3fs

from replicated_ckpt.errors import ReplicatedCkptError, StoreError
from replicated_ckpt.stores.bucket.bucket import Bucket
from replicated_ckpt.stores.bucket_client import body as bodies
from replicated_ckpt.stores.bucket_client import fsspec as fsspec_client
from replicated_ckpt.stores.bucket_client import s3
from replicated_ckpt.stores.bucket_client.client import Listing, ObjectClient
from replicated_ckpt.stores.bucket_client.fsspec import FsspecClient
from replicated_ckpt.stores.bucket_client.s3 import S3Client
from replicated_ckpt.stores.bucket_client.url import ObjectTarget
from tests.buckets.servers import Server
from tests.buckets.wire import Head, read_head
from tests.fault.hostile.test_hostile_peers import memory_at_most
from tests.stopwatch import Stopwatch

pytestmark = [pytest.mark.fault, pytest.mark.timeout(120)]
Reply = Callable[[Head], Iterator[bytes]]
KINDS: dict[str, Callable[[ObjectTarget], ObjectClient]] = {"s3": S3Client, "s3fs": FsspecClient}
SECRET_ELSEWHERE = b"what another host holds"


@contextmanager
def serving(reply: Reply) -> Iterator[tuple[Server, list[str]]]:
    """A server that answers each request with `reply`. Yields the server and the request lines that it received."""
    asked: list[str] = []

    class Connection(BaseRequestHandler):
        def handle(self) -> None:
            with suppress(OSError), self.request.makefile("rb") as incoming:
                while (head := read_head(incoming)) is not None:
                    asked.append(" ".join(head.first[:2]))
                    first = b""
                    for piece in reply(head):
                        first = first or piece
                        self.request.sendall(piece)
                    if b"Connection: close" in first:
                        return

    class Listener(ThreadingTCPServer):
        daemon_threads = True

    with Listener(("127.0.0.1", 0), Connection) as listener:
        threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        try:
            yield Server(f"http://127.0.0.1:{listener.server_address[1]}", "key", "secret-of-the-key"), asked
        finally:
            listener.shutdown()


@pytest.fixture(autouse=True)
def one_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """s3fs retries on top of its client's retries, and only the package limits its listings."""
    monkeypatch.setattr(fsspec_client, "LIST_TIMEOUT_S", 3.0)
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)


@contextmanager
def client_of(kind: str, reply: Reply) -> Iterator[tuple[ObjectClient, list[str]]]:
    with serving(reply) as (server, asked):
        options = {
            **server.storage_options(),
            "config_kwargs": {"retries": {"total_max_attempts": 1}, "read_timeout": 1},
        }
        client = KINDS[kind](ObjectTarget.check_supported("s3://bucket/runs/one", options))
        try:
            yield client, asked
        finally:
            client.close()


def answer(body: bytes, status: str = "200 OK", *heads: str) -> Iterator[bytes]:
    lines = [f"HTTP/1.1 {status}", "Content-Type: application/xml", f"Content-Length: {len(body)}", *heads]
    yield "\r\n".join([*lines, "", ""]).encode() + body


def page(inside: str, *, more: str | None = None) -> bytes:
    """A page of a listing. `more`: the token of the next page."""
    is_cut = "true" if more is not None else "false"
    token = f"<NextContinuationToken>{more}</NextContinuationToken>" if more else ""
    return (
        f'<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>bucket</Name>'
        f"<IsTruncated>{is_cut}</IsTruncated>{token}{inside}</ListBucketResult>"
    ).encode()


def entry(key: str, size: object = 1) -> str:
    return f"<Contents><Key>{key}</Key><LastModified>2026-01-01T00:00:00Z</LastModified><Size>{size}</Size></Contents>"


def prefix(key: str) -> str:
    return f"<CommonPrefixes><Prefix>{key}</Prefix></CommonPrefixes>"


def always(body: bytes, status: str = "200 OK", *heads: str) -> Reply:
    return lambda head: answer(body, status, *heads)


def numbered_pages(inside: Callable[[int], str]) -> Reply:
    numbers = count()

    def reply(head: Head) -> Iterator[bytes]:
        number = next(numbers)
        return answer(page(inside(number), more=f"t{number}"))

    return reply


def endless(head: Head) -> Iterator[bytes]:
    yield b"HTTP/1.1 200 OK\r\nContent-Type: application/xml\r\nConnection: close\r\n\r\n"
    while True:
        yield b" " * (1 << 20)


BOMB = '<!DOCTYPE a [<!ENTITY a0 "ha">' + "".join(f'<!ENTITY a{n} "{f"&a{n - 1};" * 10}">' for n in range(1, 12)) + "]>"
OUTSIDE = '<!DOCTYPE a [<!ENTITY x SYSTEM "file:///etc/passwd">]>'
LISTINGS: dict[str, Reply] = {
    "a token that repeats": always(page(entry("runs/one/x"), more="same")),
    "more without a token": always(page(entry("runs/one/x"), more="")),
    "a size that is none": always(page(entry("runs/one/x", "many"))),
    "no size": always(page("<Contents><Key>runs/one/x</Key></Contents>")),
    "no key": always(page("<Contents><Size>1</Size></Contents>")),
    "an entity bomb": always(page("&a11;").replace(b"?>", b"?>" + BOMB.encode(), 1)),
    "a file as an entity": always(page(entry("runs/one/&x;")).replace(b"?>", b"?>" + OUTSIDE.encode(), 1)),
    "no XML": always(b"\0" * 100),
    "deep XML": always(b"<a>" * 100_000),
    "an empty body": always(b""),
    "a length below zero": always(b"", "200 OK", "Content-Length: -5"),
    "a page cut short": lambda head: iter([b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\nConnection: close\r\n\r\n<a>"]),
    "no HTTP": lambda head: iter([b"\0" * 64]),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("listing", LISTINGS)
def test_a_listing_is_read_or_raises_an_error_of_the_package(kind: str, listing: str, stopwatch: Stopwatch) -> None:
    """Whatever the server answers, a listing soon returns keys, or raises an error of the package."""
    began = stopwatch.now()
    with client_of(kind, LISTINGS[listing]) as (client, _), memory_at_most(1 << 30):
        try:
            found = client.list_keys("step-1/")
        except ReplicatedCkptError:
            found = Listing()
        assert all(type(size) is int and size >= 0 for size in found.sizes.values()), found
        assert "root:" not in str(found)
    assert stopwatch.now() - began < 60


ENDLESS: dict[str, Reply] = {
    "a body": endless,
    "an error": lambda head: iter([b"HTTP/1.1 403 No\r\nConnection: close\r\n\r\n", *[b" " * (1 << 20)] * 200]),
    "pages with names": numbered_pages(lambda n: "".join(entry(f"runs/one/step-1/{n}-{i}") for i in range(1000))),
    "pages without": numbered_pages(lambda n: ""),
}


@pytest.mark.parametrize("listing", ENDLESS)
def test_a_listing_without_end_takes_neither_memory_nor_time(listing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the limit that was exceeded."""
    monkeypatch.setattr(s3, "LISTED_MAX", 5_000)
    monkeypatch.setattr(bodies, "PAGES_MAX", 50)
    with client_of("s3", ENDLESS[listing]) as (client, asked), memory_at_most(1 << 30):
        with pytest.raises(StoreError, match=r"answers with more than|has more than") as raised:
            client.list_keys("step-1/")
        assert "has more than" not in raised.value.detail or "their own prefix" in raised.value.hint
        with pytest.raises(StoreError):
            client.end_unfinished("", 0)
    assert len(asked) < 120


ESCAPES = ["../x", "runs/one/../../x", "runs/one/..", "runs/onex/y", "runs/one/step-1/\x7f", "/etc/passwd", ""]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("key", [*ESCAPES, "runs/one/" + "k" * 100_000, "runs/one/a/b/c/__0_0.distcp"])
def test_keys_outside_the_prefix_are_no_checkpoints(kind: str, key: str) -> None:
    """A key outside of the prefix is ignored or raises an error, and no request goes beyond the prefix."""

    def reply(head: Head) -> Iterator[bytes]:
        if "list-type=2" not in head.first[1]:
            return answer(b"x" * 4096, "206 Partial Content")
        return answer(page(entry(key) + prefix(f"{key}/") + entry("runs/one/.metadata", 4096)))

    with client_of(kind, reply) as (client, asked):
        try:
            found = Bucket(client).saves()
        except ReplicatedCkptError:
            found = ()
        assert all(save.mark is None for save in found)
    assert len(asked) < 100
    paths = [urllib.parse.unquote(line.split(" ")[1].partition("?")[0]) for line in asked]
    assert all(path in ("/bucket", "/bucket/") or path.startswith("/bucket/runs/one/") for path in paths), paths
    assert not [path for path in paths if ".." in path]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "307 Temporary"])
def test_no_redirect_leads_to_another_host(kind: str, status: str) -> None:
    """The clients send no credentials to another host, and return none of its content. A cloud's metadata service is
    such a host.
    """
    with serving(always(SECRET_ELSEWHERE)) as (elsewhere, asked_there):
        head = (f"Location: {elsewhere.endpoint_url}/bucket/x", "x-amz-bucket-region: 127.0.0.1/#")
        with client_of(kind, always(b"", status, *head)) as (client, _):
            with pytest.raises(ReplicatedCkptError):
                client.list_keys("step-1/")
            with pytest.raises(ReplicatedCkptError):
                client.read("step-1/.metadata", 0, memoryview(bytearray(len(SECRET_ELSEWHERE))))
        assert asked_there == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("heads", "body"),
    [
        (("Content-Range: bytes 0-9/10",), b"x" * 9),
        (("Content-Range: bytes 0-9/10",), b"x" * 11),
        (("Content-Encoding: gzip",), gzip.compress(b"x" * 10)),
        (("Content-Length: 10",), b"x" * 20),
    ],
)
def test_a_range_has_the_requested_length_or_raises_an_error(kind: str, heads: Sequence[str], body: bytes) -> None:
    """An answer with another length or a content encoding is not taken for the bytes of a shard, and takes no extra
    memory.
    """
    with client_of(kind, always(body, "206 Partial Content", *heads)) as (client, _), memory_at_most(1 << 29):
        target = bytearray(10)
        with suppress(ReplicatedCkptError):
            client.read("step-1/__0_0.distcp", 0, memoryview(target))
            assert bytes(target) == body[:10]
