"""Writes the figures of one run into docs/measurements.md, as tables between marks, and draws their plots."""

import re
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report.page_plots import PLOTS, write_plots
from benchmarks.suites.results import Results, Row, distinct

BEGIN, END = "<!-- figures of a run: begin -->", "<!-- figures of a run: end -->"
SUMMARY = Path("docs/measurements.md")


class NoMarks(Exception):
    """A document has no marks for the figures."""


def written(results: Results, root: Path) -> list[Path]:
    """Fills docs/measurements.md and draws the plots. Returns the written files."""
    _fill(root / SUMMARY, summary(results))
    return [*write_plots(root), root / SUMMARY]


def summary(results: Results) -> str:
    """For each suite a table of times as multiples of stock torch's, with a column for each setup, and its plot."""
    lines = [_origin(results), ""]
    for suite, works, what in (
        ("save", ("save",), "save"),
        ("load", ("load",), "load"),
        ("small", ("save", "load"), "small tensors"),
    ):
        rows = [row for row in results.of(suite) if row.work in works and row.samples and row.case != row.base]
        if rows:
            setups = distinct(row.setup for row in rows)
            table = [
                (f"{work}: {case}" if len(works) > 1 else case, *_ratios(results, rows, work, case, setups))
                for work, case in dict.fromkeys((row.work, row.case) for row in rows)
            ]
            title = f"{what}: time, stock = 1"
            lines += [*_markdown((title, *setups), table), "", f"![{title}](../{PLOTS}/{suite}.svg)", ""]
    return "\n".join(lines)


def _ratios(results: Results, rows: Sequence[Row], work: str, case: str, setups: Sequence[str]) -> list[str]:
    found = {row.setup: results.ratio(row) for row in rows if (row.work, row.case) == (work, case)}
    return ["-" if (ratio := found.get(setup)) is None else f"{ratio:.2f}" for setup in setups]


def _origin(results: Results) -> str:
    machine = results.machine
    where = f"{machine['cores']} cores of {machine['cpu']}, torch {machine['torch']}, commit {machine['commit']}"
    return f"{machine['date']}, {where}; load of the machine before {machine['load_before']}."


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    rule = ["---", *["--:"] * (len(header) - 1)]
    return [f"| {' | '.join(line)} |" for line in (header, rule, *rows)]


def _fill(document: Path, text: str) -> None:
    before = document.read_text(encoding="utf-8")
    marked = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    if not marked.search(before):
        raise NoMarks(f"{document} has no lines {BEGIN} and {END}")
    document.write_text(marked.sub(lambda _: f"{BEGIN}\n{text.rstrip()}\n{END}", before), encoding="utf-8")
