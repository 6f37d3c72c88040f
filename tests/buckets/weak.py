"""A weak object store: it supports a part of S3, with weaker guarantees than S3.

A PUT that is cut off becomes an object with the bytes that arrived. If-None-Match and If-Match are ignored, checksums
are neither verified nor stored, and signatures are not checked.
"""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from socketserver import BaseRequestHandler, ThreadingTCPServer

from tests.buckets.memory_bucket import Ask, MemoryBucket, Object, Upload
from tests.buckets.servers import Server
from tests.buckets.wire import blocks, read_head


@dataclass(frozen=True)
class WeakStore(Server):
    """The endpoint, and the stored objects: tests may read and change them without requests."""

    objects_by_bucket: dict[str, dict[str, Object]] = field(default_factory=dict)
    upload_by_id: dict[str, Upload] = field(default_factory=dict)


def _serve(client: socket.socket, objects: MemoryBucket) -> None:
    """Serves the requests of one client one after the other."""
    with suppress(OSError), client.makefile("rb") as incoming:
        while (head := read_head(incoming)) is not None:
            if "100-continue" in head.value("Expect"):
                client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            body = bytearray()
            try:
                for block in blocks(incoming, head):
                    body += block
            except OSError:
                if head.first[0] == "PUT":  # the end of the connection counts as the end of the object
                    objects.answer(Ask.of(head, bytes(body)))
                return
            answer = objects.answer(Ask.of(head, bytes(body)))
            client.sendall(answer.encode(without_body=head.first[0] == "HEAD"))


class _Listener(ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 128


@contextmanager
def weak_server(*, refuses_checksums: bool = False) -> Iterator[WeakStore]:
    """An empty store in threads of this process. With `refuses_checksums` it refuses requests that carry a checksum."""
    objects = MemoryBucket(refuses_checksums=refuses_checksums)

    class Connection(BaseRequestHandler):
        def handle(self) -> None:
            _serve(self.request, objects)

    with _Listener(("127.0.0.1", 0), Connection) as listener:
        threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        try:
            url = f"http://127.0.0.1:{listener.server_address[1]}"
            yield WeakStore(url, "any", "any", objects.objects_by_bucket, objects.upload_by_id)
        finally:
            listener.shutdown()
