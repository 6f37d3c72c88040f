"""The plots that the documents show, drawn from results."""

from collections.abc import Mapping

from benchmarks.report.svg import Bars, Panel, bar_chart, line_chart
from benchmarks.suites.results import Results, Row, Work, distinct


def plots(results: Results) -> Mapping[str, str]:
    """SVG by name of the file, for the suites that ran."""
    drawn: dict[str, str] = {}
    for suite, kind, what in (
        ("save", "save", "Save"),
        ("load", "load", "Load"),
        ("peers", "save", "Save compared with others"),
    ):
        if groups := _against_base(results, suite, kind):
            name = suite if suite == kind else f"{suite}-{kind}"
            drawn[f"{name}.svg"] = bar_chart(f"{what}: time, stock torch = 1", groups, mark=1.0)
    kinds: tuple[Work, ...] = ("save", "load")
    for work in kinds:
        if panels := _growth(results, work):
            drawn[f"growth-{work}.svg"] = line_chart(f"How a {work} grows, on tmpfs", panels)
    if groups := _emulated(results):
        drawn["emulated.svg"] = bar_chart("Emulated cluster: save, time / max(disk, network)", groups, mark=1.0)
    return drawn


def _against_base(results: Results, suite: str, work: str) -> list[Bars]:
    rows = [row for row in results.of(suite) if row.work == work and row.samples]
    groups = []
    for setup in distinct(row.setup for row in rows):
        bars = [_bar(results, row) for row in rows if row.setup == setup and results.base_of(row)]
        groups.append(Bars(setup, bars))
    return [group for group in groups if group.bars]


def _bar(results: Results, row: Row) -> tuple[str, float, str]:
    ratio = results.ratio(row)
    assert ratio is not None
    return row.case, ratio, f"{ratio:.2f} ({row.seconds:.2f} s)"


def _growth(results: Results, work: Work) -> list[Panel]:
    rows = [row for row in results.of("growth") if row.work == work]
    panels = []
    for axis in distinct(row.setup for row in rows):
        here = [row for row in rows if row.setup == axis]
        lines = [
            (case, [(row.x, row.seconds) for row in here if row.case == case and row.x is not None])
            for case in distinct(row.case for row in here)
        ]
        panels.append(Panel(axis, lines))
    return panels


def _emulated(results: Results) -> list[Bars]:
    rows = [row for row in results.of("emulated") if row.work == "save" and row.samples]
    groups = []
    for setup in distinct(row.setup for row in rows):
        bars = [
            (row.case, row.seconds / row.limit_s, f"{row.seconds / row.limit_s:.2f} ({row.seconds:.2f} s)")
            for row in rows
            if row.setup == setup and row.limit_s
        ]
        groups.append(Bars(setup, bars))
    return groups
