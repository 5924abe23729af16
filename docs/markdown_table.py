"""A table in Markdown."""

from __future__ import annotations

from collections.abc import Iterable


def markdown_table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Of the cells of its head and of each row."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
