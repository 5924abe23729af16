"""Small line plots side by side as one SVG, both axes logarithmic: the same text for the same numbers.

Written by hand because pages are compared with what their numbers give, letter by letter, and plotting libraries write
something else with every version.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

_WIDTH, _HEIGHT = 400, 250  # of a panel
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 22, 30, 34  # between a panel's edge and its axes
_LEGEND = 26
_FONT = 'font-family="sans-serif" font-size="11"'


class Style(NamedTuple):
    """How the lines of one name are drawn."""

    name: str
    color: str
    dashes: str = ""


class Line(NamedTuple):
    """A line of the panel, by its style's name; points (x, y), all above 0."""

    name: str
    points: Sequence[tuple[float, float]]


class Panel(NamedTuple):
    """One plot."""

    title: str
    lines: Sequence[Line]


def line_plots(panels: Sequence[Panel], styles: Sequence[Style], x_label: str, y_label: str, columns: int = 2) -> str:
    """The panels, in rows of `columns`, below one legend; as SVG.

    Args:
        panels: At least one, with a point each.
        styles: Of all lines, in the order of the legend.
        x_label: Below each horizontal axis, whose ticks are powers of two.
        y_label: Above each vertical axis, whose ticks are powers of ten.
        columns: Panels side by side.
    """
    rows = -(-len(panels) // columns)
    width, height = _WIDTH * min(columns, len(panels)), _HEIGHT * rows + _LEGEND
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for n, style in enumerate(styles):
        x = 14 + n * (width - 14) // len(styles)
        parts.append(_path([(x, 15), (x + 26, 15)], style))
        parts.append(f'<text x="{x + 31}" y="19" {_FONT}>{escape(style.name)}</text>')
    for n, panel in enumerate(panels):
        parts.append(f'<g transform="translate({n % columns * _WIDTH} {n // columns * _HEIGHT + _LEGEND})">')
        parts += _panel(panel, {style.name: style for style in styles}, x_label, y_label)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>\n"])


def _panel(panel: Panel, styles: dict[str, Style], x_label: str, y_label: str) -> list[str]:
    points = [point for line in panel.lines for point in line.points]
    x_ticks = _powers(2, min(x for x, _ in points), max(x for x, _ in points))
    y_ticks = _powers(10, min(y for _, y in points), max(y for _, y in points))

    def place(x: float, y: float) -> tuple[float, float]:
        across, up = _share(x, x_ticks), _share(y, y_ticks)
        return _LEFT + across * (_WIDTH - _LEFT - _RIGHT), _HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM)

    parts = [f'<text x="{_LEFT}" y="13" {_FONT} font-weight="bold">{escape(panel.title)}</text>']
    grid = Style("", "#dddddd")
    for tick in x_ticks:
        x, bottom = place(tick, y_ticks[0])
        parts.append(_path([(x, bottom), place(tick, y_ticks[-1])], grid, 1))
        parts.append(f'<text x="{x:.1f}" y="{bottom + 13:.1f}" {_FONT} text-anchor="middle">{tick:g}</text>')
    for tick in y_ticks:
        left, y = place(x_ticks[0], tick)
        parts.append(_path([(left, y), place(x_ticks[-1], tick)], grid, 1))
        parts.append(f'<text x="{left - 4:.1f}" y="{y + 4:.1f}" {_FONT} text-anchor="end">{tick:g}</text>')
    parts.append(f'<text x="{_LEFT - 4}" y="{_TOP - 5}" {_FONT} text-anchor="end">{escape(y_label)}</text>')
    parts.append(f'<text x="{_WIDTH / 2:.1f}" y="{_HEIGHT - 6}" {_FONT} text-anchor="middle">{escape(x_label)}</text>')
    parts += [_path([place(*point) for point in line.points], styles[line.name]) for line in panel.lines]
    return parts


def _powers(base: int, least: float, most: float) -> list[float]:
    """Two powers of the base at least, around the numbers; at most some eight, at equal distances."""
    first, last = math.floor(math.log(least, base) + 1e-9), math.ceil(math.log(most, base) - 1e-9)
    last = max(last, first + 1)
    step = -(-(last - first) // 7)
    return [float(base) ** n for n in range(first, last + step, step)]


def _share(value: float, ticks: Sequence[float]) -> float:
    """Where the value lies between the first tick, 0, and the last, 1."""
    return math.log(value / ticks[0]) / math.log(ticks[-1] / ticks[0])


def _path(points: Sequence[tuple[float, float]], style: Style, width: float = 1.8) -> str:
    data = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    dashes = f' stroke-dasharray="{style.dashes}"' if style.dashes else ""
    return f'<path d="M{data}" fill="none" stroke="{style.color}" stroke-width="{width}"{dashes}/>'
