"""An S3 server in memory: `python -m replicated_ckpt.drill.moto_server BUCKET` prints its URL and serves until stdin ends.

So it also ends when the process at the other end of stdin is killed.
"""

import argparse
import http.client
import logging
import sys
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from werkzeug.serving import BaseWSGIServer

_CONDITIONS = ("HTTP_IF_NONE_MATCH", "HTTP_IF_MATCH")


def make_moto_server() -> "BaseWSGIServer":
    """moto's server on a free port of loopback, not yet serving. Its conditional writes exclude each other, as in S3.

    moto 5.1 alone checks the condition and writes in two steps, so several concurrent writers may succeed.
    """
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # otherwise it logs each request
    app, one_at_a_time = DomainDispatcherApplication(create_backend_app), threading.Lock()

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] == "PUT" and any(name in environ for name in _CONDITIONS):
            with one_at_a_time:
                return app(environ, start_response)  # type: ignore[no-any-return]
        return app(environ, start_response)  # type: ignore[no-any-return]

    return make_server("127.0.0.1", 0, answer, threaded=True, request_handler=MotoRequestHandler)


def main() -> int:
    """Serve one empty bucket on a free port of loopback."""
    parser = argparse.ArgumentParser(prog="python -m replicated_ckpt.drill.moto_server")
    parser.add_argument("bucket")
    bucket = parser.parse_args().bucket
    server = make_moto_server()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    made = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    made.request("PUT", f"/{bucket}")
    if made.getresponse().status != http.HTTPStatus.OK:
        return 1
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    # Returns also when the drill is killed: the kernel closes its end of the pipe.
    sys.stdin.buffer.read()
    return 0


if __name__ == "__main__":
    sys.exit(main())
