"""The plots of the documents: each is drawn from the table above it, so both show the same figures.

python -m benchmarks.report.page_plots
"""

import re
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.machine import HOME
from benchmarks.report.svg import Bars, bar_chart

PLOTS = Path("benchmarks/plots")
_TABLE_WITH_PLOT = re.compile(r"((?:^\|.*\|\n)+)\n!\[([^\]]+)\]\(\.\./benchmarks/plots/([\w-]+\.svg)\)$", re.MULTILINE)


def write_plots(root: Path) -> list[Path]:
    """Draws the plots of all pages of docs/. Returns the written files."""
    (root / PLOTS).mkdir(parents=True, exist_ok=True)
    written = []
    for page in sorted((root / "docs").glob("*.md")):
        for name, text in draw_plots(page.read_text(encoding="utf-8")):
            written.append(root / PLOTS / name)
            written[-1].write_text(text, encoding="utf-8")
    return written


def draw_plots(page: str) -> Iterator[tuple[str, str]]:
    """File name and SVG of each plot of a page. A title that ends with `: COLUMN` plots that column alone."""
    for table, title, name in _TABLE_WITH_PLOT.findall(page):
        header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines())
        named = [column for column in header[1:] if title.endswith(f": {column}")]
        groups = [_bars(column, rows, header.index(column)) for column in named or header[1:]]
        mark = 1.0 if "= 1" in header[0] + title else None
        better = "higher" if "/s" in title else "lower"
        yield name, bar_chart(f"{title} ({better} is better)", [group for group in groups if group.bars], mark=mark)


def _bars(column: str, rows: Sequence[Sequence[str]], index: int) -> Bars:
    bars = [(row[0].replace("`", ""), value, row[index]) for row in rows if (value := _mean(row[index])) is not None]
    return Bars(column.replace("`", ""), bars)


def _mean(cell: str) -> float | None:
    """The number in a cell, or the mean of a range or of several runs. Text in brackets does not count."""
    numbers = re.findall(r"\d+(?:\.\d+)?", re.sub(r"\(.*?\)", "", cell))
    return statistics.mean(map(float, numbers)) if numbers else None


if __name__ == "__main__":
    print(*write_plots(HOME), sep="\n")
