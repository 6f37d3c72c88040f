"""Tables and times as people read them."""

import argparse
import contextlib
import threading
import time
from collections.abc import Sequence

from replicated_ckpt.wording import align

_MINUTE_S = 60


def format_moment(unix_s: float) -> str:
    """Local time; a dash where it is not known."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s)) if unix_s > 0 else "-"


def format_duration(seconds: float) -> str:
    whole = round(seconds)
    minutes, rest = divmod(whole, _MINUTE_S)
    hours, minutes = divmod(minutes, _MINUTE_S)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """All columns to the left; a number is set to the right by its caller."""
    return align([header, *rows], left=range(len(header)))


def parse_seconds(text: str) -> float:
    """An argument of a command. Raises ArgumentTypeError: no time that can be waited."""
    with contextlib.suppress(ValueError):
        # "nan" and "inf" are floats, too; beyond TIMEOUT_MAX a wait raises OverflowError.
        if 0 < float(text) <= threading.TIMEOUT_MAX:
            return float(text)
    raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, not {text!r}")
