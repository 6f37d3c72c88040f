"""The body of a range of a file, as it comes in from a peer: how far it has come by when."""

import errno
import http.client
import time

from replicated_ckpt.stores.verified import TooSlow


class CutOff(ConnectionResetError):
    """The connection has ended in the middle of a range: it was cut, the peer has gone, or its disk does not give all."""


def fill(target: memoryview, response: http.client.HTTPResponse, until_s: float, within_s: float) -> None:
    """Fills `target` with the whole body of an answer that has its length.

    Raises:
        TooSlow: it has not all come by `until_s` of the monotonic clock, `within_s` after it was asked for. CutOff: it ends
            before. OSError: no byte has come for the time-out of the connection.
    """
    done = 0
    while done < len(target):
        if time.monotonic() > until_s:
            raise TooSlow(f"too slow: {done} of {len(target)} bytes within {within_s:.0f} s")
        try:
            count = response.fp.readinto1(target[done:])  # what is there by now: all of it may never be
        except ConnectionResetError as exc:
            raise CutOff(*exc.args) from exc
        if count == 0:
            raise CutOff(errno.ECONNRESET, "the peer closed the connection in the middle")
        done += count
    response.close()  # the connection stays open: its next answer begins here
