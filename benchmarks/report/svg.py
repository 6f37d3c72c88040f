"""Charts of bars as SVG text, alike for alike figures."""

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#a463f2")
_FONT = 'font-family="system-ui, sans-serif" font-size="12"'
_ROW, _LABEL, _BAR, _WIDTH = 20, 330, 290, 800


@dataclass(frozen=True)
class Bars:
    """A group of horizontal bars under a heading: (label, value, what stands beside the bar)."""

    heading: str
    bars: Sequence[tuple[str, float, str]]


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


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">{escape(text)}</text>'


def _rectangle(x: float, y: float, width: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 1):.1f}" height="14" fill="{colour}"/>'


def _document(title: str, width: float, height: float, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" {_FONT} fill="#222">'
    ground = f'<rect width="{width}" height="{height}" fill="#fff"/>'
    heading = f'<text x="10" y="20" font-size="15" font-weight="bold">{escape(title)}</text>'
    return "\n".join([head, ground, heading, *parts, "</svg>", ""])
