"""`-o json`: whether a verb prints text or JSON."""

import argparse


def add_output_argument(parser: argparse.ArgumentParser, more: str = "") -> None:
    """Adds `-o json`. `more`: what else the help says."""
    said = "print text (default) or JSON" + (f"; {more}" if more else "")
    parser.add_argument("-o", "--output", dest="json", type=_is_json, default=False, metavar="{text,json}", help=said)


def _is_json(text: str) -> bool:
    if text not in ("text", "json"):
        raise argparse.ArgumentTypeError(f"it is text or json, not {text!r}")
    return text == "json"
