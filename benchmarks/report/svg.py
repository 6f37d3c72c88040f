"""Bar charts as SVG text; the same figures give the same text. The background follows the reader's light or dark theme."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

_FONT = 'font-family="system-ui,sans-serif" font-size="13"'
_ROW, _LABEL, _BAR, _WIDTH = 21, 330, 360, 820
_COLOURS = (("#0969da", "#4493f8"), ("#bc4c00", "#f0883e"), ("#1a7f37", "#3fb950"), ("#8250df", "#ab7df8"))
"""Colours of bars on a light and on a dark background."""


@dataclass(frozen=True)
class Bars:
    """A group of horizontal bars under a heading: (label, value, text beside the bar)."""

    heading: str
    bars: Sequence[tuple[str, float, str]]


def bar_chart(title: str, groups: Sequence[Bars], *, mark: float | None = None) -> str:
    """Bars whose labels begin with the same word have the same colour. `mark` draws a vertical line at that value."""
    kinds = list(dict.fromkeys(_kind(label) for group in groups for label, _, _ in group.bars))
    scale = _BAR / max(mark or 0.0, *(value for group in groups for _, value, _ in group.bars))
    y, parts = 58, []
    for group in groups:
        parts.append(_text(16, y, group.heading, kind="h"))
        for label, value, beside in group.bars:
            y += _ROW
            parts.append(_text(_LABEL - 8, y, label, kind="e"))
            parts.append(_rectangle(_LABEL, y - 12, value * scale, kinds.index(_kind(label)) % len(_COLOURS)))
            parts.append(_text(_LABEL + value * scale + 6, y, beside))
        y += 2 * _ROW
    if mark is not None:
        x = _LABEL + mark * scale
        parts.insert(0, f'<path class="m" d="M{x:.1f} 44V{y - 30}"/>')
    return "\n".join([*_head(title, y - _ROW), *parts, "</svg>", ""])


def _kind(label: str) -> str:
    """The first word of a label, which selects the bar's colour. All numbers have the same colour."""
    word = label.split(maxsplit=1)[0].rstrip(",:")
    return "" if word[0].isdigit() else word


def _text(x: float, y: float, text: str, *, kind: str = "") -> str:
    styled = f' class="{kind}"' if kind else ""
    return f'<text{styled} x="{x:.1f}" y="{y}">{escape(text)}</text>'


def _rectangle(x: float, y: float, width: float, colour: int) -> str:
    return f'<rect class="b{colour}" x="{x}" y="{y}" width="{max(width, 1):.1f}" height="14" rx="2"/>'


def _head(title: str, height: float) -> Iterator[str]:
    size = f'viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}"'
    yield f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" {_FONT}>'
    yield f"<title>{escape(title)}</title>"
    yield "<style>.h{font-weight:600}.e{text-anchor:end}.m{stroke-width:1.5;stroke-dasharray:4 3}"
    for index, (ground, ink, line) in enumerate((("#fff", "#1f2328", "#818b98"), ("#0d1117", "#f0f6fc", "#9198a1"))):
        bars = "".join(f".b{number}{{fill:{colours[index]}}}" for number, colours in enumerate(_COLOURS))
        halo = f"paint-order:stroke;stroke:{ground};stroke-width:4px"  # a number beside a short bar covers the line
        rules = f".g{{fill:{ground}}}text{{fill:{ink};{halo}}}.m{{stroke:{line}}}{bars}"
        yield rules if index == 0 else f"@media(prefers-color-scheme:dark){{{rules}}}</style>"
    yield f'<rect class="g" width="{_WIDTH}" height="{height}" rx="6"/>'
    yield f'<text x="16" y="28" font-size="16" font-weight="600">{escape(title)}</text>'
