"""Results that print: on a terminal through rich, and as plain text through `str`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

PLAIN_WIDTH = 120
"""Columns of the plain text."""


class Printable(ABC):
    """A result of the public API; `print(result)` shows it."""

    @abstractmethod
    def __rich__(self) -> RenderableType:
        """What rich draws."""

    def __str__(self) -> str:
        from io import StringIO

        from rich.console import Console

        text = StringIO()
        Console(file=text, width=PLAIN_WIDTH, color_system=None, legacy_windows=False).print(self)
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def table(*headings: str, numbers: tuple[str, ...] = (), title: str | None = None) -> Table:
    """An empty table in the one style that all output has; the columns named in `numbers` are right-aligned."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    made = Table(box=SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    for heading in headings:
        made.add_column(heading, justify="right" if heading in numbers else "left", overflow="fold")
    return made
