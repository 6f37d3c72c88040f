"""Figures in the documents: one page of tables, and plots, of one run, between marks, in place of what was there."""

import re
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report.plots import plots
from benchmarks.suites.results import Results, Row, distinct

BEGIN, END = "<!-- figures of a run: begin -->", "<!-- figures of a run: end -->"
PLOTS = Path("benchmarks/plots")
SUMMARY = Path("docs/measurements.md")


class NoMarks(Exception):
    """A document does not say where its figures go."""


def written(results: Results, root: Path) -> list[Path]:
    """Fills docs/measurements.md and draws the plots; returns what was written."""
    folder = root / PLOTS
    folder.mkdir(parents=True, exist_ok=True)
    drawn = plots(results)
    for name, text in drawn.items():
        (folder / name).write_text(text, encoding="utf-8")
    _fill(root / SUMMARY, summary(results, sorted(drawn)))
    return [*(folder / name for name in sorted(drawn)), root / SUMMARY]


def summary(results: Results, drawn: Sequence[str]) -> str:
    """Times as multiples of stock torch's, a column for each setup, and the plots of saves and loads."""
    lines = [_origin(results), ""]
    for suite, work in (("save", "save"), ("load", "load"), ("small", "save"), ("small", "load")):
        rows = [row for row in results.of(suite) if row.work == work and row.samples]
        if rows:
            setups = distinct(row.setup for row in rows)
            table = [(case, *_ratios(results, rows, case, setups)) for case in distinct(row.case for row in rows)]
            what = f"{'small tensors, ' if suite == 'small' else ''}{work}: time, stock = 1"
            lines += [*_markdown((what, *setups), table), ""]
    lines += [
        f"![{name.removesuffix('.svg')}](../{PLOTS}/{name})\n" for name in ("save.svg", "load.svg") if name in drawn
    ]
    return "\n".join(lines)


def _ratios(results: Results, rows: Sequence[Row], case: str, setups: Sequence[str]) -> list[str]:
    found = {row.setup: results.ratio(row) for row in rows if row.case == case}
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
