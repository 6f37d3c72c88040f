"""Writes the options of every verb, as `--help` prints them, into docs/cli.md: `python -m tools.cli_page`."""

import contextlib
import io
import os
import re
from collections.abc import Sequence
from pathlib import Path

from replicated_ckpt.cli.main import VERBS, parser
from replicated_ckpt.environment import ROOT_ENV

BEGIN, END = "<!-- help: begin -->", "<!-- help: end -->"
PAGE = Path(__file__).resolve().parents[1] / "docs" / "cli.md"
os.environ |= {"COLUMNS": "120", "NO_COLOR": "1"}  # argparse reads both when it prints
os.environ.pop(ROOT_ENV, None)  # if it is set, `--root` is optional


COMMON = "options of several verbs"
_COMMON_FROM = 3
_NAME = re.compile(r"((?:-\S+(?: [A-Z]+| {[^}]*})?,? ?)+) (.*)")
_OPTION = re.compile(r"^  -.*(?:\n {4,}.*)*\n?", re.MULTILINE)


def help_by_verb() -> dict[str, str]:
    """The output of `replicated-ckpt VERB --help`, without `--help` itself and without optional flags in the usage.

    Options that several verbs describe in the same words are in COMMON instead.
    """
    given = {verb: _help(verb) + "\n" for verb in VERBS}
    verbs_by_option: dict[str, list[str]] = {}
    for verb, text in given.items():
        for option in _OPTION.findall(text):
            verbs_by_option.setdefault(" ".join(option.split()), []).append(verb)
    common = {option for option, verbs in verbs_by_option.items() if len(verbs) >= _COMMON_FROM}

    def keep(option: re.Match[str]) -> str:
        return "" if " ".join(option[0].split()) in common else option[0]

    shown = {COMMON: "\n".join(_describe(option, verbs_by_option[option]) for option in sorted(common))}
    for verb, text in given.items():
        shown[verb] = re.sub(r"\n+options:\n+$", "\n", _OPTION.sub(keep, text)).rstrip()
    return shown


def _describe(option: str, verbs: Sequence[str]) -> str:
    found = _NAME.fullmatch(option)
    assert found is not None, option
    name, words = found.groups()
    return f"{name}\n    {words}\n    in: {', '.join(verbs)}"


def _help(verb: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        parser().parse_args([verb, "--help"])
    usage, _, rest = re.sub(r"\n  -h, --help .*", "", printed.getvalue()).partition("\n\n")
    required = re.sub(r" *\[-[^][]*(\[[^][]*])?]", "", " ".join(usage.split()))
    return f"{required}\n\n{rest}"


def help_section() -> str:
    """The text between the marks."""
    return "\n".join(f"### {verb}\n\n```text\n{text.rstrip()}\n```\n" for verb, text in help_by_verb().items())


def with_help(page: str) -> str:
    """The page with the current options."""
    marked = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    return marked.sub(lambda _: f"{BEGIN}\n{help_section()}{END}", page)


if __name__ == "__main__":
    PAGE.write_text(with_help(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
