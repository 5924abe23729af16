"""Results that print: drawn by rich on a terminal, and as plain text elsewhere and through `str`.

On a terminal prose is wrapped at its width. Plain text keeps each sentence on its line, for tools that search it and
editors that wrap it; only tables keep to a width.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

PLAIN_WIDTH = 120
"""Columns of a table in plain text."""


class Printable(ABC):
    """A result of the public API; `print(result)` shows it."""

    @abstractmethod
    def __rich__(self) -> RenderableType:
        """What rich draws: groups, texts, paragraphs and tables."""

    def __str__(self) -> str:
        return plain(self)


def plain(renderable: RenderableType, width: int = PLAIN_WIDTH) -> str:
    """A printable result as plain text whose tables are at most `width` columns wide."""
    from rich.console import Group
    from rich.markdown import Markdown
    from rich.padding import Padding
    from rich.text import Text

    if isinstance(renderable, Printable):
        return plain(renderable.__rich__(), width)
    if isinstance(renderable, Group):
        # Tables bring an empty line before and behind them: one is enough between two.
        return re.sub(r"\n{3,}", "\n\n", "\n".join(plain(part, width) for part in renderable.renderables))
    if isinstance(renderable, Padding):
        lines = plain(renderable.renderable, width - renderable.left).splitlines()
        return "\n".join(" " * renderable.left + line if line else "" for line in lines)
    if isinstance(renderable, Text):
        return renderable.plain
    if isinstance(renderable, Markdown):
        return renderable.markup
    return _drawn(renderable, width)


def paragraph(text: str, *, indent: int = 0, style: str = "") -> RenderableType:
    """Prose of which every line is indented, also where a terminal wraps it."""
    from rich.padding import Padding
    from rich.text import Text

    return Padding(Text(text, style=style), (0, 0, 0, indent))


def table(
    *headings: str, numbers: tuple[str, ...] = (), prose: tuple[str, ...] = (), title: str | None = None
) -> Table:
    """An empty table in the one style that all output has.

    Args:
        headings: Of the columns.
        numbers: Headings of columns that are right-aligned.
        prose: Headings of columns that give way first, at their spaces, where there is too little room.
        title: Above it.
    """
    from ort_moe.printing.listing import Listing

    made = Listing(title=title, prose=prose)
    for heading in headings:
        made.add_column(heading, justify="right" if heading in numbers else "left", overflow="fold")
    return made


def byte_size(nbytes: float) -> str:
    """A number of bytes in a unit that suits it."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while nbytes >= 1024 and len(units) > 1:
        nbytes /= 1024
        del units[0]
    return f"{nbytes:.0f} B" if units[0] == "B" else f"{nbytes:.1f} {units[0]}"


def _drawn(renderable: RenderableType, width: int) -> str:
    from io import StringIO

    from rich.console import Console

    text = StringIO()
    Console(file=text, width=width, color_system=None, legacy_windows=False).print(renderable)
    return "\n".join(line.rstrip() for line in text.getvalue().rstrip("\n").split("\n"))
