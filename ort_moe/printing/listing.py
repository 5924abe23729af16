"""A table that makes itself fit: phrases are wrapped before a name is broken."""

from __future__ import annotations

from collections.abc import Collection

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Column, Table

_SHORTEST = 8
"""Columns that every column keeps."""
_BETWEEN = 3
"""Columns between two columns."""


class Listing(Table):
    """A table whose columns of prose give way first, then the widest of the others.

    Args:
        title: Above it.
        prose: Headings of the columns of prose.
    """

    def __init__(self, *, title: str | None, prose: Collection[str]) -> None:
        super().__init__(box=SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
        self._prose = prose

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for column, width in zip(self.columns, self._widths(console, options), strict=True):
            column.width = width
        yield from super().__rich_console__(console, options)

    def _widths(self, console: Console, options: ConsoleOptions) -> list[int]:
        measures = [_measure(column, console, options) for column in self.columns]
        widths = [measure.maximum for measure in measures]
        excess = sum(widths) + _BETWEEN * (len(widths) - 1) + 2 - options.max_width
        prose = [column.header in self._prose for column in self.columns]
        words = [max(_SHORTEST, measure.minimum) for measure in measures]
        for may_shrink, floors in (
            (prose, words),
            ([not each for each in prose], [_SHORTEST] * len(widths)),
            (prose, [_SHORTEST] * len(widths)),
            ([True] * len(widths), [1] * len(widths)),
        ):
            columns = [i for i, may in enumerate(may_shrink) if may]
            while excess > 0 and (wide := [i for i in columns if widths[i] > floors[i]]):
                widths[max(wide, key=widths.__getitem__)] -= 1
                excess -= 1
        return widths


def _measure(column: Column, console: Console, options: ConsoleOptions) -> Measurement:
    cells = [Measurement.get(console, options.update(width=10_000), cell) for cell in (column.header, *column.cells)]
    return Measurement(max(cell.minimum for cell in cells), max(cell.maximum for cell in cells))
