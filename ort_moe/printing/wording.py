"""Numbers and names of things in words, for sentences of every module."""

from __future__ import annotations

from collections.abc import Sequence


def counted(number: int, noun: str) -> str:
    """`1 expert`, `8 experts`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def some_of(names: Sequence[str], most: int, conjunction: str = "and") -> str:
    """`one, two and 3 more`: up to so many names, and the number of the others."""
    more = f" {conjunction} {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
