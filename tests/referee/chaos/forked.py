"""Takes the place of a program that ckpt-chaos starts. Lets `forking.py` fork the program, and exits with its exit
code.

Imports only the standard library, so that `python -S` starts it in 20 ms. If ckpt-chaos kills this process, the program
is killed too.
"""

import json
import os
import socket
import sys


def main() -> int:
    request = {"environment": dict(os.environ), "arguments": sys.argv[1:], "cwd": os.getcwd()}  # noqa: PTH109 - without pathlib
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as forker:
        forker.connect(os.environ["CHAOS_FORKER"])
        socket.send_fds(forker, [json.dumps(request).encode()], [1, 2])
        answer = forker.recv(64)
    return int(answer) if answer else 1


if __name__ == "__main__":
    sys.exit(main())
