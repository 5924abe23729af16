"""Numbers of things in words, for sentences of every module."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """`1 expert`, `8 experts`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
