"""Output options of verbs: `-o json`, and colours on a terminal that has them, unless NO_COLOR is set."""

import argparse
import os
import sys
from collections.abc import Iterable
from enum import Enum


def add_output_argument(parser: argparse.ArgumentParser, more: str = "") -> None:
    """Adds `-o json`. `more` is appended to its help."""
    help_ = "print text (default) or JSON" + (f"; {more}" if more else "")
    parser.add_argument("-o", "--output", dest="json", type=_is_json, default=False, metavar="{text,json}", help=help_)


def list_next_steps(lines: Iterable[str]) -> list[str]:
    """For JSON: the next steps of these lines for people."""
    mark = "next step: "
    return [line.removeprefix(mark) for line in lines if line.startswith(mark)]


def _is_json(text: str) -> bool:
    if text not in ("text", "json"):
        raise argparse.ArgumentTypeError(f"must be text or json, not {text!r}")
    return text == "json"


class Colour(Enum):
    """The number of the colour in an escape sequence of ECMA-48."""

    RED = 31
    GREEN = 32
    YELLOW = 33


def paint(text: str, colour: Colour) -> str:
    """The text in a colour if standard output is a terminal with colours and NO_COLOR is not set, else as it is.

    Source: https://no-color.org.
    """
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb":
        return text
    return f"\x1b[{colour.value}m{text}\x1b[0m"
