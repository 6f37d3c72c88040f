"""Charts as SVG text, alike for alike figures: bars beside each other, and lines on logarithmic axes."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#a463f2")
_FONT = 'font-family="system-ui, sans-serif" font-size="12"'
_ROW, _LABEL, _BAR, _WIDTH = 20, 330, 380, 800
_PANEL_WIDTH, _PANEL_HEIGHT, _MARGIN = 390, 250, 50


@dataclass(frozen=True)
class Bars:
    """A group of horizontal bars under a heading: (label, value, what stands beside the bar)."""

    heading: str
    bars: Sequence[tuple[str, float, str]]


@dataclass(frozen=True)
class Panel:
    """One chart of lines: points (x, y) by the name of the line. Both axes are logarithmic."""

    heading: str
    lines: Sequence[tuple[str, Sequence[tuple[float, float]]]]


def bar_chart(title: str, groups: Sequence[Bars], *, mark: float | None = None) -> str:
    """`mark` is a value at which a vertical line stands."""
    largest = max(value for group in groups for _, value, _ in group.bars)
    scale = _BAR / max(largest, mark or 0.0)
    y, parts = 50, []
    for group in groups:
        parts.append(_text(10, y, group.heading, weight="bold"))
        for index, (label, value, beside) in enumerate(group.bars):
            y += _ROW
            parts.append(_text(_LABEL - 8, y, label, anchor="end"))
            parts.append(_rectangle(_LABEL, y - 12, value * scale, COLOURS[index % len(COLOURS)]))
            parts.append(_text(_LABEL + value * scale + 5, y, beside))
        y += 2 * _ROW
    if mark is not None:
        x = _LABEL + mark * scale
        parts.insert(0, f'<line x1="{x:.1f}" y1="40" x2="{x:.1f}" y2="{y - 30}" stroke="#888" stroke-dasharray="4 3"/>')
    return _document(title, _WIDTH, y, parts)


def line_chart(title: str, panels: Sequence[Panel]) -> str:
    """Two panels in a row; colours are the same for the same name in all of them, and explained below."""
    names = list(dict.fromkeys(name for panel in panels for name, _ in panel.lines))
    parts: list[str] = []
    for index, panel in enumerate(panels):
        left, top = index % 2 * _PANEL_WIDTH, 40 + index // 2 * _PANEL_HEIGHT
        parts += _panel(panel, names, left, top)
    y = 40 + -(-len(panels) // 2) * _PANEL_HEIGHT + 10
    for index, name in enumerate(names):
        x = _MARGIN + index % 3 * 240
        y += _ROW if index and index % 3 == 0 else 0
        parts.append(_rectangle(x, y - 11, 12, COLOURS[index % len(COLOURS)]))
        parts.append(_text(x + 18, y, name))
    return _document(title, _WIDTH, y + 15, parts)


def _panel(panel: Panel, names: Sequence[str], left: float, top: float) -> Iterator[str]:
    xs = sorted({x for _, points in panel.lines for x, _ in points})
    ys = [y for _, points in panel.lines for _, y in points]
    low, high = 10 ** math.floor(math.log10(min(ys))), 10 ** math.ceil(math.log10(max(ys) * 1.0001))
    width, height = _PANEL_WIDTH - _MARGIN - 30, _PANEL_HEIGHT - 75

    def at(x: float, y: float) -> tuple[float, float]:
        across = math.log(x / xs[0]) / math.log(xs[-1] / xs[0]) if xs[-1] > xs[0] else 0.5
        return left + _MARGIN + across * width, top + 25 + height * (1 - math.log(y / low) / math.log(high / low))

    yield _text(left + _MARGIN, top + 10, panel.heading, weight="bold")
    for exponent in range(round(math.log10(low)), round(math.log10(high)) + 1):
        x, y = at(xs[0], 10.0**exponent)
        yield f'<line x1="{left + _MARGIN}" y1="{y:.1f}" x2="{left + _MARGIN + width}" y2="{y:.1f}" stroke="#ddd"/>'
        yield _text(left + _MARGIN - 6, y + 4, f"{10.0**exponent:g} s", anchor="end")
    for value in xs:
        yield _text(at(value, low)[0], top + 45 + height, f"{value:.4g}", anchor="middle")
    for name, points in panel.lines:
        colour = COLOURS[names.index(name) % len(COLOURS)]
        corners = " ".join("{:.1f},{:.1f}".format(*at(x, y)) for x, y in sorted(points))
        yield f'<polyline points="{corners}" fill="none" stroke="{colour}" stroke-width="2"/>'
        for x, y in sorted(points):
            across, down = at(x, y)
            yield f'<circle cx="{across:.1f}" cy="{down:.1f}" r="3" fill="{colour}"/>'


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">{escape(text)}</text>'


def _rectangle(x: float, y: float, width: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 1):.1f}" height="14" fill="{colour}"/>'


def _document(title: str, width: float, height: float, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" {_FONT} fill="#222">'
    ground = f'<rect width="{width}" height="{height}" fill="#fff"/>'
    heading = f'<text x="10" y="20" font-size="15" font-weight="bold">{escape(title)}</text>'
    return "\n".join([head, ground, heading, *parts, "</svg>", ""])
