"""Who asks an agent: whether it still waits for the answer. An agent that hung finds questions that were given up."""

import select
import socket


def require_asker(connection: socket.socket) -> None:
    """Goes on only while the answer is waited for.

    Raises:
        ConnectionAbortedError: the other end has closed the connection, or its own direction, whatever it has sent before.
    """
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    if poll.poll(0):
        raise ConnectionAbortedError("who asked this waits for no answer any more")
