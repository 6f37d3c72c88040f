"""Stands for a program that ckpt-chaos starts: has it forked with torch imported, lives as long, ends with its exit code.

Imports the standard library alone; `python -S` starts it in 20 ms. If ckpt-chaos kills it, the program is killed.
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
