"""Tables and numbers as people read them."""

import time
from collections.abc import Sequence

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_STEP = 1000
_MINUTE_S = 60


def format_bytes(size_bytes: float) -> str:
    """Three digits and a unit; decimal units, as disks are sold."""
    size, unit = float(size_bytes), 0
    while size >= _STEP - 0.5 and unit < len(_UNITS) - 1:
        size, unit = size / _STEP, unit + 1
    return f"{size:.0f} {_UNITS[unit]}" if unit == 0 or size >= 99.95 else f"{size:.1f} {_UNITS[unit]}"


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
    """Columns as wide as what stands in them; a number is set to the right by its caller."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (header, *rows))
    return "\n".join(line.rstrip() for line in lines)
