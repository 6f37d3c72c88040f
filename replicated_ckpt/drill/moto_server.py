"""An S3 server in memory: `python -m replicated_ckpt.drill.moto_server BUCKET` prints its URL and serves until stdin ends.

The process at the other end of stdin need do nothing to end it, not even when killed.
"""

import argparse
import http.client
import logging
import sys


def main() -> int:
    """Serve one empty bucket on a free port of loopback."""
    parser = argparse.ArgumentParser(prog="python -m replicated_ckpt.drill.moto_server")
    parser.add_argument("bucket")
    bucket = parser.parse_args().bucket
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # else one line for each request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    made = http.client.HTTPConnection(host, port, timeout=10)
    made.request("PUT", f"/{bucket}")
    if made.getresponse().status != http.HTTPStatus.OK:
        return 1
    print(f"http://{host}:{port}", flush=True)
    # Ends also when the drill is killed: the kernel closes its end of the pipe.
    sys.stdin.buffer.read()
    return 0


if __name__ == "__main__":
    sys.exit(main())
