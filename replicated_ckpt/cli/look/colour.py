"""Colours of verdicts, on terminals that show them and for users who want them."""

import os
import sys
from enum import Enum


class Colour(Enum):
    """The number of the colour in an escape sequence of ECMA-48."""

    RED = 31
    GREEN = 32
    YELLOW = 33


def paint(text: str, colour: Colour) -> str:
    """The text in a colour if standard output is a terminal with colours, and NO_COLOR is not set; else the text.

    Source: https://no-color.org.
    """
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb":
        return text
    return f"\x1b[{colour.value}m{text}\x1b[0m"
